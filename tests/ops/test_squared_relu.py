"""A squared ReLU times a weight a row, and its gradient, against float64."""

import pytest
import torch
import torch.nn.functional as F

from pyrl_ext.ops import squared_relu


def leaves(dtype, rows=9, width=31):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.rand(rows, generator=g, dtype=torch.float64).to(wide)
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(x.shape, generator=g).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_squared_relu_and_its_gradients_are_those_of_autograd_in_float64(dtype, bound):
    x, weight, grad = leaves(dtype)
    exact = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    out = squared_relu(x, weight)
    want = F.relu(exact[0]).square() * exact[1][:, None]
    found = out, *torch.autograd.grad(out, (x, weight), grad)
    exactly = want, *torch.autograd.grad(want, exact, grad.double())
    assert [t.dtype for t in found] == [dtype, dtype, weight.dtype]
    for ours, theirs in zip(found, exactly, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=bound, rtol=bound)


def test_squared_relu_passes_gradcheck_and_takes_no_rows():
    x, weight, _ = leaves(torch.float64, 3, 4)
    assert torch.autograd.gradcheck(squared_relu, (x, weight))
    assert squared_relu(*(t[:0] for t in (x, weight))).shape == (0, 4)
