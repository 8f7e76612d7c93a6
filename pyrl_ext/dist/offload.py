"""Device memory that is freed for a while; its contents may wait in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OffloadedStorage:
    """Frees the storage of tensors until `onload`.

    The tensors and their views stay valid objects but must not be used meanwhile. Holds only what
    is currently offloaded; true while that is anything.
    """

    def __init__(self) -> None:
        self._offloaded: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

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
        leaving = [(s, s.nbytes(), _host_copy(s, keep)) for s in storages.values()]
        on_gpu = any(storage.device.type == "cuda" for storage, *_ in leaving)
        if on_gpu:
            torch.cuda.synchronize()
        for storage, *_ in leaving:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()  # an engine cannot use what torch's allocator caches
        self._offloaded += leaving
        return sum(size for _, size, _ in leaving)

    def onload(self) -> int:
        """Allocate everything again and fill it, on the current stream.

        Returns: bytes allocated.
        """
        for storage, size, host in self._offloaded:
            storage.resize_(size)
            there = _bytes(storage)
            there.zero_() if host is None else there.copy_(host, non_blocking=True)
        allocated = sum(size for _, size, _ in self._offloaded)
        self._offloaded = []
        return allocated


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copy(storage: torch.UntypedStorage, keep: bool) -> Tensor | None:
    if not keep:
        return None
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage), non_blocking=True)
