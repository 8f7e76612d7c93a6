import torch
from torch import Tensor


def swiglu(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    gate, up = _widened(gate_up).chunk(2, -1)
    out = gate * torch.sigmoid(gate) * up
    return (out if weight is None else out * weight[:, None]).to(gate_up.dtype)


def swiglu_grad(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    gate, up = _widened(gate_up).chunk(2, -1)
    grad = _widened(grad)
    s = torch.sigmoid(gate)
    silu = gate * s
    both = grad if weight is None else grad * weight[:, None]
    grads = torch.cat([both * up * (s + silu * (1 - s)), both * silu], -1).to(gate_up.dtype)
    if weight is None:
        return grads, weight_grad_like(gate_up, weight)
    return grads, (grad * (silu * up)).sum(-1)


def weight_grad_like(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    """A tensor for the gradient of ``weight``; without a weight one of no elements."""
    return gate_up.new_empty(0, dtype=torch.float32) if weight is None else torch.empty_like(weight)


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
