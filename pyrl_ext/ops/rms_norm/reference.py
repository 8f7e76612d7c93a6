import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _widened(x)
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * scale[..., None] * _widened(weight)).to(x.dtype), scale


def rms_norm_grad(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    normed = _widened(x) * scale[..., None]
    grad = _widened(grad)
    of_normed = grad * _widened(weight)
    mean = (of_normed * normed).mean(-1, keepdim=True)
    out = (of_normed - normed * mean) * scale[..., None]
    if residual_grad is not None:
        out = out + _widened(residual_grad)
    of_weight = (grad * normed).flatten(0, -2).sum(0)
    return out.to(x.dtype), of_weight.to(weight.dtype)


def _widened(values: Tensor) -> Tensor:
    values = values.contiguous()
    return values if values.dtype == torch.float64 else values.float()
