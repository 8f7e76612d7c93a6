"""Memory of the double: device allocations that are poisoned when they are freed, pinned memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.helpers.gpu_double.seen import SEEN, place
from tests.helpers.gpu_double.streams import Stream, current_stream

NAME = "gpu"  # of the device's type
POISON = 0xFF  # a NaN in every floating-point type, -1 in integers


@cache
def device() -> torch.device:
    """The only device there is; torch knows it once the double is installed."""
    return torch.device(NAME, 0)


class Ledger:
    """Attributes:

    by_place: bytes that are allocated, by the line that did.
    most: name of a `phase` -> the most bytes that were allocated in it.
    """

    def __init__(self) -> None:
        self.by_place = Counter[str]()
        self.most = dict[str, int]()
        self._phases = list[str]()
        self._live = 0

    @property
    def live(self) -> int:
        """Bytes that are allocated."""
        return self._live

    def add(self, size: int, at: str) -> None:
        self._live += size
        self.by_place[at] += size
        for name in self._phases:
            self.most[name] = max(self.most[name], self._live)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is allocated in a block as that of phase ``name``."""
        self.most[name] = self._live
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.remove(name)


LEDGER = Ledger()


class Block:
    """An allocation on the device, in place of ``torch.UntypedStorage``.

    Its bytes are those of a storage on the host. When nothing uses it any longer it is free for the
    stream that allocated it, whose next work may overwrite it: so it is poisoned there. Streams
    that `record` named it are finished with it first.
    """

    def __init__(self, host: torch.UntypedStorage, stream: Stream):
        self.host = host
        self.stream = stream
        self.at = place()
        self.users: set[Stream] = set()
        host.block = weakref.ref(self)  # pyright: ignore[reportAttributeAccessIssue]
        LEDGER.add(host.nbytes(), self.at)
        weakref.finalize(self, _free, host, stream, self.users, self.at).atexit = False

    @classmethod
    def of(cls, host: Tensor) -> Block:
        """The allocation that ``host`` is in; a new one on the current stream if there is none."""
        storage = host.untyped_storage()
        known = getattr(storage, "block", lambda: None)()
        return cls(storage, current_stream()) if known is None else known

    @property
    def device(self) -> torch.device:
        return device()

    def nbytes(self) -> int:
        return self.host.nbytes()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def resize_(self, size: int) -> Block:
        """As torch's: the memory is freed in the order of its stream, or allocated."""
        self.stream.drain()
        if any(not user.query() for user in self.users):
            SEEN.report("memory is freed while a stream that recorded its use is not finished")
        LEDGER.add(size - self.host.nbytes(), self.at)
        self.host.resize_(size)
        poison(self.host)
        return self

    def record(self, stream: Stream) -> None:
        """``stream`` uses it, too."""
        self.users.add(stream)


def _free(host: torch.UntypedStorage, stream: Stream, users: set[Stream], at: str) -> None:
    LEDGER.add(-host.nbytes(), at)
    until = {user: user.submitted for user in users}

    def reuse() -> None:
        if all(user.done >= place for user, place in until.items()):
            poison(host)

    stream.submit(reuse)


def poison(memory: torch.UntypedStorage | Tensor) -> None:
    """Fill ``memory`` with what no result is made of."""
    storage = memory.untyped_storage() if isinstance(memory, Tensor) else memory
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)


def poisoned(like: Tensor) -> Tensor:
    """A host tensor with the strides of ``like``, which may be a tensor without data."""
    strides = like.stride() if like.numel() else None
    shape = like.shape
    dtype = like.dtype
    out = (
        torch.empty_strided(shape, strides, dtype=dtype)
        if strides
        else torch.empty(shape, dtype=dtype)
    )
    poison(out)
    return out


def pin(host: Tensor) -> Tensor:
    """``host``, marked as pinned memory."""
    storage: Any = host.untyped_storage()
    storage.pinned = True
    return host


def is_pinned(host: Tensor) -> bool:
    """True if ``host`` is pinned memory."""
    return getattr(host.untyped_storage(), "pinned", False)


class Source:
    """Host memory that a copy will read, which must not change before it has."""

    def __init__(self, host: Tensor):
        self.host = host
        self.was = host.clone()
        self.at = place()

    def read(self) -> Tensor:
        """Its values now. Reports if they changed."""
        now = self.host.contiguous().reshape(-1).view(torch.uint8)
        if not torch.equal(now, self.was.contiguous().reshape(-1).view(torch.uint8)):
            SEEN.reports.append(f"{self.at}: host memory was overwritten before its copy has run")
        return self.host
