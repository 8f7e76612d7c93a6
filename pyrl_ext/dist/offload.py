"""Device memory freed for a while, its contents kept on the host."""

from __future__ import annotations

from collections.abc import Iterable
import torch
from torch import Tensor



class Aside:
    """Memory of tensors, given back for a while.

    Tensors, their views and all that refers to them stay the objects they are; only their storages
    are empty meanwhile, and must not be touched. Nothing is remembered between two times but what
    is away.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def __bool__(self) -> bool:
        return bool(self._away)

    def put(self, tensors: Iterable[Tensor], keep: bool = True) -> int:
        """Empties the storages of ``tensors``.

        Args:
            keep: their contents wait in host memory, pinned for a GPU's; else zeros come back.

        Returns: bytes given back; a storage that several tensors share counts once.
        Syncs: once, when all copies are made.
        """
        found = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
        found.pop(0, None)  # empty, or away already
        leaving = [
            (storage, storage.nbytes(), _host_copy(storage, keep)) for storage in found.values()
        ]
        on_gpu = any(storage.device.type == "cuda" for storage, *_ in leaving)
        if on_gpu:
            torch.cuda.synchronize()
        for storage, *_ in leaving:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()  # what torch keeps for itself no engine can have
        self._away += leaving
        return sum(size for _, size, _ in leaving)

    def take_back(self) -> int:
        """Fills all of them again, in the order of the stream.

        Returns: bytes taken.
        """
        for storage, size, host in self._away:
            storage.resize_(size)
            there = _bytes(storage)
            there.zero_() if host is None else there.copy_(host, non_blocking=True)
        taken = sum(size for _, size, _ in self._away)
        self._away = []
        return taken


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copy(storage: torch.UntypedStorage, keep: bool) -> Tensor | None:
    if not keep:
        return None
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage), non_blocking=True)
