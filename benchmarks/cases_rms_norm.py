"""rms_norm: rows over the root of their mean square, against torch's ``F.rms_norm``."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases_swiglu import close
from benchmarks.measure import Case
from pyrl_ext import ops

# rows, heads, width, dtype: hidden rows of a wide MoE layer and of GLM-4.7-Flash, keys of Qwen3-30B
SIZES = [
    (8192, 1, 512, torch.float32),
    (16384, 1, 2048, torch.bfloat16),
    (16384, 4, 128, torch.bfloat16),
]
EPS = 1e-6


def in_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def beside_torch(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return in_torch(x, weight, eps), x


def rms_norm(device: str, shrink: int = 1) -> Iterator[Case]:
    """Forward; forward and backward; and that with a gradient of the rows themselves to add."""
    for rows, heads, width, dtype in SIZES:
        rows //= shrink
        wide = torch.randn(rows, 10 * heads if heads > 1 else 1, width, device=device, dtype=dtype)
        x = wide[:, -heads:]
        weight = torch.rand(width, device=device, dtype=dtype)
        grads = torch.randn(2, *x.shape, device=device, dtype=dtype).unbind()
        name = f"{rows} x {f'{heads} of {10 * heads} x ' * (heads > 1)}{width}, {str(dtype)[6:]}"
        one = dtype.itemsize * x.numel()  # bytes of the rows

        def forward(run: Callable, x: Tensor = x, w: Tensor = weight) -> Callable[[], list[Tensor]]:
            return lambda: [run(x, w, EPS)]

        def both(
            run: Callable,
            grads: tuple[Tensor, ...],
            x: Tensor = x,
            w: Tensor = weight,
        ) -> list[Tensor]:
            leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
            out = run(*leaves, EPS)
            out = out if isinstance(out, tuple) else (out,)
            return [*torch.autograd.grad(out, leaves, grads[: len(out)])]

        yield Case(
            f"forward, {name}",
            forward(ops.rms_norm),
            {"torch": forward(in_torch)},
            moved=2 * one,
            written=one,
            agree=close,
        )
        yield Case(
            f"forward and backward, {name}",
            partial(both, ops.rms_norm, grads),
            {"torch": partial(both, in_torch, grads)},
            moved=5 * one,
            written=one,
            agree=close,
        )
        if heads == 1:
            yield Case(
                f"both and a residual's gradient, {name}",
                partial(both, ops.rms_norm_residual, grads),
                {"torch": partial(both, beside_torch, grads)},
                moved=6 * one,
                written=one,
                agree=close,
            )
