"""swiglu: the gated unit of routed experts, against the same in torch, as megatron writes it."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Case
from pyrl_ext import ops

# rows, width, dtype: a wide MoE layer of 8 experts a token, and one of GLM-4.7-Flash's widths
SIZES = [(32768, 256, torch.float32), (32768, 1536, torch.bfloat16)]


def in_torch(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up * weight[:, None]).to(gate_up.dtype)


def close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """True if each is equal up to a few rounding steps of its largest: torch rounds every step."""
    step = 32 * torch.finfo(ours[0].dtype).eps
    pairs = zip(ours, theirs, strict=True)
    return all((a - b).abs().max() <= step * b.abs().max() for a, b in pairs)


def swiglu(device: str, shrink: int = 1) -> Iterator[Case]:
    """Forward, and forward and backward."""
    for rows, width, dtype in SIZES:
        rows //= shrink
        gate_up = torch.randn(rows, 2 * width, device=device, dtype=dtype)
        weight = torch.rand(rows, device=device)
        grad = torch.randn(rows, width, device=device, dtype=dtype)
        name = f"{rows} x {width}, {str(dtype).removeprefix('torch.')}"
        size = dtype.itemsize

        def forward(run: Callable, args: tuple = (gate_up, weight)) -> Callable[[], list[Tensor]]:
            return lambda: [run(*args)]

        def both(
            run: Callable, args: tuple = (gate_up, weight), grad: Tensor = grad
        ) -> Callable[[], list[Tensor]]:
            leaves = [each.detach().requires_grad_() for each in args]
            return lambda: [*torch.autograd.grad(run(*leaves), leaves, grad)]

        yield Case(
            f"forward, {name}",
            forward(ops.swiglu),
            {"torch": forward(in_torch)},
            moved=3 * size * rows * width + 4 * rows,
            written=size * rows * width,
            agree=close,
        )
        yield Case(
            f"forward and backward, {name}",
            both(ops.swiglu),
            {"torch": both(in_torch)},
            moved=8 * size * rows * width + 12 * rows,
            written=2 * size * rows * width + 4 * rows,
            agree=close,
        )
