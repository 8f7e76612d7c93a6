"""Rates that the plan's forecast assumes, measured: ``python -m benchmarks.gpu.rates``.

A row for each kind of `parts.REACHED` that one GPU can show, with GLM-4.7-Flash's widths. Medians;
operations are counted as the forecast counts them (the unmasked half of attention; a backward
pass is twice a forward pass). ``--device cpu`` runs tiny sizes, to see that they run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.rows import note, noting
from benchmarks.measure import call_seconds
from pyrl_ext.loss.fused_head import linear_logprob_loss
from pyrl_ext.megatron.packed_attention import PackedAttention, PackedSequences
from pyrl_ext.pack.layout import TokenLayout

BUDGET = 0.5  # seconds for each
HIDDEN = 2048
WIDE = 10240
EXPERTS = 64
EXPERT_WIDTH = 1536
TOP_K = 4
VOCAB = 154880
HEADS = 20
HEAD_WIDTH = 256


class Work(NamedTuple):
    """A kind of `parts.REACHED`, and a call that does ``amount`` of it, in ``unit``."""

    kind: str
    what: str
    amount: float
    unit: str
    run: Callable[[], Any]


class Size(NamedTuple):
    """Sizes that rates are measured at: tokens, and the divisor of every width."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    shrink: int

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def copies(at: Size) -> Iterator[Work]:
    count = (4 << 30) // at.shrink**2
    source, target = torch.zeros(2, count, dtype=torch.uint8, device=at.device)
    what = f"a copy of {count >> 20} MiB, bytes read and written"
    yield Work("memory", what, 2 * count, "byte", lambda: target.copy_(source))


def host_link(at: Size) -> Iterator[Work]:
    count = (1 << 30) // at.shrink**2
    cuda = at.device.type == "cuda"
    there = torch.zeros(count, dtype=torch.uint8, device=at.device)
    here = torch.zeros(count, dtype=torch.uint8, pin_memory=cuda)
    for what, to, of in (("to the device", there, here), ("to the host", here, there)):
        text = f"{count >> 20} MiB of pinned memory {what}"
        yield Work(
            "host", text, count, "byte", lambda to=to, of=of: to.copy_(of, non_blocking=True)
        )


def both_passes(run: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> Callable[[], Any]:
    """A forward pass and the gradients of all inputs, from that of the result."""
    leaves = [x.requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(run(*leaves), leaves, grad)


def products(at: Size) -> Iterator[Work]:
    n = 8192 // at.shrink
    a = at.random(n, n)
    b = at.random(n, n)
    yield Work("product", f"{n} x {n} x {n}", 2 * n**3, "FLOP", lambda: a @ b)
    rows = at.tokens
    k = HIDDEN // at.shrink
    out = WIDE // at.shrink
    x = at.random(rows, k)
    w = at.random(out, k)
    grad = at.random(rows, out)
    run = both_passes(lambda x, w: x @ w.t(), grad, x, w)
    text = f"{rows} x {k} x {out}, both passes"
    yield Work("projections", text, 6 * rows * k * out, "FLOP", run)


def experts(at: Size) -> Iterator[Work]:
    count = EXPERTS
    k = HIDDEN // at.shrink
    width = 2 * EXPERT_WIDTH // at.shrink
    rows = at.tokens * TOP_K // count
    x = at.random(rows * count, k)
    w = at.random(count, width, k)
    ends = torch.arange(1, count + 1, device=at.device, dtype=torch.int32) * rows

    def product(x: Tensor, w: Tensor) -> Tensor:
        return F.grouped_mm(x, w.transpose(-2, -1), offs=ends)

    run = both_passes(product, at.random(rows * count, width), x, w)
    text = f"{count} experts of {rows} rows x {k} x {width}, both passes"
    yield Work("grouped experts", text, 6 * rows * count * k * width, "FLOP", run)


def attention(at: Size) -> Iterator[Work]:
    """Forward and backward of packed sequences of 4096 rows."""
    heads = HEADS // min(at.shrink, 10)
    width = HEAD_WIDTH // at.shrink
    length = 4096 // at.shrink
    number = max(1, at.tokens // length)
    layout = TokenLayout((length,) * number, cp_size=1, tp_size=1)
    part = attention_of(layout, at.device)
    q, k, v, grad = (at.random(length * number, heads, width) for _ in range(4))
    run = both_passes(part, grad, q, k, v)
    pairs = number * length * (length + 1) // 2
    text = f"{number} sequences of {length}, {heads} heads of {width}, both passes"
    yield Work("attention", text, 3 * pairs * heads * 4 * width, "FLOP", run)


def attention_of(layout: TokenLayout, device: torch.device) -> Callable[..., Tensor]:
    """The core attention of a packed microbatch, as a layer without process groups runs it."""
    from pyrl_ext.parallel.topology import RankCoords

    packed = PackedSequences(
        layout=layout,
        place=RankCoords(),
        positions=torch.zeros(0, dtype=torch.int64, device=device),
    )
    chunks = packed.over_ranks
    core = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(core)
    core.scale = None
    run = core._varlen if device.type == "cuda" else core._by_shape
    return lambda q, k, v: run(q, k, v, chunks)


def head(at: Size) -> Iterator[Work]:
    """The fused head with the loss in the chunk: three products of tokens, hidden and words."""
    k = HIDDEN // at.shrink
    vocab = VOCAB // at.shrink
    hidden = at.random(at.tokens, k)
    weight = at.random(vocab, k).mul_(k**-0.5)
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    targets = torch.randint(vocab, (at.tokens,), device=at.device)

    def loss(logprob: Tensor, entropy: Tensor, tokens: Tensor) -> Tensor:
        return -logprob.sum()

    def run() -> Any:
        total = linear_logprob_loss(hidden, weight, targets, loss)
        return torch.autograd.grad(total, (hidden, weight))

    text = f"{at.tokens} x {k} x {vocab}, forward and backward"
    yield Work("head", text, 6 * at.tokens * k * vocab, "FLOP", run)


FAMILIES = (copies, host_link, products, experts, attention, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    on_gpu = parser.parse_args().device == "cuda"
    device = torch.device("cuda" if on_gpu else "cpu")
    at = Size(device, torch.bfloat16, 8192 if on_gpu else 64, 1 if on_gpu else 16)
    budget = BUDGET if on_gpu else 0.0
    for family in FAMILIES:
        with noting(family.__name__):
            for work in family(at):
                times = call_seconds(work.run, device.type, budget, 5 if on_gpu else 1)
                note(
                    work.kind,
                    what=work.what,
                    rate=work.amount / statistics.median(times),
                    unit=work.unit,
                    dtype="bfloat16",
                    ms=1e3 * statistics.median(times),
                )
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
