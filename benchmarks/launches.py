"""Launches of a computation and the bytes they move, counted as torch dispatches operators."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

# operators that only describe memory, next to those whose schema says that they return a view
NOTHING = {
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "record_stream",
    "_local_scalar_dense",
    "promote_types",
    "_record_function_enter_new",
    "_record_function_exit",
}


# arguments that an operator keeps for its gradient and does not read
KEPT = {"gather_rows": (3, 4), "sum_rows": (1,)}


@dataclass(frozen=True)
class Launch:
    """One operator that computes.

    Args:
        name: of torch's or this package's operator.
        moved: bytes of the tensors that it reads and writes, each once.
        place: file and function that called it, or "autograd" for torch's own gradients.
    """

    name: str
    moved: int
    place: str


class Launches(TorchDispatchMode):
    """The operators dispatched inside, in order; a call of one counts as one launch.

    What `as_one` runs counts as one operator on a CPU, as it is one on a GPU. There an operator may
    launch more than one kernel, as the gradients of attention and of norms do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Launch] = []

    def add(self, name: str, tensors: Iterable[Any]) -> None:
        read = {id(x): x for x in tensors if isinstance(x, Tensor)}
        self.all.append(Launch(name, sum(map(_bytes, read.values())), _caller()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name in NOTHING):
            read = [arg for i, arg in enumerate(args) if i not in KEPT.get(name, ())]
            self.add(name, tree_leaves((read, kwargs, out)))
        return out

    @property
    def count(self) -> int:
        return len(self.all)

    @property
    def moved(self) -> int:
        return sum(each.moved for each in self.all)

    def by_place(self) -> Counter[tuple[str, str]]:
        return Counter((each.place, each.name) for each in self.all)


def _counters() -> list[Launches]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Launches)]


class _AsOne(torch.autograd.Function):
    """``run`` of tensors, forward and backward a launch each for the `Launches` around it."""

    @staticmethod
    def forward(ctx: Any, name: str, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        counters = _counters()
        with _disable_current_modes(), torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            ctx.out = run(*ctx.inputs)
            ctx.name = name
        for counter in counters:
            counter.add(name, [*tensors, ctx.out])
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        counters = _counters()
        wanted = [x for x in ctx.inputs if x.requires_grad]
        with _disable_current_modes():
            found = iter(torch.autograd.grad(ctx.out, wanted, grad))
            grads = [next(found) if x.requires_grad else None for x in ctx.inputs]
        for counter in counters:
            counter.add(f"{ctx.name}_backward", [*ctx.inputs, grad, *grads])
        return None, None, *grads


def as_one(name: str, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``run(*tensors)``, which `Launches` around it counts as one operator each way."""
    out: Tensor = _AsOne.apply(name, run, *tensors)  # type: ignore[assignment]
    return out


def _bytes(x: Tensor) -> int:
    """Bytes of the elements in memory: an expanded dimension is there once."""
    number = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        number *= size if stride else min(size, 1)
    return number * x.element_size()


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()[:-2]):
        parts = Path(frame.filename).parts
        if ("core" in parts and "megatron" in parts) or "pyrl_ext" in parts:
            return f"{parts[-1]} {frame.name}"
    return "autograd"
