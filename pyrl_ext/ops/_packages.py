"""Helpers of the backends that run on Triton or call other packages' kernels, without importing
them."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu


def refuse_package(module: str, name: str, tensor: Tensor) -> str | None:
    """Why the package ``module`` cannot take the argument ``name``, or None."""
    if find_spec(module) is None:
        return f"{module} is not installed, expected it; pip install '.[hybrid]'"
    if not on_gpu(tensor):
        return f"{name} is on {tensor.device}, expected cuda"
    if tensor.dtype != torch.bfloat16:
        return f"{name} is {tensor.dtype}, expected torch.bfloat16"
    return None


def gradients(run: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The gradients to ``leaves`` of ``run(*leaves)``, by the autograd of the package it calls.

    ``run`` calls one ``torch.autograd.Function`` and nothing else: operators of torch between it
    and the leaves are not recorded inside of a backward.
    """
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = run(*leaves)
    return list(torch.autograd.grad(out, leaves, grad))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``: sizes of Triton's tiles."""
    return 1 << (max(n, 1) - 1).bit_length()
