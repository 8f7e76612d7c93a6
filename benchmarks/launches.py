"""What a computation launches and moves, counted as torch dispatches it: on a CPU, too."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operators that only describe memory, beside those whose schema says that they return a view
NOTHING = {
    *("_unsafe_view", "_reshape_alias", "detach", "empty", "empty_like", "empty_strided"),
    *("new_empty", "new_empty_strided", "lift_fresh", "record_stream", "_local_scalar_dense"),
    "promote_types",
}
ATTENTION = "attention"  # in the name of every operator of torch that computes it


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

    On a GPU an operator may launch more than one kernel, as attention's gradient does, or
    ``F.rms_norm`` fewer than here, where a CPU has no fused norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name in NOTHING):
            tensors = {id(x): x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
            moved = sum(_bytes(x) for x in tensors.values())
            self.all.append(Launch(name, moved, _caller()))
        return out

    @property
    def count(self) -> int:
        """Launches, with all calls of attention forward as one, and backward: a CPU computes it
        shape by shape."""
        ways = {x.name for x in self.all if ATTENTION in x.name}
        return sum(ATTENTION not in x.name for x in self.all) + len(ways)

    @property
    def moved(self) -> int:
        return sum(each.moved for each in self.all)

    def by_place(self) -> Counter[tuple[str, str]]:
        return Counter((each.place, each.name) for each in self.all)


def _bytes(x: Tensor) -> int:
    """Of the elements in memory: an expanded dimension is there once."""
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
