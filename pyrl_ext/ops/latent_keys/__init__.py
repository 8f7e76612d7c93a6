"""latent_keys: keys and values of all heads from what heads have and what they share.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch). The gradient of both inputs
is one pass too, ``latent_keys_grad``.
"""

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import ANY, FLOATS, Arguments, Like
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.tensors import accum_dtype

_ARGUMENTS = Arguments(
    "latent_keys", both=("T, heads, plain + V", FLOATS), shared=("T, R", Like("both"))
)
_GRAD_ARGUMENTS = Arguments(
    "latent_keys_grad", key=("T, heads, plain + R", ANY), value=("T, heads, V", Like("key"))
)


def new_outputs(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Empty keys and values."""
    key = both.new_empty(*both.shape[:2], plain + shared.shape[1])
    return key, both.new_empty(*both.shape[:2], both.shape[2] - plain)


def new_grads(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Empty gradients of ``both`` and ``shared``."""
    both = key.new_empty(*key.shape[:2], plain + value.shape[2])
    return both, key.new_empty(key.shape[0], key.shape[2] - plain)


def reference(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    common = shared[:, None].expand(-1, both.shape[1], -1)
    return torch.cat([both[..., :plain], common], -1), both[..., plain:].clone(
        memory_format=torch.contiguous_format
    )


def reference_grad(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    shared = key[..., plain:].sum(1, dtype=accum_dtype(key.dtype)).to(key.dtype)
    return torch.cat([key[..., :plain], value], -1), shared


op = Op("latent_keys(Tensor both, Tensor shared, int plain) -> (Tensor, Tensor)", fake=new_outputs)
op.serve(__name__, "native", "triton")
op.backend("reference", reference)
grad_op = Op(
    "latent_keys_grad(Tensor key, Tensor value, int plain) -> (Tensor, Tensor)", fake=new_grads
)
grad_op.serve(__name__, "native", "triton")
grad_op.backend("reference", reference_grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.plain = inputs[2]


def _backward(ctx: Any, key_grad: Tensor, value_grad: Tensor) -> tuple[Tensor | None, ...]:
    return *latent_keys_grad(key_grad, value_grad, ctx.plain), None


def _backward_again(ctx: Any, both: Tensor, shared: Tensor) -> tuple[Tensor | None, ...]:
    return *op(both, shared, ctx.plain), None  # the gradient is linear


op.gradient(_backward, _save)
grad_op.gradient(_backward_again, _save)


def latent_keys(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """``key[t, h] = (both[t, h, :plain], shared[t])``, ``value[t, h] = both[t, h, plain:]``.

    The gradient of ``shared`` is added in fp32 (fp64 in fp64) and rounded once.

    Args:
        both:   [T, heads, plain + V] float32, bfloat16, float16 or float64. Rows and heads may lie
            any stride apart.
        shared: [T, R], dtype and device of ``both``.
        plain:  elements of a key that belong to its head.

    Returns:
        keys [T, heads, plain + R] and values [T, heads, V], contiguous.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _ARGUMENTS.check(both, shared)
    if not 0 <= plain <= both.shape[2]:
        raise ValueError(f"latent_keys: plain is {plain}, expected 0 to {both.shape[2]}")
    return op(both, shared, plain)


def latent_keys_grad(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """The gradients of ``both`` and ``shared`` from those of keys and values.

    Raises: ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _GRAD_ARGUMENTS.check(key, value)
    if plain > key.shape[2]:
        raise ValueError(f"latent_keys_grad: plain is {plain}, expected up to {key.shape[2]}")
    return grad_op(key, value, plain)
