"""A 64-bit digest of a tensor's bytes, to find what was lost, swapped or changed on the way.

The bytes are read as integers, each is multiplied by an odd 64-bit factor of its position, and the
products are added modulo 2^64. A change of one integer always changes the digest; other changes,
such as two integers that swap places, stay unnoticed with a probability of at most about 2^-32. It
finds faults, not forgery.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu

WORDS = 1 << 19  # integers of a chunk: enough to fill a GPU, few enough for a CPU's caches
SMALL = 1 << 18  # bytes of a tensor on a CPU for which numpy, whose calls cost less, is faster
STEP = 0x5851F42D4C957F2D  # odd: the factor from one chunk to the next
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, the step between two inputs
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

    Launches: three for every 8 MiB on a GPU; experts are many and small. Memory: up to 6 MiB on a
    CPU, 16 MiB on a GPU, where it keeps up to 64 MiB of factors.
    """
    seed = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    if not tensor.numel():
        return torch.full((), seed, dtype=torch.int64, device=tensor.device)
    tensor = tensor.detach().reshape(tensor.shape or (1,))
    # the widest integer that divides a row, and with it every chunk
    size = gcd(4, tensor.shape[-1] * tensor.itemsize)
    total = seed
    if tensor.device.type == "cpu" and tensor.nbytes <= SMALL:
        # a copy: what numpy shares can no longer be resized, so not be offloaded
        words = _words(tensor, size).to(torch.int64).numpy()
        sums = int(words @ _on_host()[: len(words)])  # wraps
        return torch.tensor(_signed(sums + seed * STEP))
    at_once = _at_once(tensor.device)
    for part, chunk in _parts(tensor, WORDS * size // tensor.itemsize, at_once):
        words = _words(part, size)
        width = chunk * tensor.itemsize // size
        chunks = -(-len(words) // width)
        factors = _factors(tensor.device, width, at_once)[(at_once - chunks) * width :]
        products = _times(words, factors[: len(words)])
        step = _signed(pow(STEP, chunks, 2**64))
        if isinstance(total, int):
            total = products.sum().add_(_signed(total * step))
        else:
            total = torch.add(products.sum(), total, alpha=step)
    assert isinstance(total, Tensor)  # there was a part
    return total


def _at_once(device: torch.device) -> int:
    """Chunks that are launched together; a chunk at a time stays in a CPU's caches."""
    return 4 if on_gpu(device) else 1


def _parts(tensor: Tensor, most: int, at_once: int) -> Iterator[tuple[Tensor, int]]:
    """Parts of up to ``at_once`` chunks, and the elements of a chunk: at most ``most``, of whole
    rows if a row is no longer than that. The cuts of chunks depend on the shape alone."""
    row = tensor[0].numel()
    if row > most:
        for part in tensor:
            yield from _parts(part, most, at_once)
    else:
        rows = most // row
        yield from ((part, rows * row) for part in tensor.split(rows * at_once))


def _words(part: Tensor, size: int) -> Tensor:
    """The bytes as integers of ``size`` bytes."""
    flat = part.contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % size:  # the view below needs an aligned one
        flat = flat.clone()
    return flat.view(INTEGERS[size])


def _signed(number: int) -> int:
    """As an int64 holds it, which wraps."""
    return (number + 2**63) % 2**64 - 2**63


def _times(words: Tensor, factors: Tensor) -> Tensor:
    """Their int64 products: in one launch on a GPU; a CPU is faster in two steps."""
    return words * factors if on_gpu(words) else words.to(torch.int64).mul_(factors)


def _factors(device: torch.device, width: int, chunks: int) -> Tensor:
    """[chunks * width] int64, odd, the same on every device: of the words of the last ``chunks``
    chunks, with the steps from each to the last one."""
    return _stepped(device, width, chunks) if chunks > 1 else _of_a_chunk(device)[:width]


@lru_cache(maxsize=4)  # a model's experts have two widths
def _stepped(device: torch.device, width: int, chunks: int) -> Tensor:
    steps = [_signed(pow(STEP, chunks - 1 - i, 2**64)) for i in range(chunks)]
    return torch.cat([_of_a_chunk(device)[:width] * step for step in steps])


@cache
def _of_a_chunk(device: torch.device) -> Tensor:
    return splitmix64(torch.arange(1, WORDS + 1, device=device) * GOLDEN) | 1


@cache
def _on_host() -> np.ndarray:
    """Those of small tensors, as numpy has them."""
    return _of_a_chunk(torch.device("cpu"))[:SMALL].numpy()


def splitmix64(x: Tensor) -> Tensor:
    """splitmix64's output function on int64, which looks random: products wrap, a mask makes the
    shifts logical.

    Args:
        x: any shape, int64

    Returns:
        the same shape, int64
    """
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))
