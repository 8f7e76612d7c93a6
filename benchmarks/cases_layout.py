"""layout: the index map of one context-parallel rank of two, and the pad removal it serves."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.cases_routes import pad
from benchmarks.lengths import uniform
from benchmarks.measure import Case
from pyrl_ext.ops import gather_rows
from pyrl_ext.pack.layout import TokenLayout

CP = 2


def layout(device: str, shrink: int = 1) -> Iterator[Case]:
    """The map is made on the host, whatever the device; what it serves runs on the device."""
    maps = [(64, 4096), (512, 16384), (4096, 512)] if device == "cpu" else []
    for sequences, longest in maps:
        lengths = uniform(sequences, max(longest // shrink, 16))
        written = 8 * TokenLayout(lengths, cp_size=CP).num_local
        yield Case(
            f"index map, {sequences} seqs up to {longest // shrink}",
            lambda n=lengths: TokenLayout(n, cp_size=CP).rows(0),
            {"loop": lambda n=lengths: map_loop(n)},
            moved=written,  # nothing is read
            written=written,
            at_most={"ms": 3},
        )
    yield from _pad_removal(device, 16384 // shrink)


def _pad_removal(device: str, longest: int) -> Iterator[Case]:
    """Token ids of 512 padded sequences to the rows of a rank."""
    lengths = uniform(512, longest)
    total = sum(lengths)
    batch, mask = pad(torch.arange(1, total + 1), lengths, longest)  # 0 is padding
    flat = batch.view(-1).to(device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    starts = [i * longest + int(row.int().argmax()) for i, row in enumerate(mask)]
    placed = TokenLayout(lengths, CP, starts=tuple(starts))
    rows = placed.rows(0).to(device)
    padded = batch.to(device)
    on_device = mask.to(device)

    def with_map(fresh: TokenLayout) -> Tensor:
        return gather_rows(flat, fresh.rows(0).to(device, non_blocking=True), zero)

    ids = f"ids 512 x {longest}"
    size = 8 * len(rows)
    loop = {"loop": lambda: pad_removal_loop(padded, on_device)}
    removal = f"pad removal, {ids}"
    yield Case(
        f"{removal}, map made before",
        lambda: gather_rows(flat, rows, zero),
        loop,
        moved=3 * size,
        written=size,
        at_most={"ms": 3},
    )
    yield Case(
        f"{removal}, with its map from lengths",
        lambda: with_map(TokenLayout(placed.seqlens, CP, starts=placed.starts)),
        loop,
        moved=4 * size,
        written=size,
        at_most={"ms": 3},
    )


def map_loop(lengths: Sequence[int]) -> Tensor:
    """Rows of rank 0, built a sequence at a time."""
    parts = []
    start = 0
    for n in lengths:
        chunk = -(-n // (2 * CP))
        at = torch.arange(2 * CP * chunk)
        at = torch.cat([at[:chunk], at[-chunk:]])
        parts.append(torch.where(at < n, start + at, -1))
        start += n
    return torch.cat(parts)


def pad_removal_loop(batch: Tensor, mask: Tensor) -> Tensor:
    """Rank 0's ids, a boolean index a sequence."""
    parts = []
    for ids, real in zip(batch, mask, strict=True):
        taken = ids[real]
        chunk = -(-len(taken) // (2 * CP))
        padded = taken.new_zeros(2 * CP * chunk)
        padded[: len(taken)] = taken
        parts += [padded[:chunk], padded[-chunk:]]
    return torch.cat(parts)
