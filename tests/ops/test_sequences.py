"""Operators along packed sequences: exact, the same as each sequence alone, and nothing leaks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import causal_conv1d
from pyrl_ext.ops.causal_conv1d import reference as conv_reference
from pyrl_ext.ops.gated_delta_rule import reference as delta_reference
from pyrl_ext.ops.sequences import positions
from pyrl_ext.ops.ssd_scan import reference as ssd_reference
from tests.helpers.recurrences import ALONG, Along, boundaries, spans

# lengths of sequences around those of chunks; the last is of rows beyond cu_seqlens
LENGTHS = st.lists(
    st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 70, 97]), min_size=1, max_size=5
)
MIXED = [1, 64, 0, 3, 65, 1, 40]
SHORT = [1, 17, 0, 33, 1, 16, 3, 9]  # on average: their chunks have half as many rows
FEW = settings(max_examples=8, deadline=None, database=None, derandomize=True)


each_operator = pytest.mark.parametrize("along", ALONG.values(), ids=list(ALONG))


def out_shape(along: Along, args: list[torch.Tensor]) -> torch.Size:
    """As ``x``, or ``v``, of the operator."""
    return args[2 if along is ALONG["gated_delta_rule"] else 0].shape


def found_of(along, lengths, dtype):
    """Arguments, a gradient of the result, and what the operator makes of them."""
    args = along.arguments(sum(lengths), dtype)
    shape = out_shape(along, args)
    grad = torch.sin(torch.arange(shape.numel())).view(shape).to(dtype)
    return args, grad, along.found(args, boundaries(lengths), grad)


@each_operator
def test_sequences_operators_are_exact(along):
    steps = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}
    for (dtype, step), lengths in product(steps.items(), (MIXED, SHORT)):
        args, grad, found = found_of(along, lengths, dtype)
        for n, (ours, want) in enumerate(zip(found, along.exact(args, lengths, grad), strict=True)):
            error = (ours.double() - want).abs().max()
            assert error <= step * want.abs().max(), (dtype, n, error)
        assert [x.dtype for x in found[1:]] == [x.dtype for x in args]


@each_operator
@FEW
@given(LENGTHS)
def test_sequences_packed_are_what_each_is_alone(along, lengths):
    args, grad, found = found_of(along, lengths, torch.float32)
    rows = [n for n in range(len(args)) if n not in along.fixed]
    for a, b in spans(lengths):
        alone = along.found(along.part(args, a, b), boundaries([b - a]), grad[a:b])
        for n in (0, *(n + 1 for n in rows)):
            torch.testing.assert_close(found[n][a:b], alone[n], rtol=1e-4, atol=1e-4)


@each_operator
@FEW
@given(LENGTHS.filter(any), st.integers(0, 10**6))
def test_sequences_leak_nothing_into_others(along, lengths, which):
    """Neither numbers nor NaN."""
    args, grad, found = found_of(along, lengths, torch.float32)
    row = which % sum(lengths)
    a, b = next((a, b) for a, b in spans(lengths) if a <= row < b)
    rows = [n for n in range(len(args)) if n not in along.fixed]
    for number in (0.25, float("nan")):
        changed = [x.clone() for x in args]
        for n in rows:
            changed[n][row] = number
        other = along.found(changed, boundaries(lengths), grad)
        for n in (0, *(n + 1 for n in rows)):
            kept = torch.ones(sum(lengths), dtype=torch.bool)
            kept[a:b] = False
            assert torch.equal(other[n][kept], found[n][kept])
            assert n or not torch.equal(other[n][a:b], found[n][a:b])


@each_operator
def test_sequences_operators_pass_gradcheck(along):
    leaves = [x.requires_grad_() for x in along.arguments(5)]
    run = along.run
    ends = boundaries([2, 1, 2])
    assert torch.autograd.gradcheck(lambda *x: run(*x, ends), leaves, fast_mode=True)


@each_operator
def test_sequences_operators_take_the_gradient_of_a_sum(along):
    """It is one number, expanded: its strides are 0."""
    args = along.arguments(5, torch.float32)
    leaves = [x.requires_grad_() for x in args]
    out = along.run(*leaves, boundaries([2, 3]))
    found = torch.autograd.grad(out.sum(), leaves)
    for ours, exact in zip(found, along.exact(args, [2, 3], torch.ones_like(out))[1:], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@each_operator
def test_sequences_operators_take_no_rows(along):
    args = along.arguments(0, torch.float32)
    out, *grads = along.found(args, boundaries([0]), args[0].new_zeros(out_shape(along, args)))
    assert out.shape == out_shape(along, args)
    assert all(
        x.shape == grad.shape and not grad.any() for x, grad in zip(args, grads, strict=True)
    )


def test_sequences_causal_conv1d_takes_no_bias():
    x, weight, bias = ALONG["causal_conv1d, 4 wide"].arguments(9, torch.float32)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = causal_conv1d(leaves[0], leaves[1], None, boundaries([5, 4]))
    want = causal_conv1d(leaves[0], leaves[1], torch.zeros_like(bias), boundaries([5, 4]))
    assert torch.equal(found, want)
    of_found, of_want = (torch.autograd.grad(out.sum(), leaves) for out in (found, want))
    assert all(map(torch.equal, of_found, of_want))


def test_sequences_references_read_no_number_on_the_host():
    """Tensors on the meta device have none: nothing would wait for a GPU."""
    meta = {
        name: [x.to("meta") for x in along.arguments(150, torch.bfloat16)]
        for name, along in ALONG.items()
    }
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    x, weight, bias = meta["causal_conv1d, 4 wide"]
    of_x, *_ = conv_reference.causal_conv1d_grad(x, x, weight, bias, ends)
    assert of_x.shape == x.shape
    x, dt, A, B, C, D, _ = meta["ssd_scan"]
    args = x, dt.float(), A, B, C, D, ends
    assert ssd_reference.ssd_scan(*args).shape == ssd_reference.ssd_scan_grad(x, *args)[0].shape
    q, k, v, g, beta = meta["gated_delta_rule"]
    args = q, k, v, g, beta, ends
    out = delta_reference.gated_delta_rule(*args)
    assert delta_reference.gated_delta_rule_grad(out, *args)[2].shape == out.shape


def test_positions_begin_anew_with_each_sequence():
    assert positions(boundaries([2, 0, 3, 1]), 6).tolist() == [0, 1, 0, 1, 2, 0]
