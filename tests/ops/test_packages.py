"""Backends that call other packages' kernels: what they refuse, what they hand over, and gradients
by a package's own autograd. The kernels themselves need a GPU."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyrl_ext.ops import causal_conv1d, gated_delta_rule, ssd_scan, use_backend
from pyrl_ext.ops._op import Op
from pyrl_ext.ops._packages import gradients
from pyrl_ext.ops.gated_delta_rule import fla
from tests.helpers.recurrences import ALONG, boundaries

CALLS = {
    "causal_conv1d": (causal_conv1d, "causal_conv1d, 4 wide"),
    "fla": (gated_delta_rule, "gated_delta_rule"),
    "mamba_ssm": (ssd_scan, "ssd_scan"),
}


def refusal(package: str, dtype: torch.dtype = torch.bfloat16) -> str:
    run, case = CALLS[package]
    args = ALONG[case].arguments(5, dtype)
    if package == "causal_conv1d":
        args = [torch.zeros(5, 8), torch.zeros(8, 4), torch.zeros(8)]
    with use_backend(package), pytest.raises(NotImplementedError) as raised:
        run(*args, boundaries([5]))
    return str(raised.value)


@pytest.mark.parametrize("package", CALLS)
def test_refuse_package_says_what_is_missing(tmp_path: Path, monkeypatch, package: str):
    lacking = f"{package} is not installed, expected it; pip install '.[hybrid]'"
    assert lacking in refusal(package)
    (tmp_path / f"{package}.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "is on cpu, expected cuda" in refusal(package)


def test_refuse_names_sizes_that_the_packages_do_not_take():
    x = torch.zeros(5, 12)
    ends = boundaries([5])
    with use_backend("causal_conv1d"), pytest.raises(NotImplementedError, match="12 channels, exp"):
        causal_conv1d(x, torch.zeros(12, 4), None, ends)
    q = torch.zeros(5, 1, 264)
    gate = torch.zeros(5, 1)
    with use_backend("fla"), pytest.raises(NotImplementedError, match="heads of 264, expected at"):
        gated_delta_rule(q, q, q, gate, gate, ends)


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 1, 63, 64, 65, 200]), min_size=1, max_size=5))
def test_boundaries_of_fla_have_every_chunk_and_none_with_rows_beyond(lengths: list[int]):
    """Those that are too many begin behind the end of the last sequence."""
    ends, chunks = fla.boundaries(boundaries(lengths), sum(lengths))
    assert ends.dtype == chunks.dtype == torch.int32
    spans = list(pairwise(ends.tolist()))
    assert [b - a for a, b in spans] == lengths
    wanted = [(n, c) for n, length in enumerate(lengths) for c in range(-(-length // fla.CHUNK))]
    found = [(n, c) for n, c in chunks.tolist()]
    assert found[: len(wanted)] == wanted
    last = len(lengths) - 1
    assert all(n == last and c * fla.CHUNK >= lengths[n] for n, c in found[len(wanted) :])


class Package(torch.autograd.Function):
    """exp(a) b, as a package that has its own backward."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.exp() * b

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        return grad * a.exp() * b, grad * a.exp()


def test_gradients_are_those_of_a_packages_autograd_inside_of_an_operators_backward():
    op = Op("packaged(Tensor a, Tensor b) -> Tensor", fake=lambda a, b: torch.empty_like(a))
    op.backend("package", lambda a, b: Package.apply(a[None], b[None])[0])
    op.gradient(
        lambda ctx, grad: tuple(
            each[0]
            for each in gradients(Package.apply, [x[None] for x in ctx.saved_tensors], grad[None])
        )
    )
    a, b = (torch.randn(3, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(op, (a, b))
    for again in (True, False):  # a layer that is computed again
        out = checkpoint(op, a, b, use_reentrant=again)
        found = torch.autograd.grad(out.sum(), (a, b)) if not again else _accumulated(out, a, b)
        torch.testing.assert_close(found, ((a.exp() * b).detach(), a.exp().detach()))


def _accumulated(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    out.sum().backward()
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


def _wide(package: str, rows: int) -> list[Tensor]:
    """Arguments in bfloat16, as wide as the kernels are made for."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    if package == "causal_conv1d":
        given = [random(rows, 64), random(64, 4), random(64)]
    elif package == "fla":
        keys = (torch.nn.functional.normalize(random(rows, 2, 64), dim=-1) for _ in range(2))
        gates = -random(rows, 2).exp(), random(rows, 2).sigmoid()
        given = [*keys, random(rows, 2, 64), *gates]
    else:
        given = [random(rows, 4, 64), random(rows, 4) - 1, -random(4).exp()]
        given += [random(rows, 2, 64), random(rows, 2, 64), random(4), random(4)]
    wide = ALONG[CALLS[package][1]].wide
    return [x if n in wide else x.bfloat16() for n, x in enumerate(given)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("package", CALLS)
def test_packages_compute_what_the_definitions_say(package: str):
    """Results and gradients, to the rounding of bfloat16 in between."""
    pytest.importorskip(package)
    lengths = [70, 0, 1, 200, 17]
    along = ALONG[CALLS[package][1]]
    args = _wide(package, sum(lengths))
    grad = torch.sin(torch.arange(args[2 if package == "fla" else 0].numel()))
    grad = grad.view(args[2 if package == "fla" else 0].shape).bfloat16()
    with use_backend(package):
        on_gpu = [x.cuda() for x in args]
        found = along.found(on_gpu, boundaries(lengths).cuda(), grad.cuda())
    for ours, want in zip(found, along.exact(args, lengths, grad), strict=True):
        assert (ours.cpu().double() - want).abs().max() <= 2**-5 * want.abs().max()
