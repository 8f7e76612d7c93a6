import torch
import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.ops.sequences import check_boundaries, positions
from pyrl_ext.ops.tensors import accum_dtype


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    check_boundaries("causal_conv1d", cu_seqlens, len(x))
    return F.silu(_sums(_taps(x, weight, cu_seqlens), weight, bias)).to(x.dtype)


def causal_conv1d_grad(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    check_boundaries("causal_conv1d", cu_seqlens, len(x))
    taps = _taps(x, weight, cu_seqlens)
    sums = _sums(taps, weight, bias)
    s = torch.sigmoid(sums)
    of_sums = grad.to(s.dtype) * s * (1 + sums * (1 - s))
    of_weight = torch.stack([(of_sums * tap).sum(0) for tap in taps], -1)
    # row t + s takes part of row t where it is s rows or more into their sequence
    at = positions(cu_seqlens, len(x))[:, None]
    width = weight.shape[1]
    of_x = torch.zeros_like(s)
    for back in range(min(width, len(x))):
        term = torch.where(at >= back, of_sums * weight[:, width - 1 - back].to(s.dtype), 0)
        of_x[: len(x) - back] += term[back:]
    return of_x.to(x.dtype), of_weight.to(x.dtype), of_sums.sum(0).to(x.dtype)


def _taps(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """[T, D] for each weight of a channel: the rows that it meets."""
    at = positions(cu_seqlens, len(x))[:, None]
    wide = x.to(accum_dtype(x.dtype))
    backs = reversed(range(weight.shape[1]))
    return [torch.where(at >= s, F.pad(wide, (0, 0, s, 0))[: len(x)], 0) for s in backs]


def _sums(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = taps[0].dtype
    sums = torch.zeros_like(taps[0]) if bias is None else bias.to(wide).expand(taps[0].shape)
    for tap, column in zip(taps, weight.to(wide).unbind(1), strict=True):
        sums = sums + tap * column
    return sums
