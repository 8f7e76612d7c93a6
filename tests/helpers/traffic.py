"""Counts what a rank really does: collectives, process groups, sockets, keys that it reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

# the methods through which torch.distributed calls a group -> the argument with the rank's input
COLLECTIVES = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send"), 0),
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_single"), 1),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), 1),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), 1),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), 1),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), 1),
}  # an older torch has some of them, a newer one the others

NOT_CALLERS = (__file__, "/torch/", "/contextlib.py", "/typing_extensions.py")


class Call(NamedTuple):
    """One collective of one rank."""

    phase: str | None
    name: str
    group: str
    """Its kind, such as dp_cp."""
    ranks: int
    bytes: int
    """Size of its input on this rank."""
    dtypes: frozenset[torch.dtype]
    """Types of its tensors."""
    caller: str
    """The function outside torch that asked for it."""

    @property
    def received(self) -> float:
        """Bytes that reach this rank from others: in a ring, and in the mean over the ranks that
        may be a broadcast's source."""
        n = self.ranks
        if self.name.startswith("allreduce"):
            return 2 * self.bytes * (n - 1) / n
        if "gather" in self.name:
            return self.bytes * (n - 1)
        return self.bytes * (n - 1) / n


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


class Traffic:
    """The counts so far.

    Attributes:
        phase: noted with every call; set it at will.
        calls: collectives, in their order.
        new_groups: ranks of every group that `new_group` made.
        reads: keys of every `multi_get` at the store.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self.calls: list[Call] = []
        self.new_groups: list[int] = []
        self.reads: list[int] = []

    def received(self, phase: str | None, name: str, group: str = "") -> float:
        """Bytes that reached this rank in a phase, by collectives and groups so named."""
        calls = (c for c in self.calls if c.phase == phase and name in c.name and group in c.group)
        return sum(call.received for call in calls)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count inside the block."""
    traffic = Traffic()
    with ExitStack() as stack:
        for name, place in COLLECTIVES.items():
            if hasattr(dist.ProcessGroup, name):
                wrapped = _collective(traffic, name, place, getattr(dist.ProcessGroup, name))
                stack.enter_context(patch.object(dist.ProcessGroup, name, wrapped))
        new_group = dist.new_group
        multi_get = dist.PrefixStore.multi_get  # pyright: ignore

        def made(ranks: list[int], **named: Any) -> Any:
            traffic.new_groups.append(len(ranks))
            return new_group(ranks, **named)

        def read(store: Any, keys: list[str]) -> Any:
            traffic.reads.append(len(keys))
            return multi_get(store, keys)

        stack.enter_context(patch.object(dist, "new_group", made))
        stack.enter_context(patch.object(dist.PrefixStore, "multi_get", read))  # pyright: ignore
        yield traffic


def _collective(traffic: Traffic, name: str, place: int, call: Callable[..., Any]) -> Any:
    def wrapped(group: Any, *arguments: Any, **named: Any) -> Any:
        tensors = list(tensors_in(arguments[place : place + 1]))
        size = sum(tensor.nbytes for tensor in tensors)
        dtypes = frozenset(tensor.dtype for tensor in tensors)
        where = group.group_desc, group.size()
        traffic.calls.append(Call(traffic.phase, name, *where, size, dtypes, _caller()))
        return call(group, *arguments, **named)

    return wrapped


def _caller() -> str:
    """The name of the innermost function that is neither torch's nor this file's."""
    frame: Any = sys._getframe(1)
    while any(name in frame.f_code.co_filename for name in NOT_CALLERS):
        frame = frame.f_back
    return frame.f_code.co_qualname


def sockets() -> int:
    """Open sockets of this process."""
    folder = "/proc/self/fd"
    links = [os.path.join(folder, name) for name in os.listdir(folder)]
    return sum(os.path.islink(each) and os.readlink(each).startswith("socket") for each in links)
