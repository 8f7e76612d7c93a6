"""Replace files atomically; lock folders for one process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; the file takes the place of ``path`` when the block ends.

    A reader sees the old file or the new one, also after a crash or on a full disk.

    Raises: OSError naming ``path`` when it cannot be written; the old file is then untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # or a power failure could leave the new name without contents
        os.replace(partial, path)
    except OSError as error:
        raise OSError(
            f"{path}: cannot be written ({error.strerror or error}), expected a folder that is "
            "writable and has space; what was there before is untouched"
        ) from error
    finally:
        _remove(partial)


def write_text(path: Path, text: str) -> None:
    """Replace the contents of ``path`` whole; a file that holds ``text`` already is left alone.

    Raises: OSError as `replacing`.
    """
    contents = text.encode()
    try:
        if path.read_bytes() == contents:
            return
    except OSError:
        pass  # not there, or not readable: `replacing` says why it cannot be written
    with replacing(path) as partial:
        partial.write_bytes(contents)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # the name is too long, or the file system went read-only
        if path.exists():
            print(f"{path}: left behind ({error.strerror})", file=sys.stderr)


class FolderError(OSError):
    """A run folder that cannot be made or written, or that another process owns."""


@contextmanager
def locked(folder: Path, is_main: bool, world: ProcessGroup | None = None) -> Iterator[None]:
    """Own ``folder`` while the block runs: a second process that tries gets an error.

    The main rank locks ``<folder>/lock``; the kernel releases the lock when the process ends,
    however it ends. On NFS this needs Linux 2.6.12 and a lock manager (Lustre: the mount option
    ``flock``); where the file system cannot lock, a line says so and the block runs. Who has the
    lock is written into the file and removed when the block ends, so that the next start notices a
    process that was killed.

    Args:
        world: all ranks of the run; None: this process alone.

    Raises: FolderError, on every rank, when the folder cannot be made or written, or when another
        process owns it, with the pid and the host of that process.
    Communicates: a broadcast of the main rank's error.
    """
    with ExitStack() as held:
        refusal: FolderError | None = None
        if is_main:
            try:
                held.enter_context(_own(folder))
            except FolderError as error:
                refusal = error
        if world is not None:
            import torch.distributed as dist  # not needed to write a file

            shared = [refusal]
            dist.broadcast_object_list(shared, group=world)
            refusal = refusal or shared[0]
        if refusal is not None:
            raise refusal
        yield


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    """`locked` on the main rank."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("ab", buffering=0)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _not_writable(folder, error) from error
    with file:
        _lock(file, folder)
        if last := _owner(folder):
            print(
                f"run folder {folder}: the last start ({last}) was killed or ended by a hard exit",
                flush=True,
            )
        try:
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            raise _not_writable(folder, error) from error
        try:
            yield
        finally:
            file.truncate(0)


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FolderError(
            f"run folder {folder}: in use by {_owner(folder) or 'another process'}, expected one "
            "run in a folder. Wait for that process, end it, or set run to another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _not_writable(folder, error) from error
        print(
            f"run folder {folder}: its file system has no locks ({error.strerror}); a second "
            "process in the same folder will not be noticed",
            file=sys.stderr,
        )


def _not_writable(folder: Path, error: Exception) -> FolderError:
    reason = getattr(error, "strerror", None) or error
    return FolderError(
        f"run folder {str(folder)!r}: cannot be written ({reason}), expected a folder that can be "
        "made and written to. Set run to another one"
    )


def _owner(folder: Path) -> str:
    return (folder / "lock").read_text(encoding="utf-8", errors="replace").strip()
