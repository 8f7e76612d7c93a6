"""Tensors of the double, and what happens when an operator takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.helpers.gpu_double import memory
from tests.helpers.gpu_double.kernels import KERNELS
from tests.helpers.gpu_double.seen import SEEN, place
from tests.helpers.gpu_double.streams import Stream, current_stream

aten = torch.ops.aten
READS = {  # the host has to know the result, or its shape
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
INDEXES = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}

ON_HOST = {"pyrl_ext::gather_routes": "layers"}
"""Arguments of operators that are on the host by contract."""


class OnDevice(Tensor):
    """A tensor on the device; ``host`` holds its values, once its stream has computed them."""

    host: Tensor
    block: memory.Block

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=memory.device(),
        )
        made.host = host
        made.block = memory.Block.of(host)
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, dict(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"OnDevice({list(self.shape)}, {self.dtype})"

    def untyped_storage(self) -> Any:
        return self.block

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def set_(self, source: Any) -> OnDevice:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The bytes of a storage."""
        return OnDevice(torch.empty(0, dtype=self.dtype).set_(source.host))

    def record_stream(self, stream: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.block.record(stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def type(self, *args: Any, **kwargs: Any) -> Any:
        """With no arguments the name of its type, as a tensor of CUDA has it."""
        if args or kwargs:
            return super().type(*args, **kwargs)
        return Tensor.type(self.host).replace("torch.", "torch.cuda.").replace("cuda.cuda", "cuda")

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, other: OnDevice) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.host = other.host
        self.block = other.block


class Device(TorchDispatchMode):
    """In a block: operators that make tensors on the device, and pinned memory, work."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, dict(kwargs or {}), self)


def run(op: Any, args: Any, kwargs: dict[str, Any], mode: Device | None = None) -> Any:
    """``op`` on the device if a tensor is there or one is to be made there, else on the host."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, OnDevice)]
    to = kwargs.get("device")
    target = torch.device(to).type if to is not None else None
    if not here and target != memory.NAME:
        return _on_host(op, args, kwargs, mode)
    if op is aten.is_pinned.default:
        return False
    if op is aten._to_copy.default:
        return _to_copy(args[0], kwargs)
    if op is aten.copy_.default:
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return _copy(args[0], args[1], blocking)
    _check_sides(op, args, tensors)
    if op.namespace == "c10d":
        return _communicate(op, args, kwargs)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    return _launch(op, args, kwargs)


def _on_host(op: Any, args: Any, kwargs: dict[str, Any], mode: Device | None) -> Any:
    pinned = kwargs.get("pin_memory") and kwargs.pop("pin_memory")
    if op is aten._pin_memory.default:
        return memory.pin(args[0].clone())
    if op is aten.is_pinned.default:
        return memory.is_pinned(args[0])
    if op.namespace == "pyrl_ext" and mode is not None:  # its backends allocate, too
        with mode:
            return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    out = op(*args, **kwargs)
    return memory.pin(out) if pinned else out


def _check_sides(op: Any, args: Any, tensors: list[Tensor]) -> None:
    """Raise where CUDA does: an operator takes tensors of both sides. A number of the host is taken
    as an argument, and indexes of the host are copied while it waits."""
    strange = [x for x in tensors if not isinstance(x, OnDevice) and x.dim()]
    if argument := ON_HOST.get(op._schema.name):
        allowed = args[[each.name for each in op._schema.arguments].index(argument)]
        strange = [x for x in strange if x is not allowed]
    if op in INDEXES:
        indexes = [x for x in args[1] if isinstance(x, Tensor)]
        if any(x.dtype in (torch.bool, torch.uint8) for x in indexes) or any(
            not isinstance(x, OnDevice) for x in indexes
        ):
            SEEN.wait(op)
        strange = [x for x in strange if not any(x is index for index in indexes)]
    if strange:
        found = [f"{list(x.shape)} on {x.device}" for x in tensors]
        raise RuntimeError(f"{op}: tensors {', '.join(found)}, expected all of them on one device")
    if op in READS:
        SEEN.wait(op)


# copies -------------------------------------------------------------------------------------------


def _to_copy(source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    to = torch.device(kwargs.get("device") or source.device)
    blocking = not kwargs.get("non_blocking")
    pinned = kwargs.get("pin_memory")
    dtype = kwargs.get("dtype") or source.dtype
    order = kwargs.get("memory_format") or torch.preserve_format
    like = torch.empty_like(_meta(source), dtype=dtype, memory_format=order)
    out = memory.poisoned(like)
    if to.type != memory.NAME:  # torch pins the result of a copy that does not wait
        return _copy(memory.pin(out) if pinned or not blocking else out, source, blocking)
    return _copy(OnDevice(out), source, blocking)


def _copy(out: Any, source: Any, blocking: bool) -> Any:
    """Copy ``source`` to ``out``, one of which is on the device."""
    stream = current_stream()
    op = aten.copy_.default
    if isinstance(out, OnDevice) and isinstance(source, OnDevice):
        return _launch(op, (out, source), {})
    if isinstance(out, OnDevice):
        if source.dim() == 0 and source.numel() == 1 and out.dim() == 0:
            return _launch(op, (out, source.clone()), {})  # a number: an argument of the kernel
        _upload(out.host, source, blocking, stream)
        return out
    if not blocking and not memory.is_pinned(out):
        SEEN.report(f"copy without waiting to {list(out.shape)} on the host, which is not pinned")
    _submit(op, (out, source.host), stream, out)
    if blocking:
        SEEN.wait(op)
        stream.drain()
    return out


def _upload(out: Tensor, source: Tensor, blocking: bool, stream: Stream) -> None:
    pinned = memory.is_pinned(source)
    if not blocking and not pinned:
        SEEN.report(f"copy without waiting of {list(source.shape)} from memory that is not pinned")
    if blocking:
        SEEN.wait(aten.copy_.default)
    # CUDA copies unpinned memory to a buffer before it returns
    read = memory.Source(source).read if pinned else source.clone().detach

    def work() -> None:
        out.copy_(read())

    stream.submit(work)
    if blocking:
        stream.drain()


# kernels ------------------------------------------------------------------------------------------


def _launch(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Submit ``op`` to the current stream; its results are known once the stream has run it."""
    stream = current_stream()
    host_args, host_kwargs = _hosts((args, kwargs))
    if _is_view(op):  # no data is read
        return _wrapped(op(*host_args, **host_kwargs))
    waits = op in READS or (op in INDEXES and _has_mask(args[1]))
    if stream.runs_at_once or waits:
        stream.drain()
        result = _kernel(op)(*host_args, **host_kwargs)
        return _outputs(op, args, kwargs, result)
    if op._schema.is_mutable:
        written = _outputs(op, args, kwargs, None)
        _submit(op, host_args, stream, None, host_kwargs)
        return written
    shapes = _shapes(op, args, kwargs)
    if shapes is None:
        SEEN.unqueued[str(op)] += 1
        stream.drain()
        return _wrapped(_kernel(op)(*host_args, **host_kwargs))
    out = pytree.tree_map_only(Tensor, memory.poisoned, shapes)
    _submit(op, host_args, stream, out, host_kwargs)
    return _wrapped(out)


def _submit(
    op: Any, args: Any, stream: Stream, out: Any, kwargs: dict[str, Any] | None = None
) -> None:
    """Add ``op`` to the queue of ``stream``; its results are copied to ``out``."""
    at = place()
    frozen = pytree.tree_map_only(Tensor, _frozen, (args, kwargs or {}))

    def work() -> None:
        try:
            _check_memory(op, frozen)
            result = _kernel(op)(*frozen[0], **frozen[1])
            if out is not None and not op._schema.is_mutable:
                for there, value in zip(*map(pytree.tree_leaves, (out, result)), strict=True):
                    if isinstance(there, Tensor):
                        there.copy_(value)
        except Exception as error:
            error.add_note(f"submitted at {at}")
            raise

    stream.submit(work)


def _frozen(host: Tensor) -> Tensor:
    """An alias whose shape and place nobody changes."""
    return host.detach()


def _check_memory(op: Any, arguments: Any) -> None:
    for x in pytree.tree_leaves(arguments):
        if isinstance(x, Tensor) and x.numel():
            last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            end = (x.storage_offset() + last + 1) * x.itemsize
            if end > x.untyped_storage().nbytes():
                raise RuntimeError(f"{op}: reads memory that was freed")


def _kernel(op: Any) -> Callable[..., Any]:
    kernel: Any = KERNELS.get(op, op)
    return kernel


def _is_view(op: Any) -> bool:
    aliases = [each.alias_info for each in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _has_mask(indexes: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indexes)


def _shapes(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results as tensors without data; None: torch has no rule for them."""
    metas = pytree.tree_map_only(Tensor, _meta, (args, dict(kwargs)))
    if "device" in kwargs:
        metas[1]["device"] = torch.device("meta")
    try:
        with _disable_current_modes():
            return op(*metas[0], **metas[1])
    except NotImplementedError:
        return None


def _meta(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, OnDevice):
        return tensor if not tensor.dim() else torch.empty_like(tensor, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _hosts(arguments: Any) -> Any:
    return pytree.tree_map_only(OnDevice, lambda x: x.host, arguments)


def _wrapped(result: Any) -> Any:
    return pytree.tree_map_only(Tensor, OnDevice, result)


def _outputs(op: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """The results of ``op``: arguments that it wrote to as they are, other tensors wrapped."""
    if not op._schema.is_mutable:
        return _wrapped(result)
    names = [_alias(each) for each in op._schema.returns]
    if not names:
        return None
    given = dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
    by_alias = {_alias(each): given.get(each.name) for each in op._schema.arguments}
    results = [result] if len(names) == 1 else list(result or [None] * len(names))
    found = [
        _wrapped(value) if name is None else by_alias[name]
        for name, value in zip(names, results, strict=True)
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _alias(each: Any) -> str | None:
    """The letter that the schema gives to the memory of an argument or result."""
    return None if each.alias_info is None else next(iter(each.alias_info.before_set), None)


def _communicate(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A collective, run when it is submitted: its tensors are then complete on this stream."""
    current_stream().drain()
    host_args, host_kwargs = _hosts((args, kwargs))
    result = op(*host_args, **host_kwargs)
    if not isinstance(result, tuple):
        return result
    originals = {id(x.host): x for x in pytree.tree_leaves(args) if isinstance(x, OnDevice)}
    return pytree.tree_map_only(Tensor, lambda x: originals.get(id(x), x), result)


# values -------------------------------------------------------------------------------------------


def put(host: Tensor) -> OnDevice:
    """A copy of ``host`` on the device, without a copy that is seen."""
    with _disable_current_modes():
        return OnDevice(host.detach().clone())


def value(tensor: Any) -> Any:
    """The values of ``tensor`` as the current stream sees them, without a wait that is seen."""
    if not isinstance(tensor, OnDevice):
        return tensor
    current_stream().drain()
    with _disable_current_modes():
        return tensor.host.detach().clone()
