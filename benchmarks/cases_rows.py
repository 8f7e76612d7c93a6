"""gather_rows and gather_fields: ragged tokens to the rows of one context-parallel rank of two."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.lengths import lognormal
from benchmarks.measure import Case
from pyrl_ext import ops
from pyrl_ext.pack.layout import TokenLayout

TOKENS = 131_072  # of all sequences: 64k rows a rank


def _layout(shrink: int) -> TokenLayout:
    return TokenLayout(lognormal(64, 16384 // shrink, TOKENS // shrink), cp_size=2)


def gather_rows(device: str, shrink: int = 1) -> Iterator[Case]:
    layout = _layout(shrink)
    rows = layout.rows(0).to(device)
    for name, width, dtype in [
        ("token ids, 8 B", 1, torch.int64),
        ("routes, 188 B", 188, torch.uint8),
        ("hidden 2048 bf16, 4 KiB", 2048, torch.bfloat16),
    ]:
        src = torch.empty(sum(layout.seqlens), width, dtype=dtype).random_(100).to(device)
        fill = torch.zeros(width, dtype=dtype, device=device)
        written = len(rows) * width * src.element_size()
        yield Case(
            f"{name} x {len(rows)}",
            lambda src=src, fill=fill: ops.gather_rows(src, rows, fill),
            {"index_select": lambda src=src: index_select(src, rows)},
            moved=2 * written + 8 * len(rows),
            written=written,
            at_least={"2 threads": 1.6} if width == 188 else {},
        )
    yield _backward(sum(layout.seqlens), rows, device)


def _backward(num_src: int, rows: Tensor, device: str) -> Case:
    """The gradient of hidden states through the inverse map, which a microbatch has already."""
    width = 2048
    src = torch.zeros(num_src, width, dtype=torch.bfloat16, device=device)
    grad = torch.randn(len(rows), width, device=device).bfloat16()
    fill = src.new_zeros(width)
    inverse = ops.invert_rows(rows, num_src)
    missing = (rows < 0)[:, None]
    clamped = rows.clamp(min=0)

    def index_add() -> Tensor:
        return src.new_zeros(src.shape).index_add_(0, clamped, grad.masked_fill(missing, 0))

    return Case(
        f"backward of hidden x {len(rows)}",
        gradient(lambda x: ops.gather_rows(x, rows, fill, inverse), src, grad),
        {
            "index_add": index_add,
            "index_select": gradient(lambda x: index_select(x, rows), src, grad),
        },
        moved=grad.nbytes + src.nbytes + 8 * (len(rows) + num_src),
        written=src.nbytes,
    )


def gradient(forward: Callable[[Tensor], Tensor], src: Tensor, grad: Tensor) -> Callable:
    leaf = src.detach().requires_grad_()
    out = forward(leaf)
    return lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)[0]


def index_select(src: Tensor, rows: Tensor, fill: float = 0) -> Tensor:
    picked = src.index_select(0, rows.clamp(min=0))
    missing = (rows < 0).view(-1, *[1] * (src.ndim - 1))
    return (
        picked.masked_fill(missing, fill)
        if src.requires_grad
        else picked.masked_fill_(missing, fill)
    )


def gather_fields(device: str, shrink: int = 1) -> Iterator[Case]:
    """The token-aligned fields of a microbatch in one call, against an index a field."""
    layout = _layout(shrink)
    rows = layout.rows(0).to(device)
    dtypes = [torch.int64] * 3 + [torch.bool] + [torch.float32] * 4
    fields = [
        torch.empty(sum(layout.seqlens), dtype=d).random_(2 if d == torch.bool else 100).to(device)
        for d in dtypes
    ]
    fills = [0.0] * len(fields)
    written = len(rows) * sum(d.itemsize for d in dtypes)

    def one_by_one() -> Sequence[Tensor]:
        return [index_select(field, rows) for field in fields]

    yield Case(
        f"ids, targets, positions, mask, 4 fp32 x {len(rows)}",
        lambda: ops.gather_fields(fields, rows, fills).views,
        {"index each": one_by_one},
        moved=2 * written + 8 * len(rows),
        written=written,
    )
