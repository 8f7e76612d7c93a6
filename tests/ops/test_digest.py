"""The digest of tensors against its definition in Python's integers, and what must change it."""

from __future__ import annotations

import zlib
from itertools import combinations
from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyrl_ext.ops import digest as module
from pyrl_ext.ops import use_backend
from pyrl_ext.ops.digest import STEP, WORDS, DigestLog, digest, digest_on_device, digests
from pyrl_ext.parallel.offload import OffloadedStorage

MASK = 2**64 - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)


def factor(place: int) -> int:
    z = (place + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def plain(tensor: Tensor) -> int:
    """The definition, one integer after another; for tensors of one chunk."""
    total = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    if data:
        size = gcd(4, (tensor.shape or (1,))[-1] * tensor.itemsize)
        words = [data[i : i + size] for i in range(0, len(data), size)]
        signed = [int.from_bytes(word, "little", signed=True) for word in words]
        total = total * STEP + sum(w * factor(i) for i, w in enumerate(signed))
    return total & MASK


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    width = dtype.itemsize
    drawn = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    count = torch.Size(shape).numel() * width
    data = torch.randint(0, top, (count,), dtype=torch.uint8, generator=drawn)
    return data.view(dtype).view(shape)


class Launches(TorchDispatchMode):
    """Notes operators that are kernels on a GPU: those that make no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and str(func) != "aten.detach.default":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=100, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.integers(0, 99))
def test_digest_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype, seed: int):
    tensor = random(shape, dtype, seed)
    assert digest(tensor) == plain(tensor)


@settings(max_examples=100, deadline=None)
@given(shapes.filter(all), st.sampled_from(DTYPES[:5]), st.data())
def test_digest_changes_with_one_bit_the_dtype_and_the_shape(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
):
    tensor = random(shape, dtype)
    before = digest(tensor)
    other = tensor.clone()
    held = other.view(-1).view(torch.uint8)
    place = data.draw(st.integers(0, held.numel() - 1))
    held[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(other) != before
    assert digest(tensor[None]) != before
    if dtype.itemsize == 2:
        assert digest(tensor.view(torch.int16)) != before


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 7), st.integers(1, 7), st.data())
def test_digest_changes_when_rows_change_places(rows: int, columns: int, data: st.DataObject):
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    order = data.draw(st.permutations(range(rows)))
    assert (digest(tensor[list(order)]) == digest(tensor)) == (list(order) == sorted(order))
    signs = torch.ones(rows)  # differ in one bit, the highest
    signs[0] = -1
    assert digest(signs.flip(0)) != digest(signs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_digest_does_not_depend_on_strides_or_addresses(dtype: torch.dtype):
    tensor = random((6, 10, 4), dtype)
    expected = digest(tensor)
    for like in (
        tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.cat([tensor, tensor], 1)[:, :10],
        torch.cat([tensor.new_zeros(1), tensor.view(-1)])[1:].view(tensor.shape),  # not aligned
        tensor.clone().requires_grad_() if dtype.is_floating_point else tensor,
    ):
        assert digest(like) == expected
    row = tensor[0, :1]
    assert digest(row.expand(5, 4)) == digest(row.expand(5, 4).contiguous())


@pytest.mark.parametrize(
    "shape", [(WORDS - 1,), (WORDS + 1,), (3 * WORDS + 2,), (2, WORDS + 3), (3, 1000, 501), ()]
)
def test_digest_is_right_for_sizes_around_a_chunk(shape: tuple[int, ...]):
    for dtype in (torch.bfloat16, torch.float32):
        tensor = random(shape, dtype)
        before = digest(tensor)
        assert digest(torch.stack([tensor, tensor], -1)[..., 0]) == before
        if tensor.dim():
            assert digest(tensor.flip(0)) != before
        tensor.view(-1)[-1].neg_()
        assert digest(tensor) != before


def test_digest_changes_when_chunks_change_places(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "WORDS", 8)
    monkeypatch.setattr(module, "SMALL", -1)
    tensor = random((64,), torch.float32)
    chunks = tensor.split(8)
    seen = {digest(tensor)}
    for a, b in combinations(range(8), 2):
        order = list(range(8))
        order[a], order[b] = b, a
        seen.add(digest(torch.cat([chunks[i] for i in order])))
    assert len(seen) == 1 + 28


def test_digest_of_several_chunks_at_once_is_the_same(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU."""
    shapes = ((), (7,), (33,), (64,), (5, 7), (9, 3), (2, 67), (3, 40, 5))
    tensors = [random(shape, dtype) for shape in shapes for dtype in DTYPES]
    digest(tensors[0])  # factors of chunks as long as ever are kept
    monkeypatch.setattr(module, "WORDS", 8)
    monkeypatch.setattr(module, "SMALL", -1)
    expected = [digest(tensor) for tensor in tensors]
    for at_once in (2, 4, 16):
        monkeypatch.setattr(module, "_at_once", lambda device, at_once=at_once: at_once)
        assert [digest(tensor) for tensor in tensors] == expected
    module._stepped.cache_clear()  # of chunks of 8


def test_digest_of_an_expert_is_few_launches(monkeypatch: pytest.MonkeyPatch):
    """A publish has tens of thousands of them."""
    on_gpu = module._at_once(torch.device("cuda"))
    monkeypatch.setattr(module, "_at_once", lambda device: on_gpu)
    tensor = random((768, 2048), torch.bfloat16)
    digest(tensor)  # makes the factors
    with Launches() as launches:
        digest_on_device(tensor)
    assert launches.names == ["_to_copy", "mul_", "sum", "add_"]  # on a GPU the first two are one


def many() -> list[Tensor]:
    """Tensors of every kind: chunks, rows longer than a chunk, no elements, no alignment."""
    shapes = ((), (7,), (33,), (64,), (5, 7), (9, 3), (2, 67), (3, 40, 5), (0, 4), (16, 16))
    tensors = [random(shape, dtype) for shape in shapes for dtype in (*DTYPES, torch.float16)]
    tensors += [random((6, 10), torch.float32).T, random((65,), torch.bfloat16)[1:]]
    bad = [(torch.inf, torch.float32), (torch.nan, torch.bfloat16), (-torch.inf, torch.float16)]
    for number, dtype in (*bad, (torch.nan, torch.float64)):
        for width, place in ((4, 0), (4, 11), (5, 14)):  # either half of a word, and a word
            tensors.append(torch.ones(3, width, dtype=dtype))
            tensors.append(tensors[-1].clone())
            tensors[-1].view(-1)[place] = number
    return tensors


def finite(tensor: Tensor) -> bool:
    return bool(tensor.to(torch.float64).isfinite().all())


def triton_equals_reference() -> None:
    from pyrl_ext.ops.digest import triton

    tensors = [t for t in many() if t.dtype != torch.float8_e4m3fn]
    programs = list[int]()
    launch = triton.digests_kernel.run

    def counted(*args: Any, grid: tuple[int], **how: Any) -> Any:
        programs.append(grid[0])
        return launch(*args, grid=grid, **how)

    with use_backend("triton"):
        found = digests(tensors, finite=True)
        sums, none = digests(tensors)
    assert found.sums.tolist() == sums.tolist() == [signed(digest(tensor)) for tensor in tensors]
    assert found.finite.tolist() == [finite(tensor) for tensor in tensors] and not none.numel()
    module.WORDS = triton.WORDS = 8  # several chunks
    module.SMALL = -1
    triton._pieces.cache_clear()
    tensors = [random(shape, torch.bfloat16) for shape in ((33,), (2, 67), (3, 40), (9, 3))]
    with use_backend("triton"):
        sums, _ = digests(tensors)
    assert sums.tolist() == [signed(digest(tensor)) for tensor in tensors]
    module.WORDS = triton.WORDS = WORDS
    module.SMALL = 2**18
    triton._pieces.cache_clear()
    triton.digests_kernel.run = counted
    experts = [random((300, 128), torch.bfloat16, seed) for seed in range(8)]
    with use_backend("triton"):
        assert digests(experts).sums.tolist() == [signed(digest(expert)) for expert in experts]
    assert programs == [8 * 2]  # one launch, whatever their number


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def test_digests_are_those_of_each_tensor():
    tensors = [tensor for tensor in many() if tensor.dtype != torch.float8_e4m3fn]
    found = digests(tensors, finite=True)
    assert found.sums.tolist() == [signed(digest(tensor)) for tensor in tensors]
    assert found.finite.tolist() == [finite(tensor) for tensor in tensors]
    assert not digests(tensors).finite.numel()


def test_DigestLog_has_the_last_digest_of_each_name():
    log = DigestLog(finite=True, at_once=100)
    tensors = {str(n): random((n, 3), torch.float32, n) for n in range(12)}
    for name, tensor in tensors.items():
        log.add(name, tensor)
        assert name in log and "12" not in log
        assert len(log._waiting) <= 8  # 100 bytes are kept at most
    assert log.numbers() == {name: digest(tensor) for name, tensor in tensors.items()}
    broken = [name for name, tensor in tensors.items() if not finite(tensor)]
    assert log.not_finite() == broken
    log.add("3", torch.tensor([1.0, torch.nan]))
    log.flush()
    log.add("3", torch.tensor([torch.inf, 1.0]))
    assert "3" in log.not_finite()
    log.add("3", torch.ones(2))
    assert log.numbers()["3"] == digest(torch.ones(2)) and "3" not in log.not_finite()
    assert DigestLog().numbers() == {} and DigestLog(finite=True).not_finite() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_is_the_same_on_a_gpu(dtype: torch.dtype):
    for shape in ((), (5, 7), (3, WORDS + 5), (2, 300, 1001)):
        tensor = random(shape, dtype)
        assert digest(tensor.cuda()) == digest(tensor)


@pytest.mark.parametrize("rows", [3, 100_000])
def test_digest_leaves_tensors_that_can_be_offloaded(rows):
    tensor = torch.ones(rows, 4)
    before = digest(tensor)
    offloaded = OffloadedStorage()
    offloaded.offload([tensor])
    offloaded.onload()
    assert digest(tensor) == before
