"""gather_routes: the routes of one rank of TP4 CP2, all layers, from what the engine reported."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.lengths import lognormal
from benchmarks.measure import Case
from benchmarks.per_sequence import TRAINERS
from pyrl_ext.ops import gather_routes as op
from pyrl_ext.pack.layout import TokenLayout

PARTS = (2, 0, 4, 0)  # cp_size, cp_rank, tp_size, tp_rank


class Shape(NamedTuple):
    sequences: int
    longest: int  # tokens; the padded batch is as wide
    tokens: int  # of all sequences: 8 times the rows of a rank
    layers: int
    top_k: int
    experts: int


SHAPES = [
    Shape(64, 32768, 1_100_000, 46, 4, 64),  # GLM-4.7-Flash
    Shape(512, 16384, 1_216_000, 46, 4, 64),
    Shape(64, 32768, 536_000, 89, 8, 160),  # GLM-4.7
]


def gather_routes(device: str, shrink: int = 1) -> Iterator[Case]:
    for shape in SHAPES:
        size = (shape.longest // shrink, shape.tokens // shrink)
        yield from _cases(shape._replace(longest=size[0], tokens=size[1]), device)


def _cases(shape: Shape, device: str) -> Iterator[Case]:
    lengths = lognormal(shape.sequences, shape.longest, shape.tokens)
    layout = TokenLayout(lengths, cp_size=PARTS[0], tp_size=PARTS[2])
    rows = layout.shard(layout.rows(PARTS[1]), PARTS[3]).to(device)
    each = shape.layers * shape.top_k
    ragged = torch.empty(sum(layout.seqlens), shape.layers, shape.top_k, dtype=torch.uint8)
    ragged = ragged.random_(shape.experts).to(device)
    batch, mask = pad(ragged, lengths, shape.longest)
    slots = torch.arange(shape.layers)
    real = rows >= 0

    written = len(rows) * each
    yield Case(
        f"{shape.sequences} seqs, {shape.layers}x{shape.top_k} x {len(rows)}",
        lambda: op(ragged, rows, slots, shape.experts),
        {
            "torch": lambda: vectorised(ragged, rows),
            **{
                name: lambda run=run: run(batch, mask, torch.uint8, PARTS)
                for name, run in TRAINERS.items()
            },
        },
        moved=len(rows) * (each + 8) + written,
        written=written,
        at_most={"x written": 3.5},
        at_least={"torch": 5, **dict.fromkeys(TRAINERS, 15), "2 threads": 1.6},
        agree=lambda ours, theirs: torch.equal(ours[:, real], theirs[:, real]),
    )


def vectorised(routes: Tensor, rows: Tensor) -> Tensor:
    """Plain torch on the ragged stream: index_select, then permute. Padding rows get token 0's
    experts: the operator's own padding would cost it more."""
    return routes.index_select(0, rows.clamp(min=0)).permute(1, 0, 2).contiguous()


def pad(ragged: Tensor, lengths: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    """[B, width, ...] batch with padding on both sides, as prompt and response have it, and its
    [B, width] mask."""
    batch = ragged.new_zeros(len(lengths), width, *ragged.shape[1:])
    mask = torch.zeros(len(lengths), width, dtype=torch.bool, device=ragged.device)
    for index, sequence in enumerate(ragged.split(lengths)):
        first = (width - len(sequence)) // 2
        batch[index, first : first + len(sequence)] = sequence
        mask[index, first : first + len(sequence)] = True
    return batch, mask
