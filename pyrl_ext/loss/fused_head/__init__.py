"""Log-probability and entropy of tokens from hidden states and the LM head: never all logits.

Tokens are taken in chunks. The logits of a chunk come out of the matrix product in float32, are
read once for the statistics of each token and, for the gradient, once more; then they are gone.

``linear_logprob`` returns values that any loss can be made of. Its backward needs the logits a
second time: it recomputes them (8 T V H floating-point operations in all), or takes them from a
cache of ``cache_bytes`` (6 T V H). ``linear_logprob_loss`` runs a token-wise loss inside the chunk,
so that forward and backward are one pass over the chunks (6 T V H) and no logits are kept.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrl_ext.loss.fused_head.chunking import Job, describe, wide
from pyrl_ext.loss.fused_head.collectives import HiddenGrad, combined, hidden_chunks
from pyrl_ext.loss.fused_head.tiles import Head, Kept

LossOfChunk = Callable[[Tensor, Tensor, Tensor], Tensor]

CHUNK_BYTES = 1 << 30


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    rows: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    cache_bytes: int = 0,
    sequence_parallel: bool = False,
    main_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """``vocab_parallel_logprob(hidden @ weight.T, ...)`` with its entropy, a chunk at a time.

    The logits of bfloat16 and float16 products are used as they are added up, in float32; their
    gradients are rounded to the type of ``weight`` for the two products of the backward, whose sums
    are float32 again. A second backward is right.

    Args:
        hidden:  [T, H] float32, bfloat16, float16 or float64; with ``sequence_parallel``
            [T / ranks, H], rank r's being tokens ``[r * T / ranks, (r + 1) * T / ranks)``.
        weight:  [V_local, H] dtype of ``hidden``; rank r of ``group`` holds columns
            ``[r * V_local, (r + 1) * V_local)`` of the vocabulary.
        targets: [T] int64, global column.
        group:   the ranks that hold the vocabulary; None: this one alone.
        temperature: positive, one number or [T]; not differentiated.
        valid_vocab: columns from here on are padding and have no part; None: all are valid.
        rows:    [N] int64 on the host: only these tokens are computed, forward and backward; the
            others are NaN, their targets are not looked at and their gradient is 0. None: all. A
            token whose gradient turns out to be 0 costs as much as any other: to leave it out, its
            number would have to be waited for.
        chunk_bytes: of a chunk's logits and their gradients; a CPU takes 512 tokens at most.
        cache_bytes: of logits, in bfloat16, kept for the backward; it recomputes the rest, and all
            of them with 0. Kept ones err by 2^-9 of their distance from the largest.
        sequence_parallel: ``hidden`` is a shard of the tokens; it is gathered chunk by chunk.
        main_grad: every backward adds the gradient of ``weight`` to ``weight.main_grad`` (float32),
            as with megatron's gradient accumulation fusion.

    Returns:
        (log-probs [T], entropies [T]) float32, float64 of float64. All ranks hold the same bits.

    Communicates: over ``group``, an all-gather of [4, N] in the forward and an all-reduce of
    d(hidden) in chunks in the backward; with ``sequence_parallel`` an all-gather of ``hidden`` in
    each and a reduce-scatter instead of the all-reduce.

    Raises:
        ValueError: shapes or dtypes do not fit, a temperature is not positive, or a target lies
            outside ``[0, valid_vocab)``. On cuda, as that would wait for the device, entries are
            not looked at: such a target, or a temperature that is not positive, gives NaN.
    """
    job = describe(
        *("linear_logprob", hidden, weight, targets, group),
        valid_vocab=valid_vocab,
        rows=rows,
        chunk_bytes=chunk_bytes,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        cache_bytes=cache_bytes,
    )
    vectors = job.targets(targets), job.scale(temperature, targets, wide(weight.dtype))
    values = _LinearLogprob.apply(hidden.contiguous(), weight, *vectors, job)
    logprob, entropy = (job.scattered(value, len(targets)) for value in values)
    return logprob, entropy


def linear_logprob_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: LossOfChunk,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    rows: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    sequence_parallel: bool = False,
    main_grad: bool = False,
) -> Tensor:
    """``sum over chunks of loss_fn(logprob, entropy, tokens)``, gradients made in the same pass.

    They are kept in float32 (``weight``) and the dtype of ``hidden``, and multiplied by the
    gradient of the sum in the backward.

    Args:
        loss_fn: (log-probs [c], entropies [c], tokens [c] int64: where they lie in [T]) -> the sum
            of their losses, one number. Called once a chunk and on every rank alike; differentiated
            in the log-probs and entropies and in nothing else.
        hidden, weight, targets, group, temperature, valid_vocab, rows, chunk_bytes,
            sequence_parallel, main_grad: as in :func:`linear_logprob`.

    Returns:
        The sum, float32 (float64 of float64).

    Communicates: as :func:`linear_logprob`, all in the forward and hidden states once; the
    statistics are gathered chunk by chunk.

    Raises:
        ValueError: as :func:`linear_logprob`, and for a loss that is not one number.
    """
    job = describe(
        *("linear_logprob_loss", hidden, weight, targets, group),
        valid_vocab=valid_vocab,
        rows=rows,
        chunk_bytes=chunk_bytes,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
    )
    vectors = job.targets(targets), job.scale(temperature, targets, wide(weight.dtype))
    tokens = job.order
    if tokens is None:
        tokens = torch.arange(len(targets), device=targets.device)
    hidden = hidden.contiguous()
    return _LinearLogprobLoss.apply(hidden, weight, *vectors, tokens, job, loss_fn)  # type: ignore


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, job: Job
    ) -> tuple[Tensor, Tensor]:
        head, budget = Head(weight, job), job.cache_bytes if any(ctx.needs_input_grad) else 0
        stats = scale.new_empty(4, len(targets))
        cached: Kept = []
        ctx.num_cached = 0
        for chunk, x in hidden_chunks(hidden, job):
            budget -= x.shape[0] * weight.shape[0] * 2
            ctx.num_cached += budget >= 0
            keep = cached if budget >= 0 else None
            at, rate = targets[chunk.at], scale[chunk.at]
            stats[:, chunk.at] = head.stats(x, at, rate, keep, narrow=True)
        logprob, entropy, *rest = combined(stats, targets, scale, job)
        flat = [tensor for pair in cached for tensor in pair]
        ctx.save_for_backward(hidden, weight, targets, scale, *rest, entropy, *flat)
        ctx.job, ctx.to = job, _main_grad(weight, job)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, targets, scale, top, log_sum, entropy, *flat = ctx.saved_tensors
        vectors = (targets, scale, top, log_sum, entropy, *grads)
        job, head = ctx.job, Head(weight, ctx.job)
        cached = list(zip(flat[::2], flat[1::2], strict=True))
        of_hidden, to_weight, wanted = HiddenGrad(hidden, job), ctx.to, ctx.needs_input_grad[1]
        if wanted and to_weight is None:
            to_weight = torch.zeros_like(weight, dtype=scale.dtype)
        for i, (chunk, x) in enumerate(hidden_chunks(hidden, job)):
            of_chunk = [vector[chunk.at] for vector in vectors]
            kept = cached if i < ctx.num_cached else None
            of_hidden.add(chunk, head.gradients(x, of_chunk, to_weight, kept))
        of_weight = None
        if wanted and ctx.to is not None:
            of_weight = _stand_in(weight)
        elif wanted:
            of_weight = to_weight.to(weight.dtype)
        return of_hidden.wait(), of_weight, None, None, None


class _LinearLogprobLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        tokens: Tensor,
        job: Job,
        loss_fn: LossOfChunk,
    ) -> Tensor:
        head, wanted = Head(weight, job), any(ctx.needs_input_grad)
        total, of_hidden = scale.new_zeros(()), HiddenGrad(hidden, job) if wanted else None
        to_weight = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        for chunk, x in hidden_chunks(hidden, job):
            kept: Kept | None = [] if wanted else None
            at, rate = targets[chunk.at], scale[chunk.at]
            logprob, entropy, *rest = combined(head.stats(x, at, rate, kept), at, rate, job)
            loss, *grads = _loss_and_gradients(loss_fn, logprob, entropy, tokens[chunk.at], wanted)
            total += loss
            if of_hidden is not None:
                vectors = [at, rate, *rest, entropy, *grads]
                of_hidden.add(chunk, head.gradients(x, vectors, to_weight, kept))
        if of_hidden is not None:
            ctx.save_for_backward(of_hidden.wait(), to_weight, weight)
            ctx.to = _main_grad(weight, job)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        of_hidden, total, weight = ctx.saved_tensors
        of_weight = None
        if total is not None and ctx.to is not None:
            ctx.to.addcmul_(total, grad)
            of_weight = _stand_in(weight)
        elif total is not None:
            of_weight = torch.mul(total, grad, out=torch.empty_like(weight))
        return of_hidden * grad, of_weight, *[None] * 5


def _loss_and_gradients(
    loss_fn: LossOfChunk, logprob: Tensor, entropy: Tensor, tokens: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.set_grad_enabled(wanted):
        leaves = logprob.detach().requires_grad_(wanted), entropy.detach().requires_grad_(wanted)
        loss = loss_fn(*leaves, tokens)
    if loss.ndim:
        raise ValueError(
            f"linear_logprob_loss: loss_fn returned {list(loss.shape)}, expected the sum over its "
            "tokens, one number"
        )
    grads: tuple[Tensor | None, ...] = (None, None)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    of_logprob, of_entropy = (
        torch.zeros_like(logprob) if grad is None else grad.to(logprob.dtype) for grad in grads
    )
    return loss.detach(), of_logprob, of_entropy


def _main_grad(weight: Tensor, job: Job) -> Tensor | None:
    """Where the gradient of ``weight`` is added, or None: it is returned."""
    return weight.main_grad if job.main_grad and weight.requires_grad else None  # type: ignore


def _stand_in(weight: Tensor) -> Tensor | None:
    """What autograd gets for a gradient that was added to ``weight.main_grad``."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # megatron's DistributedDataParallel counts a parameter as ready when it gets a gradient, and
    # with this mark does not add it, unless a tied embedding has a part in it
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    tied = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if tied else torch.empty_like(weight)
