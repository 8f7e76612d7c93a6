from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, address, dtype_of, launch, refuses

from . import new_grads, new_output

refuse = refuses("swiglu", torch.float32, torch.bfloat16)


def swiglu(gate_up: Tensor, weight: Tensor | None, isa: str = "auto") -> Tensor:
    gate_up = gate_up.contiguous()
    weight = None if weight is None else weight.contiguous()
    out = new_output(gate_up, weight)
    args = arguments(gate_up, weight, None, out, None)
    launch("swiglu", gate_up.device, isa, args=args)
    return out


def swiglu_grad(
    grad: Tensor, gate_up: Tensor, weight: Tensor | None, isa: str = "auto"
) -> tuple[Tensor, Tensor]:
    gate_up = gate_up.contiguous()
    grad = grad.contiguous()
    weight = None if weight is None else weight.contiguous()
    out, weight_grad = new_grads(grad, gate_up, weight)
    if not out.numel():
        return out, weight_grad.zero_()
    args = arguments(gate_up, weight, grad, out, weight_grad)
    launch("swiglu", gate_up.device, isa, args=args)
    return out, weight_grad


def arguments(
    gate_up: Tensor,
    weight: Tensor | None,
    grad: Tensor | None,
    out: Tensor,
    weight_grad: Tensor | None,
) -> Any:
    """``C.SwigluArgs`` of contiguous tensors, which it does not keep alive."""
    return C.SwigluArgs(
        gate_up=gate_up.data_ptr(),
        dtype=dtype_of(gate_up),
        rows=gate_up.shape[0],
        width=gate_up.shape[1] // 2,
        weight=address(weight),
        grad=address(grad),
        out=out.data_ptr(),
        weight_grad=0 if weight is None else address(weight_grad),
    )
