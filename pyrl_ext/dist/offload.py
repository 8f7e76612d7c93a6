"""Device memory that is freed for a while; its contents may wait in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pyrl_ext.ops.on_gpu import on_gpu

MOST, LEAST = 1 << 30, 1 << 20  # bytes of a piece of host memory


class OffloadedStorage:
    """Frees the storage of tensors until `onload`.

    The tensors and their views stay valid objects but must not be used meanwhile. Holds only what
    is currently offloaded; true while that is anything.
    """

    def __init__(self) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        self._host: list[tuple[list[tuple[torch.UntypedStorage, int]], list[Tensor]]] = []

    def __bool__(self) -> bool:
        return bool(self._offloaded)

    def offload(self, tensors: Iterable[Tensor], keep: bool = True) -> int:
        """Free the storages of ``tensors``.

        Args:
            keep: copy their contents to host memory (pinned for a GPU); otherwise `onload` fills
                them with zeros.

        Returns: bytes freed; a storage that several tensors share counts once.
        Syncs: once, after all copies were launched.
        """
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
        storages.pop(0, None)  # empty, or offloaded already
        leaving = [(storage, storage.nbytes()) for storage in storages.values()]
        gpu = next((storage.device for storage, _ in leaving if on_gpu(storage)), None)
        if keep:
            sizes = piece_sizes(sum(size for _, size in leaving))
            host = [
                torch.empty(size, dtype=torch.uint8, pin_memory=gpu is not None) for size in sizes
            ]
            for there, here in _overlaps(leaving, host):
                here.copy_(there, non_blocking=True)
            self._host.append((leaving, host))
        if gpu is not None:
            torch.get_device_module(gpu).synchronize(gpu)
        for storage, _ in leaving:
            storage.resize_(0)
        if gpu is not None:
            # an engine cannot use what torch's allocator caches
            torch.get_device_module(gpu).empty_cache()
        self._offloaded += leaving
        return sum(size for _, size in leaving)

    def onload(self) -> int:
        """Allocate everything again and fill it, on the current stream.

        Returns: bytes allocated.
        """
        kept = {id(storage) for leaving, _ in self._host for storage, _ in leaving}
        for storage, size in self._offloaded:
            storage.resize_(size)
            if id(storage) not in kept:
                _bytes(storage).zero_()
        for leaving, host in self._host:
            for there, here in _overlaps(leaving, host):
                there.copy_(here, non_blocking=True)
        allocated = sum(size for _, size in self._offloaded)
        self._offloaded, self._host = [], []
        return allocated


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
    """The bytes of ``storages``, one behind the other, beside their place in ``host``."""
    pieces, here = iter(host), torch.empty(0, dtype=torch.uint8)
    for storage, _ in storages:
        there = _bytes(storage)
        while len(there):
            here = here if len(here) else next(pieces)
            count = min(len(there), len(here))
            yield there[:count], here[:count]
            there, here = there[count:], here[count:]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
