"""The sequences of a packed stream, and their chunks: what operators along a sequence share.

A stream has T rows. Sequence s is the rows from ``cu_seqlens[s]`` to before ``cu_seqlens[s + 1]``;
rows from the last one on are one more sequence, such as padding. Everything here has a shape that
follows from T and the length of ``cu_seqlens``, so that nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def check_sequences(where: str, x: Tensor, cu_seqlens: Tensor) -> None:
    """Raises: ValueError, TypeError: ``cu_seqlens`` is no [S + 1] int32 on the device of ``x``."""
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError(f"{where}: cu_seqlens is {list(cu_seqlens.shape)}, expected [S + 1]")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{where}: cu_seqlens is {cu_seqlens.dtype}, expected torch.int32")
    if cu_seqlens.device != x.device:
        raise ValueError(
            f"{where}: cu_seqlens is on {cu_seqlens.device}, the rows on {x.device}, expected one "
            "device"
        )


def check_boundaries(where: str, cu_seqlens: Tensor, rows: int) -> None:
    """The boundaries ascend from 0 to at most ``rows``; not looked at on a GPU, which it would
    wait for.

    Raises: ValueError.
    """
    if cu_seqlens.device.type != "cpu":
        return
    ends = cu_seqlens.tolist()
    wrong = next((n for n, (a, b) in enumerate(zip([0, *ends], ends)) if b < a or b > rows), None)
    if wrong is not None or ends[0]:
        raise ValueError(
            f"{where}: cu_seqlens[{wrong or 0}] is {ends[wrong or 0]}, expected numbers that "
            f"ascend from 0 to at most the {rows} rows"
        )


def sequence_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """[T] int64, the number of each row's sequence."""
    row = torch.arange(rows, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, row, right=True) - 1


def positions(cu_seqlens: Tensor, rows: int) -> Tensor:
    """[T] int64, how many rows of its sequence precede each row."""
    row = torch.arange(rows, device=cu_seqlens.device)
    return row - cu_seqlens[sequence_of_rows(cu_seqlens, rows)]


# rows of a chunk, by the mean length of sequences
SHORT = 16
LONG = 32


class SequenceChunks(NamedTuple):
    """M chunks of ``size`` rows each; every sequence begins one, and its last one may be short.

    Args:
        rows:   [M, size] int64, rows of the stream; 0 where a chunk has none.
        filled: [M, size] bool, whether a chunk has a row there.
        first:  [M] bool, whether a sequence begins with the chunk. True, too, where it is empty.
        places: [T] int64, where each row of the stream is among the M * size.
        later:  int64 each, chunks that follow others, a turn each: what they follow comes before.
    """

    rows: Tensor
    filled: Tensor
    first: Tensor
    places: Tensor
    later: tuple[Tensor, ...]

    def first_as(self, x: Tensor, chunks: Tensor) -> Tensor:
        """`first` of some chunks, for tensors with as many dimensions as ``x``."""
        return self.first[chunks].view(-1, *[1] * (x.ndim - 1))

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, ...] -> [M, size, ...] ``dtype``, zeros where a chunk has no row."""
        filled = self.filled.view(*self.filled.shape, *[1] * (x.ndim - 1))
        return torch.where(filled, x[self.rows].to(dtype), 0)

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[M, size, ...] -> [T, ...] ``dtype``, contiguous."""
        return x.flatten(0, 1)[self.places].to(dtype)


def chunks_of(cu_seqlens: Tensor, rows: int) -> SequenceChunks:
    """The chunks of a stream of ``rows`` rows: as many as its sequences may need at most."""
    starts = cu_seqlens.long()
    # what is computed of a chunk grows with its square, and a sequence may leave most of one empty
    size = SHORT if rows < LONG * len(starts) else LONG
    ends = torch.cat([starts[1:], starts.new_full((1,), rows)])
    counts = (ends - starts + size - 1) // size
    before = counts.cumsum(0) - counts
    most = min(rows, (rows + len(starts) * (size - 1)) // size)
    chunk = torch.arange(most, device=starts.device)
    sequence = torch.searchsorted(before + counts, chunk, right=True).clamp(max=len(starts) - 1)
    number = chunk - before[sequence]  # of the chunk in its sequence
    inside = number[:, None] * size + torch.arange(size, device=starts.device)
    row = starts[sequence, None] + inside
    filled = row < ends[sequence, None]
    own = sequence_of_rows(starts, rows)
    at = before[own] * size + torch.arange(rows, device=starts.device) - starts[own]
    first = (number == 0) | ~filled[:, 0]
    if first.device.type == "cpu":  # second chunks of all sequences at once, then third ones
        number = torch.where(first, 0, number)
        turns = number.max() + 1 if most else 0
        later = [(number == n).nonzero()[:, 0] for n in range(1, int(turns))]
    else:  # reading numbers would wait for the device
        later = chunk[1:].split(1)
    return SequenceChunks(torch.where(filled, row, 0), filled, first, at, tuple(later))


class Decays(NamedTuple):
    """exp of sums of logarithms within a chunk: what is left of a state or of an earlier row.

    Args:
        start:  [..., size, 1], of the state before the chunk, at each row.
        inside: [..., size, size], at row i of what row j <= i added; 0 for j > i.
        end:    [..., size, 1], after the chunk of what each row added.
        total:  [..., 1, 1], after the chunk of the state before it.
    """

    start: Tensor
    inside: Tensor
    end: Tensor
    total: Tensor


def decays_of(logs: Tensor) -> Decays:
    """The decays of log decays [..., size]. Each sum adds its terms only: a difference of running
    sums would lose the small ones next to large ones."""
    size = logs.shape[-1]
    sums = logs[..., None].expand(*logs.shape, size + 1).tril().cumsum(-2)  # column 0: all terms
    start, inside = sums.exp().tril(1).split([1, size], -1)
    return Decays(start, inside, inside[..., -1:, :].mT, start[..., -1:, :])


def logs_grad(terms: Decays) -> Tensor:
    """The gradient of log decays [..., size] from those of the logarithms of `Decays`."""
    sums = torch.cat([terms.start, terms.inside], -1)
    sums[..., -1:, 1:] += terms.end.mT
    sums[..., -1:, :1] += terms.total
    return sums.flip(-2).cumsum(-2).flip(-2).tril().sum(-1)


Product = Callable[[Tensor, Tensor], Tensor]


def states_before(kept: Tensor, added: Tensor, chunks: SequenceChunks, product: Product) -> Tensor:
    """The state before each chunk, where ``state = product(kept[m], state) + added[m]``."""
    states = torch.zeros_like(added)
    for turn in chunks.later:
        before = turn - 1
        state = product(kept[before], states[before]) + added[before]
        states[turn] = torch.where(chunks.first_as(state, turn), 0, state)
    return states


def grads_after(kept: Tensor, added: Tensor, chunks: SequenceChunks, product: Product) -> Tensor:
    """The gradient of the state after each chunk; that before it is ``product(kept[m], grad) +
    added[m]``."""
    grads = torch.zeros_like(added)
    for turn in reversed(chunks.later):
        grad = product(kept[turn], grads[turn]) + added[turn]
        grads[turn - 1] = torch.where(chunks.first_as(grad, turn), 0, grad)
    return grads
