"""Log-probability and entropy of tokens from vocabulary-sharded logits: one collective, exact."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrl_ext.loss.arguments import check_targets, check_valid_vocab, logit_scale
from pyrl_ext.ops import (
    token_logprob_combine,
    token_logprob_grad,
    token_logprob_grad_,
    token_logprob_rows,
    token_logprob_stats,
)
from pyrl_ext.ops.tensors import accum_dtype

# torch.distributed is not fully typed, and torch 2.11 lacks the successors of what 2.13 deprecates
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportDeprecated=false


def gather_shards(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Statistics [n, T] of this rank's shard -> [R, n, T] of all ranks.

    Communicates: one all-gather of [n, T] over ``group``; nothing for None or one rank.
    """
    if group is None or group.size() == 1:
        return stats[None]
    shards = stats.new_empty(group.size() * len(stats), stats.shape[1])
    dist.all_gather_into_tensor(shards, stats.contiguous(), group=group)
    return shards.view(group.size(), *stats.shape)


def shard_columns(
    columns: int, valid_vocab: int, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """(first global column, number of valid columns) of this rank's shard."""
    first = 0 if group is None else group.rank() * columns
    return first, min(max(valid_vocab - first, 0), columns)


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
        first, width = shard_columns(logits.shape[1], valid_vocab, group)
        if group is None or group.size() == 1:
            rows = token_logprob_rows(logits, targets, scale, width, keep_mask)
        else:
            stats = token_logprob_stats(logits, targets, scale, first, width, keep_mask)
            shards = gather_shards(stats, group)
            rows = token_logprob_combine(shards, targets, scale, valid_vocab)
        logprob, entropy, top, log_sum = rows
        ctx.save_for_backward(logits, targets, scale, top, log_sum, entropy, keep_mask)
        ctx.first = first
        ctx.width = width
        ctx.inplace = inplace
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # Raises in a second backward in place: the version of the logits is not the saved one.
        logits, targets, scale, top, log_sum, entropy, keep_mask = ctx.saved_tensors
        gradient = token_logprob_grad_ if ctx.inplace else token_logprob_grad
        grad = gradient(
            logits.detach(),
            targets,
            scale,
            ctx.first,
            ctx.width,
            top,
            log_sum,
            entropy,
            *grads,
            keep_mask=keep_mask,
        )
        return grad, *[None] * 6


@overload
def logprobs(
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
def logprobs(
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


def logprobs(
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
    """``log_softmax(logits / temperature)[..., targets]`` over the columns of all ranks.

    Rank r of ``group`` holds columns ``[r * V_local, (r + 1) * V_local)``. The logits are kept for
    the backward, with three numbers a token, and not written unless ``inplace``. A second backward
    is right, or an error with ``inplace``. A token without a finite logit has log-prob -inf,
    entropy 0 and gradient 0. NaN and +inf among its logits give NaN.

    Args:
        logits:  [..., V_local] float32, bfloat16, float16 or float64; T tokens in all.
        targets: [...] int64, global column.
        group:   the ranks that hold the vocabulary; None: this one alone.
        temperature: positive, one number or [...]; not differentiated.
        valid_vocab: columns from here on are padding and are left out; None: all are valid.
        keep_mask: [..., V_local] bool, the support that was sampled from (top-k, top-p): columns
            outside it have probability 0 and gradient 0, a target outside it log-prob -inf.
        inplace: the backward writes the gradient over the logits, which nothing may read
            afterwards: autograd reports a function that saved them. A leaf is overwritten as well.
        with_entropy: also return the entropy of each distribution, differentiable too.

    Returns:
        log-probs [...], or (log-probs [...], entropies [...]); float32, float64 for float64 logits.
        All ranks hold the same bits. The gradient is this rank's part.

    Communicates: one all-gather of [4, T] over ``group`` in the forward, nothing in the backward.

    Raises:
        ValueError: shapes do not fit, a temperature is not positive, a target is outside
            ``[0, valid_vocab)``, or the logits are not contiguous with ``inplace``. On CUDA, where
            it would wait for the device, and in a compiled graph the entries of tensors are not
            checked: a wrong target or temperature gives NaN.
        RuntimeError: a second backward with ``inplace``.
    """
    where = "vocab_parallel.logprobs"
    _check_shapes(where, logits, targets, keep_mask, inplace)
    ranks = 1 if group is None else group.size()
    valid_vocab = check_valid_vocab(where, valid_vocab, logits.shape[-1], ranks)
    shape = targets.shape
    if logits.ndim > 2:
        logits = logits.flatten(0, -2)
        targets = targets.flatten()
        if isinstance(temperature, Tensor) and temperature.shape == shape:
            temperature = temperature.flatten()
        keep_mask = None if keep_mask is None else keep_mask.flatten(0, -2)
    targets = check_targets(where, targets, valid_vocab)
    scale = logit_scale(where, temperature, targets, accum_dtype(logits.dtype))
    apply = cast(Any, _VocabParallelLogprob).apply
    logprob, entropy = apply(logits, targets, scale, valid_vocab, group, keep_mask, inplace)
    logprob = logprob.view(shape)
    return (logprob, entropy.view(shape)) if with_entropy else logprob


def entropy(
    logits: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
) -> Tensor:
    """[...] entropy of each distribution in ``logits`` [..., V_local] [nats]: that of `logprobs`,
    with its arguments, communication and errors."""
    any_target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    options: dict[str, Any] = {"temperature": temperature, "valid_vocab": valid_vocab}
    return logprobs(logits, any_target, group, **options, with_entropy=True)[1]


def _check_shapes(
    where: str, logits: Tensor, targets: Tensor, keep_mask: Tensor | None, inplace: bool
) -> None:
    if logits.ndim < 2 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"{where}: logits {list(logits.shape)}, targets {list(targets.shape)}, expected "
            "[..., V_local], [...]"
        )
    if keep_mask is not None and (keep_mask.shape, keep_mask.dtype) != (logits.shape, torch.bool):
        raise ValueError(
            f"{where}: keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}, expected "
            f"torch.bool {list(logits.shape)}"
        )
    if inplace and not logits.is_contiguous():
        raise ValueError(
            f"{where}: inplace with logits of strides {list(logits.stride())}, expected "
            "contiguous ones. Leave inplace out"
        )
