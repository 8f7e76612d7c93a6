"""A 64-bit digest of a tensor's bytes, to find what was lost, swapped or changed on the way.

The bytes are read as integers, each is multiplied by an odd 64-bit factor of its position, and the
products are added modulo 2^64. A change of one integer always changes the digest; other changes,
such as two integers that swap places, stay unnoticed with a probability of at most about 2^-32. It
finds faults, not forgery.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from math import gcd

import torch
from torch import Tensor

from pyrl_ext.ops.splitmix64 import GOLDEN, splitmix64

WORDS = 1 << 19  # integers of a chunk: enough to fill a GPU, few enough for a CPU's caches
STEP = 0x5851F42D4C957F2D  # odd: the factor from one chunk to the next
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def digest(tensor: Tensor) -> int:
    """64-bit digest of the tensor's dtype, shape and bytes.

    Args:
        tensor: any real dtype; strides and device do not change the result

    Syncs: once.
    """
    return read({"": digest_on_device(tensor)})[""]


def read(digests: Mapping[str, Tensor]) -> dict[str, int]:
    """Results of `digest_on_device` as numbers.

    Syncs: once for all digests of one device.
    """
    if not digests:
        return {}
    first, *_ = digests.values()
    numbers = torch.stack([each.to(first.device) for each in digests.values()]).tolist()
    return {name: number % 2**64 for name, number in zip(digests, numbers, strict=True)}


@torch.no_grad()
def digest_on_device(tensor: Tensor) -> Tensor:
    """`digest` as a scalar int64 on the tensor's device, without waiting for it.

    Memory: up to 6 MiB.
    """
    seed = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    total = torch.full((), seed, dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    tensor = tensor.detach().reshape(tensor.shape or (1,))
    # the widest integer that divides a row, and with it every chunk
    size = gcd(4, tensor.shape[-1] * tensor.itemsize)
    factors = _factors(tensor.device)
    for chunk in _chunks(tensor, WORDS * size // tensor.itemsize):
        words = _words(chunk, size).to(torch.int64)  # wider than any of INTEGERS: a copy
        total = torch.add(words.mul_(factors[: len(words)]).sum(), total, alpha=STEP)
    return total


def _chunks(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Parts of at most ``most`` elements, of whole rows if a row is no longer than that. The cuts
    depend on the shape alone."""
    row = tensor[0].numel()
    if row > most:
        for part in tensor:
            yield from _chunks(part, most)
    else:
        yield from tensor.split(most // row)


def _words(chunk: Tensor, size: int) -> Tensor:
    """The chunk's bytes as integers of ``size`` bytes."""
    flat = chunk.contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % size:  # the view below needs an aligned one
        flat = flat.clone()
    return flat.view(INTEGERS[size])


@cache
def _factors(device: torch.device) -> Tensor:
    """[WORDS] int64, odd, the same on every device."""
    return splitmix64(torch.arange(1, WORDS + 1, device=device) * GOLDEN) | 1
