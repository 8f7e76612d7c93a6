"""A number for the bytes of a tensor: equal where nothing was lost, swapped or changed on the way.

The bytes are read as integers, each is multiplied by an odd 64-bit number of its position, and the
products are added modulo 2^64. So a change of one integer always shows; another change, as of
integers that change places, goes unnoticed about once in 2^32 cases or less. It finds faults, not
forgery.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

WORDS = 1 << 19  # integers that are multiplied at a time: enough for a GPU, and near a CPU's caches
STEP = 0x5851F42D4C957F2D  # odd: from one such chunk to the next
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def digest(tensor: Tensor) -> int:
    """64-bit digest of the tensor's dtype, shape and bytes.

    Args:
        tensor: any shape, strides and device, which do not change the result; any real dtype

    Syncs: once.
    """
    return read({"": digest_on_device(tensor)})[""]


def read(found: Mapping[str, Tensor]) -> dict[str, int]:
    """Results of `digest_on_device` as numbers.

    Syncs: once for all that are on one device.
    """
    if not found:
        return {}
    first, *_ = found.values()
    numbers = torch.stack([each.to(first.device) for each in found.values()]).tolist()
    return {name: number % 2**64 for name, number in zip(found, numbers, strict=True)}


@torch.no_grad()
def digest_on_device(tensor: Tensor) -> Tensor:
    """`digest` as a scalar int64 on the tensor's device, without waiting for it.

    Takes up to 6 MiB beside the tensor.
    """
    seed = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    total = torch.full((), seed, dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    tensor = tensor.detach().reshape(tensor.shape or (1,))
    # the widest integers that rows are whole numbers of, so that every chunk is
    size = gcd(4, tensor.shape[-1] * tensor.itemsize)
    factors = _factors(tensor.device)
    for chunk in _chunks(tensor, WORDS * size // tensor.itemsize):
        words = _words(chunk, size).to(torch.int64)  # wider than any of INTEGERS: a copy
        total = torch.add(words.mul_(factors[: len(words)]).sum(), total, alpha=STEP)
    return total


def _chunks(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Parts of up to ``most`` elements, whole rows where a row is no longer than that: where they
    are cut depends on the shape alone."""
    row = tensor[0].numel()
    if row > most:
        for each in tensor:
            yield from _chunks(each, most)
    else:
        yield from tensor.split(most // row)


def _words(chunk: Tensor, size: int) -> Tensor:
    """Its bytes as integers of ``size`` bytes."""
    flat = chunk.contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % size:  # the view below needs an aligned one
        flat = flat.clone()
    return flat.view(INTEGERS[size])


@cache
def _factors(device: torch.device) -> Tensor:
    """[WORDS] int64, odd, alike everywhere (the mixing function of splitmix64)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
