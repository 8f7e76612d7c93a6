"""Writes down what this process asks `torch.distributed` for."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.helpers.nccl_rules.checks import path_of
from tests.helpers.nccl_rules.program import Call, Communicator, Message, Wait, line_of
from tests.helpers.nccl_rules.tensors import faults_of, size_of, splits_of

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_gather_into_tensor",
    "all_gather_single",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "all_to_all_single",
    "all_to_all",
)
# over gloo on a GPU, too
HOST_COLLECTIVES = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)
MESSAGES = {"isend": "send", "irecv": "recv", "send": "send", "recv": "recv"}

# files whose tensors are on the host on a GPU, too
HOST_CALLERS = (
    "pyrl_ext/parallel/collective_errors.py",
    "pyrl_ext/parallel/heartbeat.py",
    "pyrl_ext/parallel/topology.py",
    "pyrl_ext/pack/delivery.py",
    "pyrl_ext/replay/routed_experts.py",
    "pyrl_ext/rollout/distribute.py",
    "tests/",
)
# files whose tensors are on the host in the group of all ranks, which has no communicator
WORLD_CALLERS = (
    "pyrl_ext/parallel/reduce.py",
    "pyrl_ext/megatron/optimizer.py",
    "pyrl_ext/replay/router_hook.py",
    "pyrl_ext/train/",
    "pyrl_ext/weights/move.py",
)
_ROOT = f"{Path(__file__).parents[3]}/"
_TORCH = (f"{Path(inspect.getfile(dist)).parent}/", f"{Path(__file__).parent}/")
_OURS = tuple(_ROOT + room for room in ("pyrl_ext/", "tests/"))

OnDevice = Callable[[Tensor, str, Any], bool]


def is_on_device(tensor: Tensor, site: str, group: Any) -> bool:
    """True if a tensor that ``site`` communicates in ``group`` is on the device on a GPU.

    Args:
        site: file and line.
    """
    in_world = group is dist.group.WORLD and site.startswith(WORLD_CALLERS)
    return not (in_world or site.startswith(HOST_CALLERS))


class Awaited:
    """A handle that writes down where it is waited for."""

    def __init__(self, work: Any, wait: Callable[[], None]):
        self._work = work
        self._wait = wait

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Recorder:
    """Writes calls and waits to the file that `begin` opened last."""

    def __init__(self) -> None:
        self._part: list[Call] | None = None  # of what is coalesced
        self._inside = False  # a function of torch, which may call others that are wrapped

    def begin(self, path: Path, on_device: OnDevice) -> None:
        """Start a new file; see `is_on_device`."""
        self._file = path.open("w", buffering=1)  # every line at once: the process may be killed
        self._on_device = on_device
        self._thread = get_ident()
        self._number = 0
        self.where = ""
        self.used = Counter[str]()

    # what the wrapped functions call --------------------------------------------------------------

    def call(
        self,
        op: str,
        group: Any,
        tensors: Sequence[Tensor],
        reduce_op: Any = None,
        **details: Any,
    ) -> Call | None:
        """Write a call down; None for what the rules leave alone: calls inside torch's own, groups
        without this rank, messages of the host (told from each other by tags), other threads.

        Args:
            tensors: none of collectives of the host.
            details: further fields of `Call`.
        """
        group = dist.group.WORLD if group is None else group
        if self._inside or not isinstance(group, dist.ProcessGroup):
            return None
        site = site_of(sys._getframe(1))
        messages = details.get("messages", [])
        there = {self._on_device(tensor, site, group) for tensor in tensors}
        on_device = True in there
        if not on_device and (messages or get_ident() != self._thread):
            return None
        ranks = dist.get_process_group_ranks(group)
        faults = faults_of(op, tensors, reduce_op, ranks.index(dist.get_rank())) * on_device
        if len(there) > 1:
            faults.append("tensors of host and device in one call")
        if get_ident() != self._thread:
            faults.append("from a second thread: its order among other calls is left to chance")
        title = group.group_desc or group.group_name
        if messages and op != "batch":  # also of a group of two: batches have another one there
            ranks = sorted({dist.get_rank(), messages[0].peer})
            title += ", a pair"
        call = Call(
            number=-1,
            op=op,
            communicator=Communicator(group.group_name, title, tuple(ranks), on_device),
            site=site,
            where=self.where,
            faults=faults,
            **details,
        )
        if self._part is None:
            self._write(call)
            return call
        self._part.append(call)
        return None

    def _write(self, call: Call) -> None:
        call.number = self._number
        self._number += 1
        if call.communicator.on_device:
            self.used[call.communicator.name] += 1
        self._file.write(line_of(call))

    def wait(self, number: int) -> None:
        self._file.write(line_of(Wait(number, site_of(sys._getframe(1)))))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's function, and write nothing down that it calls in turn."""
        before = self._inside
        self._inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._inside = before

    def awaited(self, work: Any, call: Call | None) -> Any:
        """A handle, whose wait is written down."""
        if work is None or call is None:
            return work
        number = call.number
        return Awaited(work, lambda: self.wait(number))

    @contextmanager
    def coalesced(self) -> Iterator[Callable[[], Call | None]]:
        """All calls in the block are one call, which the function yielded writes down."""
        self._part = []

        def written() -> Call | None:
            parts = self._part or []
            self._part = None
            if not parts:
                return None
            first = parts[0]
            first.same = [[part.op, *part.same] for part in parts]
            first.faults = [fault for part in parts for fault in part.faults]
            first.op = "coalesced"
            self._write(first)
            return first

        try:
            yield written
        finally:
            self._part = None


_RECORDER: Recorder | None = None


def install(folder: Path, on_device: OnDevice = is_on_device) -> None:
    """Write down all that this process communicates from now on, to a new file in ``folder``.

    Call it after ``init_process_group``. Names that modules have taken from `torch.distributed`
    before are replaced in modules of megatron, of the package and of the tests.
    """
    global _RECORDER
    if _RECORDER is None:
        _RECORDER = Recorder()
        _wrap(_RECORDER)
    _RECORDER.begin(path_of(folder, dist.get_rank()), on_device)


def _wrap(recorder: Recorder) -> None:
    replaced = dict[int, Any]()
    for name in COLLECTIVES:
        _replace(name, _collective(recorder, name, getattr(dist, name)), replaced)
    for name in HOST_COLLECTIVES:
        _replace(name, _host_collective(recorder, name, getattr(dist, name)), replaced)
    for name in MESSAGES:
        _replace(name, _message(recorder, name, getattr(dist, name)), replaced)
    _replace("batch_isend_irecv", _batch(recorder, dist.batch_isend_irecv), replaced)
    manager: Any = getattr(dist, "_coalescing_manager")  # noqa: B009  # private
    _replace("_coalescing_manager", _coalescing(recorder, manager), replaced)
    for name in ("isend", "irecv"):  # torch compares the operations of a batch with these
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("megatron", "pyrl_ext", "tests"):
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, name, replaced[id(value)])


def mark(where: str) -> None:
    """Name what is done from here on, for reports; nothing if the rules are off."""
    if _RECORDER is not None:
        _RECORDER.where = where


def communicators() -> Counter[str]:
    """Those that NCCL would have made in this process so far: name and ranks -> number of
    launches. Groups of one rank count, too.

    Raises: RuntimeError if the rules are off.
    """
    if _RECORDER is None:
        raise RuntimeError("communicators: the rules are off. Use run_ranks(rules=True)")
    return Counter(_RECORDER.used)


def _replace(name: str, wrapper: Any, replaced: dict[int, Any]) -> None:
    replaced[id(getattr(dist, name))] = wrapper
    setattr(dist, name, wrapper)


# the wrappers -------------------------------------------------------------------------------------


def _collective(recorder: Recorder, name: str, function: Any) -> Any:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _given(signature, args, kwargs)
        group = given["group"]
        reduce_op = given.get("op")
        written = recorder.call(
            name,
            group,
            _tensors(given.values()),
            reduce_op,
            same=[*size_of(name, given), *_agreed(given)],
            splits=splits_of(name, given),
        )
        if written is not None and not given["async_op"]:
            recorder.wait(written.number)
        return recorder.awaited(recorder.run(function, *args, **kwargs), written)

    return call


def _host_collective(recorder: Recorder, name: str, function: Any) -> Any:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        written = recorder.call(name, _given(signature, args, kwargs)["group"], ())
        if written is not None:
            recorder.wait(written.number)
        return recorder.run(function, *args, **kwargs)

    return call


def _message(recorder: Recorder, name: str, function: Any) -> Any:
    signature = inspect.signature(function)
    kind = MESSAGES[name]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _given(signature, args, kwargs)
        tensor = given["tensor"]
        peer = _rank_of(given, "dst" if kind == "send" else "src")
        messages = [_message_of(kind, peer, tensor)]
        written = recorder.call(name, given["group"], [tensor], messages=messages)
        if written is not None and name == kind:  # not isend and irecv
            recorder.wait(written.number)
        result = recorder.run(function, *args, **kwargs)
        return result if name == kind else recorder.awaited(result, written)

    return call


def _batch(recorder: Recorder, function: Any) -> Any:
    @wraps(function)
    def call(p2p_op_list: list[Any]) -> Any:
        messages: list[Message] = []
        for op in p2p_op_list:
            kind = "send" if op.op is dist.isend else "recv"
            messages.append(_message_of(kind, op.peer, op.tensor))
        tensors = [op.tensor for op in p2p_op_list]
        written = recorder.call("batch", p2p_op_list[0].group, tensors, messages=messages)
        works = recorder.run(function, p2p_op_list)
        return [recorder.awaited(work, written) for work in works]

    return call


def _coalescing(recorder: Recorder, manager: Any) -> Any:
    @contextmanager
    def coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with recorder.coalesced() as written, manager(group, device, async_ops) as works:
            yield works
            call = written()
            if call is not None and not async_ops:
                recorder.wait(call.number)
        works.works = [recorder.awaited(work, call) for work in works.works]

    return coalescing


def _given(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _message_of(kind: str, peer: int, tensor: Tensor) -> Message:
    return Message(kind, peer, str(tensor.dtype).removeprefix("torch."), tensor.numel())


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        each = value if isinstance(value, (list, tuple)) else [value]
        found += [tensor for tensor in each if isinstance(tensor, Tensor)]
    return found


def _agreed(given: dict[str, Any]) -> list[str]:
    """Reduce operation and root, if the call has them."""
    found = [str(given["op"]).rpartition(".")[2]] if "op" in given else []
    found += [f"root {_rank_of(given, end)}" for end in ("src", "dst") if end in given]
    return found


def _rank_of(given: dict[str, Any], end: str) -> Any:
    """The global rank of ``src`` or ``dst``, which may be given within the group."""
    if given[end] is not None or given[f"group_{end}"] is None:
        return given[end]
    group: Any = given["group"] or dist.group.WORLD
    return dist.get_global_rank(group, given[f"group_{end}"])


# where a call comes from --------------------------------------------------------------------------


def site_of(frame: FrameType | None) -> str:
    """The first line that is not torch's; if it is megatron's, also the first one of ours."""
    found: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_torchs(name):
            ours = name.startswith(_OURS)
            if ours or not found:
                found.append(f"{_short(name)}:{frame.f_lineno}")
            if ours:
                break
        frame = frame.f_back
    return ", from ".join(found)


@cache
def _is_torchs(name: str) -> bool:
    return name.startswith(_TORCH) or name.endswith("/contextlib.py")


@cache
def _short(name: str) -> str:
    return name.removeprefix(_ROOT).rpartition("site-packages/")[2]
