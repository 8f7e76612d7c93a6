"""Routes of one rank out of a padded batch, a sequence at a time, as other trainers get them.

Each function models the steps of one trainer and is written from a description of them, not from
its code; where a trainer widens more, or earlier, than the result needs, the model does not, so its
time is a lower bound. Arguments of all:

    batch: [B, S, L, K] routes, padded.
    mask:  [B, S] bool, True at real tokens, one run a sequence.
    dtype: what the router wants.
    parts: (cp_size, cp_rank, tp_size, tp_rank).

They return [L, M, K] ``dtype`` with zeros in padding rows. On a GPU each boolean index, ``tolist``
and ``int`` waits for the device.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

Parts = tuple[int, int, int, int]


def _zigzag(padded: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    if cp_size == 1:
        return padded
    chunks = padded.chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def _padded_length(length: int, cp_size: int, tp_size: int) -> int:
    unit = tp_size if cp_size == 1 else 2 * cp_size * tp_size
    return -(-length // unit) * unit


def _tp_slice(rows: Tensor, dim: int, tp_size: int, tp_rank: int) -> Tensor:
    return rows.chunk(tp_size, dim)[tp_rank]


def skyrl(batch: Tensor, mask: Tensor, dtype: torch.dtype, parts: Parts) -> Tensor:
    """A boolean index and a zero-filled buffer a sequence; everything widened and brought to
    layers before the sequence shard is cut off."""
    cp_size, cp_rank, tp_size, tp_rank = parts
    packed = []
    for routes, real in zip(batch, mask, strict=True):
        taken = routes[real]
        padded = taken.new_zeros(_padded_length(len(taken), cp_size, tp_size), *taken.shape[1:])
        padded[: len(taken)] = taken
        packed.append(_zigzag(padded, cp_size, cp_rank))
    layers = torch.cat(packed).permute(1, 0, 2).contiguous().to(dtype)
    return _tp_slice(layers, 1, tp_size, tp_rank).contiguous()


def verl(batch: Tensor, mask: Tensor, dtype: torch.dtype, parts: Parts) -> Tensor:
    """Lengths read back first; each sequence taken by its mask and its two chunks written into
    one buffer; the sequence shard cut off, then brought to layers and widened."""
    cp_size, cp_rank, tp_size, tp_rank = parts
    lengths = mask.sum(1).tolist()
    share = [_padded_length(n, cp_size, tp_size) // cp_size for n in lengths]
    packed = batch.new_zeros(sum(share), *batch.shape[2:])
    start = 0
    for routes, real, rows in zip(batch, mask, share, strict=True):
        taken = routes[real]
        for source, target, size in _two_chunks(rows, cp_size, cp_rank):
            part = taken[source : source + size]
            packed[start + target : start + target + len(part)] = part
        start += rows
    local = _tp_slice(packed, 0, tp_size, tp_rank)
    return local.permute(1, 0, 2).contiguous().to(dtype)


def _two_chunks(rows: int, cp_size: int, cp_rank: int) -> Iterable[tuple[int, int, int]]:
    """(first source row, first local row, rows) of what a rank holds of one sequence."""
    if cp_size == 1:
        return [(0, 0, rows)]
    half = rows // 2
    return [(cp_rank * half, 0, half), ((2 * cp_size - 1 - cp_rank) * half, half, half)]


def nemo_rl(batch: Tensor, mask: Tensor, dtype: torch.dtype, parts: Parts) -> Tensor:
    """Lengths read back once, each sequence a slice (no boolean index), padded, its chunks taken,
    all concatenated; the sequence shard cut off, then brought to layers and widened."""
    cp_size, cp_rank, tp_size, tp_rank = parts
    firsts = mask.int().argmax(1).tolist()
    lengths = mask.sum(1).tolist()
    packed = []
    for routes, first, length in zip(batch, firsts, lengths, strict=True):
        missing = _padded_length(length, cp_size, tp_size) - length
        padded = F.pad(routes[first : first + length], (0, 0, 0, 0, 0, missing))
        packed.append(_zigzag(padded, cp_size, cp_rank))
    local = _tp_slice(torch.cat(packed), 0, tp_size, tp_rank)
    return local.permute(1, 0, 2).contiguous().to(dtype)


TRAINERS = {"as SkyRL": skyrl, "as verl": verl, "as NeMo-RL": nemo_rl}
