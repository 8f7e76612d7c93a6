"""Keys and values of latent attention: kernels against loops over heads."""

from functools import partial

import pytest
import torch

from pyrl_ext.ops import latent_keys, use_backend
from pyrl_ext.ops._arguments import FLOATS
from pyrl_ext.ops.latent_keys import grad_op, native, reference, reference_grad
from tests.helpers import emulated

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
# rows, heads, own elements of a key, shared ones, elements of a value
SHAPES = [(0, 2, 3, 4, 5), (1, 1, 1, 1, 1), (5, 3, 7, 2, 9), (4, 2, 0, 4, 4), (6, 20, 192, 64, 256)]


def case(shape, dtype):
    T, heads, plain, common, rest = shape
    g = torch.Generator().manual_seed(0)
    both = torch.randn(T, heads, 2 + plain + rest, generator=g, dtype=torch.float64)[..., 2:]
    shared = torch.randn(T, 3 + common, generator=g, dtype=torch.float64)[:, 3:]
    return both.to(dtype), shared.to(dtype), plain


def check(forward, backward, shape, dtype):
    both, shared, plain = case(shape, dtype)
    key, value = forward(both, shared, plain)
    for h in range(both.shape[1]):
        assert torch.equal(key[:, h, :plain], both[:, h, :plain])
        assert torch.equal(key[:, h, plain:], shared)
        assert torch.equal(value[:, h], both[:, h, plain:])
    both_grad, shared_grad = backward(key, value, plain)
    assert torch.equal(both_grad, both)
    total = torch.zeros(shared.shape, dtype=torch.float64)
    for h in range(both.shape[1]):
        total += key[:, h, plain:].double()
    step = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * both.shape[1]
    torch.testing.assert_close(shared_grad.double(), total, rtol=step, atol=0)
    for tensor in (key, value, both_grad, shared_grad):
        assert tensor.dtype == dtype and tensor.is_contiguous()


RUNS = {
    "reference": (reference, reference_grad),
    "native": (native.latent_keys, native.latent_keys_grad),
    "emulated": (emulated.latent_keys, emulated.latent_keys_grad),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latent_keys_kernels_join_and_part_as_a_loop_does(name, shape):
    for dtype in FLOATS:
        run, grad = RUNS[name]
        check(run, grad, shape, dtype)


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latent_keys_on_a_gpu_join_and_part_as_a_loop_does(backend, shape):
    def on_gpu(run):
        def call(a, b, plain):
            with use_backend(backend):
                return [x.cpu() for x in run(a.cuda(), b.cuda(), plain)]

        return call

    for dtype in FLOATS:
        check(on_gpu(latent_keys), on_gpu(grad_op), shape, dtype)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_latent_keys_have_gradients_of_both_orders(shape, backend):
    both, shared, plain = case(shape, torch.float64)
    inputs = [x.clone().requires_grad_() for x in (both, shared)]
    with use_backend(backend):
        run = partial(latent_keys, plain=plain)
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)


def triton_equals_reference():
    for shape in SHAPES[1:]:
        for dtype in (torch.float32, torch.float64):
            with use_backend("triton"):
                check(latent_keys, grad_op, shape, dtype)
