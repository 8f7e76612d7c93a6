"""Log-probability and entropy of tokens from vocabulary-sharded logits: one collective, exact."""

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrl_ext.ops import token_logprob_grad, token_logprob_grad_, token_logprob_stats


def _combine(shards: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics [R, 4, T] of all shards -> (logprob, entropy, max, log_sum), each [T].

    Ranks hold the same ``shards`` and add them in the same order, so they get the same bits.
    """
    tops, sums, weights, targets = shards.unbind(1)
    top = tops.amax(0)
    dead = top == -torch.inf  # no finite logit anywhere: p is undefined, nothing is certain
    base = top.masked_fill(dead, 0)
    shift = (tops - base) * scale
    factor = shift.exp()
    total = (factor * sums).sum(0)
    shift = shift.masked_fill(factor == 0, 0)  # 0 * -inf
    weighted = (factor * (weights + shift * sums)).sum(0)
    log_sum = total.log()
    logprob = (targets.sum(0) - base) * scale - log_sum
    logprob = torch.where(total == 0, -torch.inf, logprob)
    entropy = torch.where(total == 0, 0, log_sum - weighted / total)
    return logprob, entropy, top, log_sum


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        scale: Tensor,
        valid_vocab: int,
        group: dist.ProcessGroup | None,
        keep_mask: Tensor | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        columns = logits.shape[1]
        first = rank * columns
        width = min(max(valid_vocab - first, 0), columns)
        stats = token_logprob_stats(logits, targets, scale, first, width, keep_mask)
        if size == 1:
            shards = stats[None]
        else:
            shards = stats.new_empty(size * 4, stats.shape[1])
            dist.all_gather_into_tensor(shards, stats, group=group)
            shards = shards.view(size, 4, stats.shape[1])
        logprob, entropy, top, log_sum = _combine(shards, scale)
        logprob = torch.where((targets >= 0) & (targets < valid_vocab), logprob, torch.nan)
        ctx.save_for_backward(logits, targets, scale, top, log_sum, entropy, keep_mask)
        ctx.first, ctx.width, ctx.inplace = first, width, inplace
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # Raises in a second backward in place: the version of the logits is not the saved one.
        logits, targets, scale, top, log_sum, entropy, keep_mask = ctx.saved_tensors
        gradient = token_logprob_grad_ if ctx.inplace else token_logprob_grad
        of_rows = (top, log_sum, entropy, *grads)
        of_shard = (logits.detach(), targets, scale, ctx.first, ctx.width)
        grad = gradient(*of_shard, *of_rows, keep_mask=keep_mask)
        return grad, *[None] * 6


@overload
def vocab_parallel_logprob(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    keep_mask: Tensor | None = None,
    inplace: bool = False,
    with_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def vocab_parallel_logprob(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    keep_mask: Tensor | None = None,
    inplace: bool = False,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def vocab_parallel_logprob(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    keep_mask: Tensor | None = None,
    inplace: bool = False,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``log_softmax(logits / temperature)[t, targets[t]]`` over the columns of all ranks.

    Rank r of ``group`` holds columns ``[r * V_local, (r + 1) * V_local)``. The logits are kept for
    the backward, with three numbers a token, and not written unless ``inplace``; a second backward
    is right, or in place an error. A token without a finite logit has log-prob -inf, entropy 0
    and gradient 0. NaN and +inf among its logits give NaN.

    Args:
        logits:  [T, V_local] float32, bfloat16, float16 or float64.
        targets: [T] int64, global column.
        group:   the ranks that hold the vocabulary; None: this one alone.
        temperature: positive, one number or [T]; not differentiated.
        valid_vocab: columns from here on are padding and have no part; None: all are valid.
        keep_mask: [T, V_local] bool, the support that was sampled from (top-k, top-p): columns
            outside it have probability 0 and gradient 0, a target outside it log-prob -inf.
        inplace: the backward writes the gradient over the logits, which nothing may read after
            it: who saved them too gets autograd's error. A leaf's data is written over as well.
        with_entropy: also return the entropy of each distribution, differentiable too.

    Returns:
        log-probs [T], or (log-probs [T], entropies [T]); float32, float64 for float64 logits. All
        ranks hold the same bits. The gradient is this rank's part.

    Communicates: one all-gather of [4, T] over ``group`` in the forward, nothing in the backward.

    Raises:
        ValueError: shapes do not fit, a temperature is not positive, a target lies outside
            ``[0, valid_vocab)``, or the logits are not contiguous with ``inplace``. On cuda, as
            that would wait for the device, and in a compiled graph a tensor's entries are not
            looked at: such a target, or a temperature that is not positive, gives NaN.
        RuntimeError: a second backward with ``inplace``.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    size = 1 if group is None else group.size()
    vocab = logits.shape[-1] * size
    valid_vocab = vocab if valid_vocab is None else valid_vocab
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"vocab_parallel_logprob: logits {list(logits.shape)}, targets {list(targets.shape)}, "
            "expected [T, V_local], [T]"
        )
    if not 0 < valid_vocab <= vocab:
        raise ValueError(
            f"vocab_parallel_logprob: valid_vocab is {valid_vocab}, expected one in [1, {vocab}], "
            f"the columns of {size} ranks"
        )
    if keep_mask is not None and (keep_mask.shape, keep_mask.dtype) != (logits.shape, torch.bool):
        raise ValueError(
            f"vocab_parallel_logprob: keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}, "
            f"expected torch.bool {list(logits.shape)}"
        )
    if inplace and not logits.is_contiguous():
        raise ValueError(
            f"vocab_parallel_logprob: inplace with logits of strides {list(logits.stride())}, "
            "expected contiguous ones. Leave inplace out"
        )
    outside = (targets < 0) | (targets >= valid_vocab)
    _check_entries("targets", targets, outside, f"[0, {valid_vocab})")
    scale = _scale(temperature, targets, wide)
    logprob, entropy = _VocabParallelLogprob.apply(
        logits, targets, scale, valid_vocab, group, keep_mask, inplace
    )
    return (logprob, entropy) if with_entropy else logprob


def _scale(temperature: float | Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / temperature as [T]."""
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < float("inf"):
            raise ValueError(
                f"vocab_parallel_logprob: temperature is {temperature}, expected a positive number"
            )
        return torch.full(targets.shape, 1 / temperature, dtype=dtype, device=targets.device)
    if temperature.shape not in ((), targets.shape):
        raise ValueError(
            f"vocab_parallel_logprob: temperature {list(temperature.shape)}, expected one number "
            f"or {list(targets.shape)}"
        )
    temperature = temperature.detach().to(dtype).expand(targets.shape)
    wrong = ~(temperature > 0)
    _check_entries("temperature", temperature, wrong, "the positive numbers")
    return temperature.reciprocal().masked_fill(wrong, torch.nan)


def _check_entries(name: str, values: Tensor, outside: Tensor, rule: str) -> None:
    if outside.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if outside.any():
        i = int(outside.nonzero()[0])
        raise ValueError(
            f"vocab_parallel_logprob: {name}[{i}] is {values[i].item()}, expected one in {rule}"
        )
