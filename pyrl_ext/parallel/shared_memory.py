"""Memory without a name that processes of one host share: it is freed with the last that maps it,
also after a kill."""

from __future__ import annotations

import mmap
import os
import zlib

import torch
from torch import Tensor


class SharedBlock:
    """Bytes that other processes of this host can map.

    Attributes:
        memory: [size] uint8.
        file: descriptor in this process; with the process id it names the block.
    """

    def __init__(self, size: int):
        self.file = os.memfd_create("pyrl_ext")
        os.ftruncate(self.file, size)
        self.memory = map_file(self.file, size)

    def close(self) -> None:
        """Forget the block; memory that is mapped stays."""
        os.close(self.file)


def map_file(file: int, size: int) -> Tensor:
    """[size] uint8, the memory behind the descriptor ``file``."""
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def map_block(process: int, file: int, size: int) -> Tensor:
    """[size] uint8, the `SharedBlock` with descriptor ``file`` in another process.

    Raises: OSError when that process has ended, or may not be looked into.
    """
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        return map_file(opened, size)
    finally:
        os.close(opened)


def host_key() -> int:
    """A number that processes have in common if they can map each other's blocks: they run on one
    kernel and see the same process ids."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        kernel = file.read().strip()
    return zlib.crc32(f"{kernel} {os.readlink('/proc/self/ns/pid')}".encode())
