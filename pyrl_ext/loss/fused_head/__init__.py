"""Log-probability and entropy of tokens from hidden states and the LM head, without all logits.

Tokens are computed in chunks. The matrix product writes the logits of a chunk in float32; they are
read once for the statistics of each token and once more for the gradient, and then freed.

``linear_logprob`` returns values for any loss. Its backward needs the logits a second time: it
recomputes them (8 T V H floating-point operations in all), or reads them from a cache of
``cache_bytes`` (6 T V H). ``linear_logprob_loss`` runs a token-wise loss inside the chunk, so that
forward and backward are one pass over the chunks (6 T V H) and no logits are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrl_ext.loss.fused_head.chunking import CallPlan, plan_call
from pyrl_ext.loss.fused_head.collectives import HiddenGrad, distribution_of, hidden_chunks
from pyrl_ext.loss.fused_head.divergence import Teacher, TeacherTiles
from pyrl_ext.loss.fused_head.tiles import CachedLogits, HeadTiles, no_more
from pyrl_ext.loss.sampling_mask import KeptSets

LossOfChunk = Callable[..., Tensor]


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    rows: Tensor | None = None,
    chunk_bytes: int | None = None,
    cache_bytes: int = 0,
    sequence_parallel: bool = False,
    main_grad: bool = False,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """``vocab_parallel.logprobs(hidden @ weight.T, ...)`` with its entropy, chunk by chunk.

    Logits are used in float32, as bfloat16 and float16 products add them up. Their gradients are
    rounded to the dtype of ``weight`` for the backward's products. A second backward is right.

    Args:
        hidden:  [T, H] float32, bfloat16, float16 or float64; with ``sequence_parallel``
            [T / ranks, H], tokens ``[r * T / ranks, (r + 1) * T / ranks)`` on rank r.
        weight:  [V_local, H] dtype of ``hidden``; rank r of ``group`` holds columns
            ``[r * V_local, (r + 1) * V_local)`` of the vocabulary.
        targets, group, temperature, valid_vocab: as in `vocab_parallel.logprobs`.
        rows:    [N] int64 on the host, the tokens to compute; None: all. The others are NaN with
            gradient 0. Skipping tokens with zero gradient would need a device sync.
        chunk_bytes: of a chunk's logits and their gradients; None: 4 GiB on a GPU, 1 GiB on a CPU,
            which takes 512 tokens at most.
        cache_bytes: of logits cached in bfloat16 for the backward, which recomputes the rest.
            Their relative error is 2^-9 in the distance to the row maximum.
        sequence_parallel: ``hidden`` is a shard of the tokens; it is gathered chunk by chunk.
        main_grad: every backward adds the gradient of ``weight`` to ``weight.main_grad`` (float32),
            as with megatron's gradient accumulation fusion.
        kept:    [T] sets that the tokens were drawn from, at least in this rank's shard.

    Returns:
        (log-probs [T], entropies [T]) float32, float64 for float64. All ranks hold the same bits.

    Communicates: over ``group``, an all-gather of [4, N] in the forward, an all-reduce of d(hidden)
    in the backward; with ``sequence_parallel`` a reduce-scatter, and all-gathers of ``hidden``.

    Raises:
        ValueError: as `vocab_parallel.logprobs`; or ``rows`` or ``main_grad`` do not fit.
    """
    call = plan_call(
        "linear_logprob",
        hidden,
        weight,
        targets,
        group,
        temperature=temperature,
        valid_vocab=valid_vocab,
        rows=rows,
        chunk_bytes=chunk_bytes,
        cache_bytes=cache_bytes,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        kept=kept,
    )
    logprob, entropy = _apply(_LinearLogprob, hidden.contiguous(), weight, call)
    return call.scattered(logprob, len(targets)), call.scattered(entropy, len(targets))


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
    chunk_bytes: int | None = None,
    sequence_parallel: bool = False,
    main_grad: bool = False,
    kept: KeptSets | None = None,
    teacher: Teacher | None = None,
) -> Tensor:
    """``sum over chunks of loss_fn(logprob, entropy, tokens)``, with gradients in the same pass.

    The gradients are kept in float32 (``weight``) and the dtype of ``hidden``, and multiplied by
    the gradient of the sum in the backward.

    Args:
        loss_fn: (log-probs [c], entropies [c], tokens [c] int64: their places in [T]) -> the sum of
            their losses, one number. Called once a chunk, on every rank; differentiated with
            respect to the log-probs and entropies only, and with a ``teacher`` also to a fourth
            argument, the divergences [c] from it [nats].
        hidden, weight, targets, group, temperature, valid_vocab, rows, chunk_bytes,
            sequence_parallel, main_grad, kept: as in :func:`linear_logprob`.
        teacher: a frozen model to compare distributions with, at the same temperature. Its logits
            are computed chunk by chunk too (2 T V H_t more operations).

    Returns:
        The sum, float32 (float64 for float64).

    Communicates: as :func:`linear_logprob`, but everything in the forward, hidden states once, and
    the statistics chunk by chunk; with a teacher two all-gathers of [2, c] more a chunk.

    Raises:
        ValueError: as :func:`linear_logprob`, and for a loss that is not one number.
    """
    call = plan_call(
        "linear_logprob_loss",
        hidden,
        weight,
        targets,
        group,
        temperature=temperature,
        valid_vocab=valid_vocab,
        rows=rows,
        chunk_bytes=chunk_bytes,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        kept=kept,
        compared=teacher is not None,
    )
    if teacher is not None:
        teacher.check("linear_logprob_loss", len(targets), len(weight))
    return _apply(_LinearLogprobLoss, hidden.contiguous(), weight, call, loss_fn, teacher)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, which torch declares without types."""
    return cast(Any, function).apply(*args)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: CallPlan) -> tuple[Tensor, Tensor]:
        head = HeadTiles(weight, call)
        targets = call.targets
        scale = call.scale
        budget = call.cache_bytes if any(ctx.needs_input_grad) else 0
        stats = scale.new_empty(4, len(targets))
        cached: CachedLogits = []
        ctx.num_cached = 0  # chunks
        for chunk, x in hidden_chunks(hidden, call):
            budget -= x.shape[0] * weight.shape[0] * 2
            ctx.num_cached += budget >= 0
            part = chunk.part
            stats[:, part] = head.stats(
                x, targets[part], scale[part], part, cached if budget >= 0 else None, narrow=True
            )
        logprob, entropy, top, log_sum = distribution_of(stats, targets, scale, call)
        flat = [tensor for pair in cached for tensor in pair]
        ctx.save_for_backward(hidden, weight, targets, scale, top, log_sum, entropy, *flat)
        ctx.call = call
        ctx.main_grad = _main_grad(weight, call)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, targets, scale, top, log_sum, entropy, *flat = ctx.saved_tensors
        call = ctx.call
        vectors = (targets, scale, top, log_sum, entropy, *grads)
        head = HeadTiles(weight, call)
        cached = list(zip(flat[::2], flat[1::2], strict=True))
        hidden_grad = HiddenGrad(hidden, call)
        total = ctx.main_grad
        wanted = ctx.needs_input_grad[1]
        if wanted and total is None:
            total = torch.zeros_like(weight, dtype=scale.dtype)
        for i, (chunk, x) in enumerate(hidden_chunks(hidden, call)):
            of_chunk = [vector[chunk.part] for vector in vectors]
            cache = cached if i < ctx.num_cached else None
            hidden_grad.add(chunk, head.gradients(x, of_chunk, total, chunk.part, cache))
        weight_grad = None
        if wanted and ctx.main_grad is not None:
            weight_grad = stand_in(weight)
        elif wanted:
            weight_grad = total.to(weight.dtype)
        return hidden_grad.wait(), weight_grad, None


class _LinearLogprobLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        call: CallPlan,
        loss_fn: LossOfChunk,
        teacher: Teacher | None,
    ) -> Tensor:
        head = HeadTiles(weight, call)
        of_teacher = None if teacher is None else TeacherTiles(teacher, call)
        targets = call.targets
        scale = call.scale
        tokens = call.order
        if tokens is None:
            tokens = torch.arange(len(targets), device=targets.device)
        wanted = any(ctx.needs_input_grad)
        loss_sum = scale.new_zeros(())
        hidden_grad = HiddenGrad(hidden, call) if wanted else None
        total = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        for chunk, x in hidden_chunks(hidden, call):
            keeps = wanted or of_teacher is not None
            cache: CachedLogits | None = [] if keeps else None
            target, rate, where = (each[chunk.part] for each in (targets, scale, tokens))
            stats = head.stats(x, target, rate, chunk.part, cache)
            logprob, entropy, top, log_sum = distribution_of(stats, target, rate, call)
            values = [logprob, entropy]
            more = no_more
            if of_teacher is not None:
                tiles = [logits for logits, _ in cache or ()]
                divergence = of_teacher.compare(tiles, rate, where)
                values.append(divergence.values)
                more = divergence.gradient
            loss, grads = _loss_and_gradients(loss_fn, values, where, wanted)
            loss_sum += loss
            if hidden_grad is not None:
                vectors = [target, rate, top, log_sum, entropy, *grads]
                grad = head.gradients(x, vectors, total, chunk.part, cache, more)
                hidden_grad.add(chunk, grad)
        if hidden_grad is not None:
            ctx.save_for_backward(hidden_grad.wait(), total, weight)
            ctx.main_grad = _main_grad(weight, call)
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden_grad, total, weight = ctx.saved_tensors
        weight_grad = None
        if total is not None and ctx.main_grad is not None:
            ctx.main_grad.addcmul_(total, grad)
            weight_grad = stand_in(weight)
        elif total is not None:
            weight_grad = torch.mul(total, grad, out=torch.empty_like(weight))
        return hidden_grad * grad, weight_grad, None, None, None


def _loss_and_gradients(
    loss_fn: LossOfChunk, values: list[Tensor], tokens: Tensor, wanted: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss of a chunk, and its gradients with respect to ``values``: log-probs, entropies and,
    with a teacher, divergences."""
    with torch.set_grad_enabled(wanted):
        leaves = [value.detach().requires_grad_(wanted) for value in values]
        loss = loss_fn(*leaves[:2], tokens, *leaves[2:])
    if loss.ndim:
        raise ValueError(
            f"linear_logprob_loss: loss_fn returned {list(loss.shape)}, expected the sum over its "
            "tokens, one number"
        )
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [
        torch.zeros_like(leaf) if grad is None else grad.to(leaf.dtype)
        for leaf, grad in zip(leaves, found, strict=True)
    ]
    return loss.detach(), grads


def _main_grad(weight: Tensor, call: CallPlan) -> Tensor | None:
    """The buffer that the gradient of ``weight`` is added to, or None: it is returned."""
    return weight.main_grad if call.main_grad and weight.requires_grad else None  # type: ignore


def stand_in(weight: Tensor) -> Tensor | None:
    """The value returned to autograd for a gradient that was added to ``weight.main_grad``."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # megatron's DistributedDataParallel counts a parameter as ready when it gets a gradient, and
    # with this mark does not add that gradient, unless the weight is tied to the embedding
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    tied = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if tied else torch.empty_like(weight)
