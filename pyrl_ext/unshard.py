"""From what every context-parallel rank computed back to the ragged stream, and its gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrl_ext.layout import TokenLayout
from pyrl_ext.ops import gather_rows


def _take(src: Tensor, rows: Tensor) -> Tensor:
    return gather_rows(src, rows.to(src.device, non_blocking=True), src.new_zeros(src.shape[1:]))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: TokenLayout, group: Any) -> Tensor:
        ctx.layout, ctx.group = layout, group
        if layout.cp_size > 1:
            gathered = local.new_empty(layout.cp_size * local.shape[0], *local.shape[1:])
            dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
            local = gathered
        return _take(local, layout.inverse())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        layout: TokenLayout = ctx.layout
        # No row is read twice on the way out, so none is added to on the way back: a gather too.
        gathered = _take(grads[0], layout.gathered_rows())
        if layout.cp_size == 1:
            return gathered, None, None
        local = gathered.new_empty(layout.num_local, *gathered.shape[1:])
        dist.reduce_scatter_tensor(local, gathered, group=ctx.group)
        return local, None, None


def unshard(local: Tensor, layout: TokenLayout, group: dist.ProcessGroup | None) -> Tensor:
    """``out[t] = `` the row of token t, on whichever rank it lies; padding is dropped.

    Differentiable once. The gradient of a row is the sum over the ranks of their gradients of it:
    a loss that every rank computes alike counts ``cp_size`` times. The same input gives the same
    bits, forward and backward.

    Args:
        local:  [M, ...] any dtype, M = ``layout.num_local``, rows of this rank of ``group``.
        layout: where the rows of all ranks lie.
        group:  the ``layout.cp_size`` ranks of context parallelism; None: this one alone.

    Returns:
        [T, ...] in ragged order, the same on every rank; padding's gradient is 0.

    Communicates: an all-gather of [M, ...] over ``group``, in the backward a reduce-scatter of
    [cp_size * M, ...] in the gradient's dtype; nothing with one rank.

    Raises:
        ValueError: ``local`` or ``group`` is not of the layout's size.
    """
    size = 1 if group is None else group.size()
    if size != layout.cp_size:
        raise ValueError(
            f"unshard: group has {size} ranks, expected the layout's cp_size of {layout.cp_size}"
        )
    if local.ndim < 1 or local.shape[0] != layout.num_local:
        raise ValueError(
            f"unshard: local is {list(local.shape)}, expected [{layout.num_local}, ...], the rows "
            "of one rank. Cut off what a capacity added"
        )
    result = _Unshard.apply(local, layout, group)
    assert isinstance(result, Tensor)
    return result
