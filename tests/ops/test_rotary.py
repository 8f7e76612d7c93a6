"""Rotation of queries and keys: kernels against float64."""

from functools import partial
from itertools import product

import pytest
import torch

from pyrl_ext.ops import rotary, use_backend
from pyrl_ext.ops._arguments import FLOATS
from pyrl_ext.ops._native import C
from pyrl_ext.ops.rotary import native, op, reference
from tests.helpers import emulated

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ISAS = [isa for isa in ("avx512", "avx2", "portable") if C.has_isa(isa)]
# rows, heads and width of queries and of keys, turned elements
SHAPES = [
    (0, 2, 4, 1, 4, 4),
    (1, 1, 2, 1, 2, 2),
    (5, 3, 20, 1, 16, 16),
    (7, 4, 32, 2, 32, 32),
    (9, 4, 32, 2, 32, 16),
    (3, 5, 7, 0, 7, 6),
    (33, 20, 256, 1, 64, 64),
]
HOWS = list(
    product((False, True), ("halves", "neighbours"), ("halves", "neighbours"), (False, True))
)


def case(shape, dtype, device="cpu"):
    T, queries, wide, keys, narrow, turned = shape
    g = torch.Generator().manual_seed(0)
    query = torch.randn(T, queries, wide + 4, generator=g, dtype=torch.float64)[..., 4:]
    key = torch.randn(T, keys, narrow, generator=g, dtype=torch.float64)
    turns = torch.randn(T, turned, generator=g, dtype=torch.float64)
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # other strides and alignments of what is read
    return query.to(dtype).to(device), key.to(dtype).to(device), turns.to(wide_dtype).to(device)


def turned_by_hand(heads, turns, last, source, result, back):
    """[T, H, D] float64, a loop over pairs."""
    out = heads.double().clone()
    half = turns.shape[1] // 2
    at = heads.shape[2] - 2 * half if last else 0
    cos, sin = (x[:, None] for x in turns.double().split(half, -1))
    places = {
        "halves": lambda j: (at + j, at + j + half),
        "neighbours": lambda j: (at + 2 * j, at + 2 * j + 1),
    }
    for j in range(half):
        a, b = (heads[..., i].double() for i in places[source](j))
        c = cos[..., j]
        s = (-sin if back else sin)[..., j]
        x, y = places[result](j)
        out[..., x], out[..., y] = a * c - b * s, b * c + a * s
    return out


def check(run, shape, dtype):
    query, key, turns = case(shape, dtype)
    for how in HOWS:
        found = run(query, key, turns, *how)
        for ours, theirs, x in zip(found, reference(query, key, turns, *how), (query, key)):
            exact = turned_by_hand(x, turns, *how)
            assert ours.shape == x.shape and ours.dtype == dtype and ours.is_contiguous()
            if ours.numel():
                error, allowed = ((y.double() - exact).abs().max() for y in (ours, theirs))
                assert error <= 2 * allowed + (1e-14 if dtype == torch.float64 else 1e-6), how


def with_isa(isa):
    return partial(native.rotary, isa=isa)


RUNS = [reference, emulated.rotary, *map(with_isa, ISAS)]


@pytest.mark.parametrize("run", RUNS, ids=["reference", "emulated", *ISAS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_kernels_turn_pairs_as_a_loop_does(run, shape):
    for dtype in FLOATS:
        check(run, shape, dtype)


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_on_a_gpu_turns_pairs_as_a_loop_does(backend, shape):
    def run(*args):
        on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
        with use_backend(backend):
            return [x.cpu() for x in op(*on_gpu)]

    for dtype in FLOATS:
        check(run, shape, dtype)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 8, 1, 4, 4), (3, 2, 6, 2, 6, 2), (2, 2, 7, 0, 7, 6)], ids=str
)
def test_rotary_has_gradients_of_both_orders(shape, backend):
    query, key, turns = case(shape, torch.float64)
    inputs = [x.clone().requires_grad_() for x in (query, key)]
    with use_backend(backend):
        for last, source, result, _ in HOWS[::2]:
            run = partial(rotary, turns=turns, last=last, source=source, result=result)
            assert torch.autograd.gradcheck(run, inputs)
            assert torch.autograd.gradgradcheck(run, inputs)


def test_rotary_of_true_angles_keeps_lengths():
    angles = torch.rand(11, 8) * 6
    turns = torch.cat([angles.cos(), angles.sin()], 1)
    query, key, _ = case((11, 3, 16, 2, 16, 16), torch.float32)
    for x, y in zip((query, key), rotary(query, key, turns), strict=True):
        torch.testing.assert_close(x.norm(dim=-1), y.norm(dim=-1))
        assert not torch.allclose(x, y)


def triton_equals_reference():
    for n, shape in enumerate(SHAPES[1:]):
        for how in HOWS[n :: len(SHAPES) - 1]:
            args = *case(shape, (torch.float32, torch.float64)[n % 2]), *how
            with use_backend("triton"):
                ours = op(*args)
            for a, b in zip(ours, reference(*args), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
