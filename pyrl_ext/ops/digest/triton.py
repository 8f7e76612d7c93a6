# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops.tensors import to_device

from . import STEP, WORDS, seed_of, signed, word_size

BLOCK = 1024  # words that a program reads at a time
BLOCKS = 16  # of a program
COLUMNS = 5  # of a record: address, words, place in the chunk, factor, number of the tensor
# the bits that are all ones in a number that is not finite, and their width
EXPONENTS = {
    torch.float32: (0x7F800000, 4),
    torch.bfloat16: (0x7F80, 2),
    torch.float16: (0x7C00, 2),
}


class Kind(NamedTuple):
    """The constants of a launch.

    Args:
        word:    bytes of a word.
        aligned: True if 16 divides the address and the bytes of every record.
        low, high: bits of the one or two numbers in a word that say whether they are finite; 0:
            it is not asked for.
    """

    word: int
    aligned: bool
    low: int
    high: int


class Pieces(NamedTuple):
    """The records of a tensor of one shape, as if it were tensor 0 at address 0.

    Args:
        seed:    what its sum begins with.
        records: [n, COLUMNS] int64, one a program.
    """

    seed: int
    records: np.ndarray


def digests(tensors: list[Tensor], finite: bool) -> tuple[Tensor, Tensor]:
    records: dict[Kind, list[np.ndarray]] = {}
    seeds: list[int] = []
    held = [_addressed(tensor) for tensor in tensors]  # until the launches
    for number, tensor in enumerate(held):
        pieces = _pieces(tuple(tensor.shape), tensor.dtype)
        seeds.append(pieces.seed)
        if len(pieces.records):
            own = pieces.records + np.array([tensor.data_ptr(), 0, 0, 0, number])
            records.setdefault(_kind(tensor, own, finite), []).append(own)
    launches = {kind: np.concatenate(each) for kind, each in records.items()}
    host = np.concatenate([np.array(seeds), *(each.ravel() for each in launches.values())])
    table = to_device(torch.from_numpy(host), tensors[0].device)
    sums = table[: len(tensors)].clone()
    broken = torch.zeros(len(tensors), dtype=torch.int32, device=sums.device)
    start = len(tensors)
    kernel: Any = digests_kernel
    for kind, each in launches.items():
        own = table[start : start + each.size]
        start += each.size
        kernel[(len(each),)](
            own,
            sums,
            broken,
            WORD=8 * kind.word,
            ALIGNED=kind.aligned,
            LOW=kind.low,
            HIGH=kind.high,
            BLOCK=BLOCK,
        )
    if not finite:
        return sums, broken.new_empty(0, dtype=torch.bool)
    flags = broken == 0
    for number, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.dtype not in EXPONENTS:
            flags[number] = tensor.isfinite().all()
    return sums, flags


def _addressed(tensor: Tensor) -> Tensor:
    """The tensor in consecutive words, at an address that a word's size divides."""
    tensor = tensor.contiguous()
    if tensor.data_ptr() % word_size(tensor.shape, tensor.dtype):
        return tensor.clone()
    return tensor


def _kind(tensor: Tensor, records: np.ndarray, finite: bool) -> Kind:
    word = word_size(tensor.shape, tensor.dtype)
    aligned = not (records[:, 0] % 16).any() and not (records[:, 1] * word % 16).any()
    bits, width = EXPONENTS.get(tensor.dtype, (0, 4)) if finite else (0, 4)
    return Kind(word, aligned, bits, bits << 16 if word > width else bits)


@lru_cache(maxsize=256)
def _pieces(shape: tuple[int, ...], dtype: torch.dtype) -> Pieces:
    """The cuts of `digest_on_device`: chunks, of which several programs read parts."""
    seed = seed_of(shape, dtype)
    word = word_size(shape, dtype)
    records: list[tuple[int, ...]] = []
    if not prod(shape):
        return Pieces(seed, np.empty((0, COLUMNS), np.int64))
    sizes = [*shape] or [1]
    most = WORDS * word // dtype.itemsize
    parts = 1
    while prod(sizes[1:]) > most:
        parts *= sizes.pop(0)
    row = prod(sizes[1:])
    part = sizes[0] * row * dtype.itemsize  # bytes
    width = most // row * row * dtype.itemsize
    chunks = [
        (p * part + start, min(width, part - start))
        for p in range(parts)
        for start in range(0, part, width)
    ]
    for c, (start, size) in enumerate(chunks):
        factor = signed(pow(STEP, len(chunks) - 1 - c, 2**64))
        for place in range(0, size // word, BLOCK * BLOCKS):
            words = min(BLOCK * BLOCKS, size // word - place)
            records.append((start + place * word, words, place, factor, 0))
    total = signed(seed * pow(STEP, len(chunks), 2**64))
    return Pieces(total, np.array(records, np.int64))


@triton.jit
def digests_kernel(
    records,  # [programs, 5] int64
    sums,  # [n] int64, added to
    broken,  # [n] int32, 1 where a tensor holds a number that is not finite
    WORD: tl.constexpr,  # bits
    ALIGNED: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    record = records + tl.program_id(0).to(tl.int64) * 5
    address = tl.load(record)
    count = tl.load(record + 1)
    place = tl.load(record + 2)
    factor = tl.load(record + 3)
    tensor = tl.load(record + 4)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
        count = tl.multiple_of(count, 128 // WORD)
    if WORD == 32:
        words = address.to(tl.pointer_type(tl.int32))
    elif WORD == 16:
        words = address.to(tl.pointer_type(tl.int16))
    else:
        words = address.to(tl.pointer_type(tl.int8))
    total = tl.zeros((BLOCK,), tl.int64)
    found = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        word = tl.load(words + i, i < count, other=0)
        x = (place + i + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = (x ^ (x >> 31)) | 1
        total += word.to(tl.int64) * x.to(tl.int64)
        if LOW:
            bits = word.to(tl.int32)
            bad = ((bits & LOW) == LOW) | ((bits & HIGH) == HIGH)
            found |= bad.to(tl.int32)
    tl.atomic_add(sums + tensor, tl.sum(total) * factor)
    if LOW:
        tl.atomic_or(broken + tensor, tl.max(found))
