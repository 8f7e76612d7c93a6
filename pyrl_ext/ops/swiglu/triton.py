from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._triton import power_of_two, refuses

from .reference import weight_grad_like

TILE = 1024  # elements of a tile: more of the gradient do not fit the registers


refuse = refuses("gate_up", torch.float32, torch.bfloat16)


def swiglu(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    from .triton_kernel import swiglu_fwd_kernel  # triton takes a while to import

    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        tall, wide = _tile(width)
        kernel: Any = swiglu_fwd_kernel
        kernel[(-(-rows // tall), -(-width // wide))](
            gate_up.contiguous(), _dense(weight), out, rows, width, TALL=tall, WIDE=wide
        )
    return out


def swiglu_grad(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    from .triton_kernel import swiglu_bwd_kernel

    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape)
    weight_grad = weight_grad_like(gate_up, weight)
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
