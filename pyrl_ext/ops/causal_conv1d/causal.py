"""The kernels of the package causal_conv1d, which takes rows by the number of their sequence."""

import torch
from torch import Tensor

from pyrl_ext.ops._packages import gradients, refuse_package
from pyrl_ext.ops.sequences import sequence_of_rows

CHANNELS = 8  # whole 16 bytes of a row


def refuse(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> str | None:
    if x.shape[1] % CHANNELS:
        return f"x has {x.shape[1]} channels, expected a multiple of {CHANNELS}"
    return refuse_package("causal_conv1d", "x", x)


def refuse_grad(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> str | None:
    return refuse(x, weight, bias, cu_seqlens)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    out = _run(_columns(x), weight.contiguous(), bias, _numbers(cu_seqlens, x))
    return out[0].T.contiguous()


def causal_conv1d_grad(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not x.numel():
        return x.new_empty(x.shape), torch.zeros_like(weight), weight.new_zeros(len(weight))
    numbers = _numbers(cu_seqlens, x)
    leaves = [_columns(x), weight.contiguous(), *([] if bias is None else [bias.contiguous()])]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _run(x, weight, bias, numbers)

    of_x, of_weight, *more = gradients(run, leaves, _columns(grad))
    of_bias = more[0] if more else weight.new_zeros(len(weight))
    return of_x[0].T.contiguous(), of_weight, of_bias


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor) -> Tensor:
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(x, weight, bias, seq_idx=numbers, activation="silu")


def _columns(x: Tensor) -> Tensor:
    """[T, D] -> [1, D, T], the rows where they are: the one layout that knows sequences."""
    return x.contiguous()[None].mT


def _numbers(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    return sequence_of_rows(cu_seqlens, len(x)).int()[None]
