"""A file system that is full or read-only, where this process may mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "64k") -> Iterator[Path]:
    """``folder`` as a file system of ``size``; the test is skipped where that needs more rights."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free on the file system of ``folder``."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                pass


@contextmanager
def mounted_at(file: Path, place: Path) -> Iterator[None]:
    """``file`` also under the name ``place``, which is not a link; after `small_disk`."""
    place.touch()
    subprocess.run(["mount", "--bind", str(file), str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def make_read_only(folder: Path) -> None:
    """Remount the file system of ``folder`` read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
