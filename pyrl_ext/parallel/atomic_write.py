"""Replace files atomically, lock folders for one process, and check files by their digests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pyrl_ext.parallel.topology import Topology

DIGESTS = "digests.json"
ALGORITHM = "sha256"  # x86 and ARM servers have instructions for it: 1 to 2 GB/s a thread
THREADS = 4


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A path to write to; the file replaces ``path`` when the block ends.

    A reader sees the old file or the new one, also after a crash or on a full disk.

    Raises: OSError naming ``path`` when it cannot be written; the old file is then untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # somebody's link
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
        with suppress(OSError):  # the name is too long, or the file system went read-only
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the contents of ``path``; a file that holds ``text`` already is not touched.

    Raises: OSError as `replacing`.
    """
    with suppress(OSError):  # `replacing` reports why the file cannot be written
        if path.read_bytes() == text.encode():
            return
    with replacing(path) as partial:
        partial.write_bytes(text.encode())


def no_link(name: str, flags: int) -> int:
    """The opener of files that are kept: appended to, or locked.

    Raises: OSError where the file is a symbolic link: whoever may write to the folder could let it
        name any file of this user.
    """
    try:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = f"{os.path.basename(name)} is a symbolic link, expected a file. Remove the link"
        raise OSError(errno.ELOOP, why, name) from error


# Locks -------------------------------------------------------------------------------------------


class FolderError(OSError):
    """A run folder that cannot be made or written, or that another process owns."""


@contextmanager
def locked(folder: Path, is_main: bool, world: ProcessGroup | None = None) -> Generator[None]:
    """Own ``folder`` while the block runs: a second process that tries gets an error.

    The main rank locks ``<folder>/lock``; the kernel releases the lock when the process ends,
    even after a kill. On NFS this needs Linux 2.6.12 and a lock manager (Lustre: the mount option
    ``flock``); if the file system cannot lock, a line says so and the block runs. The owner is
    written into the file, and removed when the block ends, so that the next start notices a process
    that was killed.

    Args:
        world: all ranks of the run; None: this process alone.

    Raises: FolderError, on every rank, when the folder cannot be made or written, or when another
        process owns it, with the pid and the host of that process.
    Communicates: a broadcast of the main rank's error.
    """
    with ExitStack() as stack:
        refusal: FolderError | None = None
        if is_main:
            try:
                stack.enter_context(_own(folder))
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
def _own(folder: Path) -> Generator[None]:
    """`locked` on the main rank."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / "lock", "ab", buffering=0, opener=no_link))
            _lock(file.fileno(), folder)
            if last := lock_owner(folder):
                print(f"run folder {folder}: the last start ({last}) was killed", flush=True)
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        except FolderError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise FolderError(
                f"run folder {str(folder)!r}: cannot be written "
                f"({getattr(error, 'strerror', None) or error}), expected a folder that can be "
                "made and written to. Set run to another one"
            ) from error
        stack.callback(file.truncate, 0)
        yield


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FolderError(
            f"run folder {folder}: in use by {lock_owner(folder) or 'another process'}, expected "
            "one run in a folder. Wait for that process, stop it, or set run to another folder"
        ) from error
    except OSError as error:
        print(
            f"run folder {folder}: its file system has no locks ({error.strerror}); a second "
            "process in the same folder will not be noticed",
            file=sys.stderr,
        )


def lock_owner(folder: Path) -> str:
    """``pid P on HOST`` of the process that owns the run folder; empty if none does."""
    lock = folder / "lock"
    return lock.read_text("utf-8", "replace").strip() if lock.is_file() else ""


# Digests -----------------------------------------------------------------------------------------


def write_digests(folder: Path, topo: Topology) -> None:
    """Write ``folder``/digests.json: the digest of every other file in it.

    Communicates: a gather of the digests over the world.
    """
    from pyrl_ext.parallel.collective_errors import gather_objects

    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = gather_objects(names, topo.world)[0]
    parts = gather_objects(_digests(folder, _share(names, topo)), topo.world)
    if topo.is_main:
        files = {name: digest for part in parts for name, digest in part.items()}
        text = json.dumps({"algorithm": ALGORITHM, "files": files}, indent=1, sort_keys=True)
        (folder / DIGESTS).write_text(text)


def find_damage(folder: Path, topo: Topology) -> str | None:
    """The first file of this rank's share that differs from ``folder``/digests.json, and how.

    Raises: ValueError when digests.json itself is damaged.
    """
    try:
        tree = json.loads((folder / DIGESTS).read_bytes())
        listed: dict[str, str] = {str(name): str(text) for name, text in tree["files"].items()}
        if tree["algorithm"] != ALGORITHM or not listed:
            raise ValueError("another algorithm, or no files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / DIGESTS}: unreadable ({error!r}), expected the digests of a checkpoint's "
            "files"
        ) from error
    share = _share(sorted(listed), topo)
    for name in share:
        if not (folder / name).is_file():
            return f"{folder / name}: missing, expected the file that {DIGESTS} lists"
    for name, digest in _digests(folder, share).items():
        if digest != listed[name]:
            return (
                f"{folder / name}: its {ALGORITHM} is {digest[:12]}..., expected "
                f"{listed[name][:12]}... of {DIGESTS}; it was changed after it was written"
            )
    return None


def _share(names: Sequence[str], topo: Topology) -> Sequence[str]:
    return names[topo.rank :: topo.world_size]


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, ALGORITHM).hexdigest()

    with ThreadPoolExecutor(THREADS) as pool:  # hashing releases the interpreter's lock
        return dict(zip(names, pool.map(digest, names), strict=True))
