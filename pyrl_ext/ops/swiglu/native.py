from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, refuse_device, threads
from pyrl_ext.ops.on_gpu import on_gpu

from .reference import weight_grad_like

DTYPES = (torch.float32, torch.bfloat16)


def refuse(gate_up: Tensor, weight: Tensor | None) -> str | None:
    if gate_up.dtype not in DTYPES:
        return f"gate_up is {gate_up.dtype}, expected one of {list(DTYPES)}"
    return refuse_device(gate_up, "swiglu")


def refuse_grad(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> str | None:
    return refuse(gate_up, weight)


def swiglu(gate_up: Tensor, weight: Tensor | None, isa: str = "auto") -> Tensor:
    gate_up = gate_up.contiguous()
    weight = None if weight is None else weight.contiguous()
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _run(arguments(gate_up, weight, None, out, None), gate_up, isa)
    return out


def swiglu_grad(
    grad: Tensor, gate_up: Tensor, weight: Tensor | None, isa: str = "auto"
) -> tuple[Tensor, Tensor]:
    gate_up = gate_up.contiguous()
    grad = grad.contiguous()
    weight = None if weight is None else weight.contiguous()
    out = torch.empty_like(gate_up)
    weight_grad = weight_grad_like(gate_up, weight)
    if not out.numel():
        return out, weight_grad.zero_()
    _run(arguments(gate_up, weight, grad, out, weight_grad), gate_up, isa)
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
        weight=0 if weight is None else weight.data_ptr(),
        grad=0 if grad is None else grad.data_ptr(),
        out=out.data_ptr(),
        weight_grad=0 if weight is None or weight_grad is None else weight_grad.data_ptr(),
    )


def _run(args: Any, gate_up: Tensor, isa: str) -> None:
    if on_gpu(gate_up):
        with torch.cuda.device(gate_up.device):
            C.swiglu_cuda(args=args, stream=torch.cuda.current_stream().cuda_stream)
    else:
        C.swiglu_cpu(args=args, isa=isa, threads=threads())
