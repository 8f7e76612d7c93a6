"""Device memory that is freed for a while; its contents may wait in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu

# bytes of a piece of host memory
MOST = 1 << 30
LEAST = 1 << 20
GIB = 1 << 30
# bytes of a copy behind other work, whose own small copies wait for it: 0.3 ms at 51 GB/s (assumed)
BEHIND = 1 << 24


def pinned(size: int) -> Tensor:
    """``size`` bytes of pinned host memory, at 1.3 GB/s (measured with an H100)."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class HostMemory:
    """Pieces of pinned host memory that one part of the trainer is offloaded to.

    They are pinned once, by a thread that `start` starts, and kept for the rest of the run.

    Args:
        name:     of the part, for messages.
        allocate: returns so many bytes of pinned memory [uint8].
        say:      takes a line of text; None: no lines.
        patience: seconds that `pieces` waits for the thread before it says so.
    """

    def __init__(
        self,
        name: str,
        allocate: Callable[[int], Tensor] = pinned,
        say: Callable[[str], None] | None = None,
        patience: float = 5.0,
    ):
        self.name = name
        self.allocate = allocate
        self.patience = patience
        self.say = say or (lambda _: None)
        self._pieces: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        self._wanted = 0

    def start(self, size: int, device: torch.device) -> None:
        """Pin ``size`` bytes in the background, for offloading from ``device``."""
        self._wanted = size
        self._thread = threading.Thread(
            target=self._in_background, args=(size, device), name=f"pin {self.name}"
        )
        self._thread.start()

    def pieces(self, size: int) -> list[Tensor]:
        """Pieces of at least ``size`` bytes together, the same ones in every call.

        Waits for the thread. Pins what is missing.

        Raises: RuntimeError if memory could not be pinned.
        """
        self._finish()
        missing = size - sum(map(len, self._pieces))
        if missing > 0:
            self._wanted = size
            self._timed(missing, "")
        return self._pieces

    def _finish(self) -> None:
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.join(self.patience)
            if thread.is_alive():
                done = sum(map(len, self._pieces)) / GIB
                all_of_it = self._wanted / GIB
                self.say(
                    f"offload: waits until host memory for the {self.name} is pinned, "
                    f"{done:.1f} of {all_of_it:.1f} GiB so far"
                )
                thread.join()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def _in_background(self, size: int, device: torch.device) -> None:
        try:
            if on_gpu(device):  # the current device belongs to a thread, and is the first at start
                torch.get_device_module(device).set_device(device)
            self._timed(size, ", in the background")
        except RuntimeError as error:  # `pieces` raises it
            self._error = error

    def _timed(self, size: int, how: str) -> None:
        start = time.monotonic()
        for each in piece_sizes(size):
            if (
                not threading.main_thread().is_alive()
            ):  # the process ends, and waits for this thread
                return
            self._pin(each)
        seconds = time.monotonic() - start
        text = f"pinned {size / GIB:.2f} GiB of host memory for the {self.name}"
        self.say(f"offload: {text} in {seconds:.1f} s{how}")

    def _pin(self, size: int) -> None:
        try:
            self._pieces.append(self.allocate(size))
        except RuntimeError as error:
            done = sum(map(len, self._pieces)) / GIB
            wanted = self._wanted / GIB
            raise RuntimeError(
                f"offload: host memory for the {self.name}: {done:.2f} of {wanted:.2f} GiB could "
                f"be pinned ({error}), expected all of it. Give the container more memory and "
                "locked memory (ulimit -l), or offload less: rollout.offload_trainer"
            ) from error


class OffloadedStorage:
    """Frees the storage of tensors until `onload`.

    The tensors and their views stay valid objects but must not be used meanwhile. Holds only what
    is currently offloaded; true while that is anything.

    Args:
        host: where contents on a GPU wait; None: in memory that is pinned when they leave.
    """

    def __init__(self, host: HostMemory | None = None) -> None:
        self._pinned = host or HostMemory("tensors")
        self._arriving: torch.device | None = None  # where copies run that nothing waits for yet
        # storages that left together, and where their contents are; None: nowhere
        self._offloaded: list[tuple[list[tuple[torch.UntypedStorage, int]], list[Tensor] | None]]
        self._offloaded = []

    def __bool__(self) -> bool:
        return bool(self._offloaded)

    def offload(self, tensors: Iterable[Tensor], keep: bool = True) -> int:
        """Free the storages of ``tensors``.

        Args:
            keep: copy their contents to host memory (pinned for a GPU); otherwise `onload` fills
                them with zeros.

        Returns: bytes freed; a storage that several tensors share counts once.
        Syncs: once, after all copies were launched.
        Raises: RuntimeError if host memory cannot be pinned; the tensors are as before.
        """
        self.arrive()
        leaving = _storages(tensors)
        gpu = _gpu_of(leaving)
        host = None
        if keep:
            host = self._memory(sum(size for _, size in leaving), gpu is not None)
            for there, here in _overlaps(leaving, host):
                here.copy_(there, non_blocking=True)
        if gpu is not None:
            torch.get_device_module(gpu).synchronize(gpu)
        for storage, _ in leaving:
            storage.resize_(0)
        if gpu is not None:
            # an engine cannot use what torch's allocator caches
            torch.get_device_module(gpu).empty_cache()
        if leaving:
            self._offloaded.append((leaving, host))
        return sum(size for _, size in leaving)

    def _memory(self, size: int, pin: bool) -> list[Tensor]:
        """Pieces of host memory for ``size`` bytes, which nothing that is offloaded uses."""
        if not pin:
            return [torch.empty(each, dtype=torch.uint8) for each in piece_sizes(size)]
        used = sum(size for leaving, host in self._offloaded if host for _, size in leaving)
        return list(_behind(used, self._pinned.pieces(used + size)))

    def onload(self, behind: bool = False) -> int:
        """Allocate everything again and fill it, on the current stream.

        Args:
            behind: copy on another stream, behind the work that follows on the current one; call
                `arrive` before a use of the tensors.

        Returns: bytes allocated.
        """
        allocated = 0
        for left, host in self._offloaded:
            for storage, size in left:
                storage.resize_(size)
                allocated += size
                if host is None:
                    _bytes(storage).zero_()
            gpu = _gpu_of(left) if behind else None
            with nullcontext() if gpu is None else self._aside(gpu):
                for there, here in _overlaps(left, host) if host is not None else ():
                    most = len(here) if gpu is None else BEHIND
                    for to, of in zip(there.split(most), here.split(most), strict=True):
                        to.copy_(of, non_blocking=True)
        self._offloaded = []
        return allocated

    @contextmanager
    def _aside(self, gpu: torch.device) -> Generator[None]:
        """Launch copies on another stream, after what is launched on the current one: the memory
        may have been of tensors that it still reads."""
        module = torch.get_device_module(gpu)
        stream = _stream_of(gpu)
        stream.wait_stream(module.current_stream(gpu))
        with module.stream(stream):
            yield
        self._arriving = gpu

    def arrive(self) -> None:
        """Make the current stream wait for the copies of `onload`; the host does not wait."""
        gpu = self._arriving
        if gpu is not None:
            torch.get_device_module(gpu).current_stream(gpu).wait_stream(_stream_of(gpu))
            self._arriving = None


@cache
def _stream_of(device: torch.device) -> Any:
    """Not the stream of `Upload`: microbatches would wait for all of the state."""
    return torch.get_device_module(device).Stream(device)


def _gpu_of(storages: Iterable[tuple[torch.UntypedStorage, int]]) -> torch.device | None:
    return next((storage.device for storage, _ in storages if on_gpu(storage)), None)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of ``tensors``; one that several share counts once."""
    return sum(size for _, size in _storages(tensors))


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Each storage with its bytes; none that is empty, or offloaded already."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    storages.pop(0, None)
    return [(storage, storage.nbytes()) for storage in storages.values()]


def _behind(used: int, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of ``pieces`` behind the first ``used``."""
    for piece in pieces:
        if used < len(piece):
            yield piece[used:]
        used = max(0, used - len(piece))


def piece_sizes(size: int) -> list[int]:
    """``size`` bytes as powers of two, the largest first, and less than `LEAST` at the end.

    torch rounds an allocation of pinned memory up to a power of two and keeps it: 33 GiB in one
    would take 64 (CachingHostAllocator.h:302).
    """
    sizes = []
    while size >= LEAST:
        sizes.append(min(MOST, 1 << size.bit_length() - 1))
        size -= sizes[-1]
    return [*sizes, size] if size else sizes


def _overlaps(
    storages: Sequence[tuple[torch.UntypedStorage, int]], host: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of ``storages``, one behind the other, next to their place in ``host``."""
    pieces = iter(host)
    here = torch.empty(0, dtype=torch.uint8)
    for storage, _ in storages:
        there = _bytes(storage)
        while len(there):
            here = here if len(here) else next(pieces)
            count = min(len(there), len(here))
            yield there[:count], here[:count]
            there = there[count:]
            here = here[count:]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
