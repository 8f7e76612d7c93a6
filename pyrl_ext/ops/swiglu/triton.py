# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._op import refuse_dtype
from pyrl_ext.ops._packages import power_of_two

from . import new_grads, new_output

TILE = 1024  # elements of a tile: more of the gradient do not fit the registers


def refuse(gate_up: Tensor, weight: Tensor | None) -> str | None:
    return refuse_dtype("gate_up", gate_up, torch.float32, torch.bfloat16)


def swiglu(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = new_output(gate_up, weight)
    if out.numel():
        tall, wide = _tile(width)
        kernel: Any = swiglu_fwd_kernel
        kernel[(-(-rows // tall), -(-width // wide))](
            gate_up.contiguous(), _dense(weight), out, rows, width, TALL=tall, WIDE=wide
        )
    return out


def swiglu_grad(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out, weight_grad = new_grads(grad, gate_up, weight)
    if out.numel():
        tall, wide = _tile(width)
        kernel: Any = swiglu_bwd_kernel
        kernel[(-(-rows // tall),)](
            grad.contiguous(),
            gate_up.contiguous(),
            _dense(weight),
            out,
            None if weight is None else weight_grad,
            rows,
            width,
            TALL=tall,
            WIDE=wide,
        )
    else:
        weight_grad.zero_()
    return out, weight_grad


def _dense(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _tile(width: int) -> tuple[int, int]:
    wide = min(1024, power_of_two(width))
    return TILE // wide, wide


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit(do_not_specialize=["N"])  # a bound
def swiglu_fwd_kernel(
    gate_up,  # [N, 2 W] read, gates before ups
    weight,  # [N] float32, or None: 1
    out,  # [N, W] written
    N,
    W,
    TALL: tl.constexpr,  # rows of a tile
    WIDE: tl.constexpr,  # columns of a tile
):
    n = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = (n < N) & (c < W)
    gate = tl.load(gate_up + n * 2 * W + c, inside, other=0).to(tl.float32)
    up = tl.load(gate_up + n * 2 * W + W + c, inside, other=0).to(tl.float32)
    y = gate * _sigmoid(gate) * up
    if weight is not None:
        y = y * tl.load(weight + n, n < N, other=0)
    tl.store(out + n * W + c, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["N"])
def swiglu_bwd_kernel(
    grad,  # [N, W] read
    gate_up,  # [N, 2 W] read
    weight,  # [N] float32, or None: 1
    out,  # [N, 2 W] written
    weight_grad,  # [N] float32 written, or None
    N,
    W,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    total = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, W, WIDE):
        c = start + tl.arange(0, WIDE)[None, :]
        inside = (n < N) & (c < W)
        gate = tl.load(gate_up + n * 2 * W + c, inside, other=0).to(tl.float32)
        up = tl.load(gate_up + n * 2 * W + W + c, inside, other=0).to(tl.float32)
        g = tl.load(grad + n * W + c, inside, other=0).to(tl.float32)
        s = _sigmoid(gate)
        silu = gate * s
        total += g * (silu * up)
        if weight is not None:
            g = g * tl.load(weight + n, n < N, other=0)
        of_gate = g * up * (s + silu * (1 - s))
        tl.store(out + n * 2 * W + c, of_gate.to(out.dtype.element_ty), inside)
        tl.store(out + n * 2 * W + W + c, (g * silu).to(out.dtype.element_ty), inside)
    if weight_grad is not None:
        tl.store(weight_grad + n, tl.sum(total, 1, keep_dims=True), n < N)
