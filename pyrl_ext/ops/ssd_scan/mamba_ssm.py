"""The kernels of the package mamba_ssm, which are Triton's."""

import torch
from torch import Tensor

from pyrl_ext.ops._packages import gradients, refuse_package
from pyrl_ext.ops.sequences import sequence_of_rows

CHUNK = 128


def refuse(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, cu_seqlens: Tensor
) -> str | None:
    return refuse_package("mamba_ssm", "x", x)


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, cu_seqlens: Tensor
) -> Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    numbers = _numbers(cu_seqlens, x)
    x, dt, b, c = (each.contiguous()[None] for each in (x, dt, B, C))
    return _run(x, dt, A, b, c, D, numbers)[0]


def ssd_scan_grad(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, ...]:
    if not x.numel():
        return tuple(torch.zeros_like(each) for each in (x, dt, A, B, C, D))
    numbers = _numbers(cu_seqlens, x)
    rows = {0, 1, 3, 4}
    leaves = [each.contiguous() for each in (x, dt, A, B, C, D)]
    leaves = [each[None] if n in rows else each for n, each in enumerate(leaves)]
    found = gradients(lambda *given: _run(*given, numbers), leaves, grad.contiguous()[None])
    return tuple(each[0] if n in rows else each for n, each in enumerate(found))


def _run(*given: Tensor) -> Tensor:
    """Calls mamba_ssm with x, dt, A, B, C, each row's [1, T, ...], D, and the rows' sequences."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    *rows, skip, numbers = given
    return mamba_chunk_scan_combined(*rows, CHUNK, D=skip, seq_idx=numbers)


def _numbers(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    return sequence_of_rows(cu_seqlens, len(x)).int()[None]
