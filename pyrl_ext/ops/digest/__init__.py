"""A 64-bit digest of a tensor's bytes, to find what was lost, swapped or changed on the way.

The bytes are read as integers, each is multiplied by an odd 64-bit factor of its position, and the
products are added modulo 2^64. A change of one integer always changes the digest; other changes,
such as two integers that swap places, stay unnoticed with a probability of at most about 2^-32. It
finds faults, not forgery.

`DigestLog` takes the digests of many tensors at a time, with the operator `digests`. Its backends:
triton, reference (torch, one tensor after another). Gradient: none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.ops._arguments import need_tensor
from pyrl_ext.ops._op import Op
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
    return int(digest_on_device(tensor)) % 2**64


@torch.no_grad()
def digest_on_device(tensor: Tensor) -> Tensor:
    """`digest` as a scalar int64 on the tensor's device, without waiting for it.

    Launches: three for every 8 MiB on a GPU; experts are many and small. Memory: up to 6 MiB on a
    CPU, 16 MiB on a GPU, where it keeps up to 64 MiB of factors.
    """
    seed = seed_of(tensor.shape, tensor.dtype)
    if not tensor.numel():
        return torch.full((), seed, dtype=torch.int64, device=tensor.device)
    tensor = tensor.detach().reshape(tensor.shape or (1,))
    size = word_size(tensor.shape, tensor.dtype)
    total = seed
    if tensor.device.type == "cpu" and tensor.nbytes <= SMALL:
        # a copy: what numpy shares can no longer be resized, so not be offloaded
        words = _words(tensor, size).to(torch.int64).numpy()
        sums = int(words @ _on_host()[: len(words)])  # wraps
        return torch.tensor(signed(sums + seed * STEP))
    at_once = _at_once(tensor.device)
    for part, chunk in _parts(tensor, WORDS * size // tensor.itemsize, at_once):
        words = _words(part, size)
        width = chunk * tensor.itemsize // size
        chunks = -(-len(words) // width)
        factors = _factors(tensor.device, width, at_once)[(at_once - chunks) * width :]
        products = _times(words, factors[: len(words)])
        step = signed(pow(STEP, chunks, 2**64))
        if isinstance(total, int):
            total = products.sum().add_(signed(total * step))
        else:
            total = torch.add(products.sum(), total, alpha=step)
    assert isinstance(total, Tensor)  # there was a part
    return total


def seed_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The digest of no bytes: of dtype and shape alone."""
    return zlib.crc32(f"{dtype} {list(shape)}".encode())


def word_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the widest integer that divides a row, and with it every chunk."""
    return gcd(4, (*shape, 1)[len(shape) - 1] * dtype.itemsize)


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


def signed(number: int) -> int:
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
    steps = [signed(pow(STEP, chunks - 1 - i, 2**64)) for i in range(chunks)]
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


# many tensors -------------------------------------------------------------------------------------


class Digests(NamedTuple):
    """Digests of several tensors, on the tensors' device.

    Args:
        sums:   [n] int64, `digest` of each, as a signed number.
        finite: [n] bool, False for a tensor that holds nan or inf; [0] if it was not asked for.
    """

    sums: Tensor
    finite: Tensor


def reference(tensors: list[Tensor], finite: bool) -> tuple[Tensor, Tensor]:
    sums = torch.stack([digest_on_device(tensor) for tensor in tensors])
    flags = [tensor.isfinite().all() for tensor in tensors] if finite else []
    return sums, torch.stack(flags) if flags else sums.new_empty(0, dtype=torch.bool)


def _fake(tensors: list[Tensor], finite: bool) -> tuple[Tensor, Tensor]:
    flags = len(tensors) if finite else 0
    sums = tensors[0].new_empty(len(tensors), dtype=torch.int64)
    return sums, tensors[0].new_empty(flags, dtype=torch.bool)


op = Op("digests(Tensor[] tensors, bool finite) -> (Tensor, Tensor)", fake=_fake)
op.serve(__name__, "triton")
op.backend("reference", reference)


@torch.no_grad()
def digests(tensors: Sequence[Tensor], finite: bool = False) -> Digests:
    """`digest` of each tensor, without waiting for them.

    Args:
        tensors: at least one, of any real dtypes, on one device. By Triton their bytes are read
            once, in a launch for each kind of dtype.
        finite:  also tell tensors that hold nan or inf.

    Raises: ValueError, TypeError: no tensors, several devices, or complex numbers.
    """
    if not tensors:
        raise ValueError("digests: 0 tensors, expected at least one")
    for n, tensor in enumerate(tensors):
        need_tensor("digests", f"tensors[{n}]", tensor)
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"digests: tensors[{n}] is on {tensor.device}, tensors[0] on {tensors[0].device}, "
                "expected one device"
            )
        if tensor.dtype.is_complex:
            raise TypeError(f"digests: tensors[{n}] is {tensor.dtype}, expected a real dtype")
    return Digests(*op([tensor.detach() for tensor in tensors], finite))


class DigestLog:
    """Digests of named tensors, taken many at a time.

    Args:
        finite: also note which tensors hold nan or inf.
        at_once: tensors are kept until they have so many bytes.
    """

    def __init__(self, finite: bool = False, at_once: int = 2**28):
        self.finite = finite
        self.at_once = at_once
        self._taken: dict[str, tuple[Digests, int]] = {}
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._taken or name in self._waiting

    def add(self, name: str, tensor: Tensor) -> None:
        """Replaces the digest of that name. The tensor must not change before `flush`."""
        self._waiting[name] = tensor
        self._bytes += tensor.nbytes
        if self._bytes >= self.at_once:
            self.flush()

    def flush(self) -> None:
        """Compute the digests of the added tensors, and drop the tensors."""
        devices: dict[torch.device, list[str]] = {}
        for name, tensor in self._waiting.items():
            devices.setdefault(tensor.device, []).append(name)
        for names in devices.values():
            found = digests([self._waiting[name] for name in names], self.finite)
            self._taken |= {name: (found, place) for place, name in enumerate(names)}
        self._waiting = {}
        self._bytes = 0

    def numbers(self) -> dict[str, int]:
        """Name -> digest of each tensor. Syncs: once a device."""
        self.flush()
        held = self._read(0)
        return {n: held[id(found)][at] % 2**64 for n, (found, at) in self._taken.items()}

    def not_finite(self) -> list[str]:
        """Names of the tensors that hold nan or inf. Syncs: once a device."""
        self.flush()
        held = self._read(1)
        return [n for n, (found, at) in self._taken.items() if not held[id(found)][at]]

    def _read(self, field: int) -> dict[int, list[int]]:
        """id of `Digests` -> its sums (0) or flags (1)."""
        devices: dict[torch.device, dict[int, Tensor]] = {}
        for found, _ in self._taken.values():
            devices.setdefault(found.sums.device, {})[id(found)] = found[field]
        lists: dict[int, list[int]] = {}
        for held in devices.values():
            numbers = iter(torch.cat([*held.values()]).tolist())
            lists |= {key: list(islice(numbers, len(tensor))) for key, tensor in held.items()}
        return lists
