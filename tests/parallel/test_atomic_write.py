"""Files that are replaced whole or not at all, and folders that one process owns."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pyrl_ext.parallel.atomic_write import FolderError, locked, replacing, write_text
from tests.helpers.ranks import run_ranks
from tests.helpers.small_disk import fill, make_read_only, small_disk

pytestmark = pytest.mark.multiprocess

HOLD = """
import sys, time
from pathlib import Path
from pyrl_ext.parallel.atomic_write import locked
with locked(Path(sys.argv[1]), True):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_replacing_keeps_the_old_file_when_the_block_raises(tmp_path: Path):
    path = tmp_path / "new" / "file"
    write_text(path, "old")
    with pytest.raises(KeyError), replacing(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(path.parent) == ["file"]


def test_write_text_leaves_an_equal_file_alone(tmp_path: Path):
    path = tmp_path / "file"
    write_text(path, "text")
    before = path.stat()
    write_text(path, "text")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    write_text(path, "other")
    assert path.read_text() == "other" and path.stat().st_ino != before.st_ino


def test_write_text_on_a_full_disk_names_the_file_and_keeps_it(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "plan.json"
        write_text(path, "old")
        fill(disk)
        with pytest.raises(OSError, match=r"plan\.json: cannot be written \(No space left"):
            write_text(path, "new" * 10_000)
        assert path.read_text() == "old"
        assert sorted(os.listdir(disk)) == ["filler", "plan.json"]


def test_write_text_below_a_file_names_the_path(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/plan\.json: cannot be written \("):
        write_text(tmp_path / "file" / "plan.json", "text")


def holder(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def refuses(folder: Path, message: str) -> None:
    with pytest.raises(FolderError, match=message), locked(folder, True):
        pass


def test_locked_refuses_a_second_process_by_pid_and_host(tmp_path: Path):
    process = holder(tmp_path)
    try:
        refuses(tmp_path, f"in use by pid {process.pid} on {socket.gethostname()}")
        with locked(tmp_path, is_main=False):  # the other ranks leave it to the main rank
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_locked_is_free_after_a_kill_and_says_so(tmp_path: Path, capsys):
    process = holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for said in (f"the last start (pid {process.pid} on ", ""):
        with locked(tmp_path, True):
            assert (tmp_path / "lock").read_text().startswith(f"pid {os.getpid()} on ")
        out = capsys.readouterr().out
        assert said in out if said else not out


@pytest.mark.parametrize("name", ["/dev/null", "/dev/null/run", "{}/file/run", "{}/" + "x" * 300])
def test_locked_names_a_folder_that_cannot_be_made(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    folder = name.format(tmp_path)
    refuses(Path(folder), r"cannot be written .* Set run to another")


def lock_as_rank(group, folder: Path) -> str:
    try:
        with locked(folder, group.rank() == 0, group):
            owner = (folder / "lock").read_text().split()[1]
            dist.barrier(group)  # the main rank empties the file when it leaves
            return owner
    except FolderError as error:
        return str(error)


def test_locked_refuses_on_every_rank(tmp_path: Path):
    """So none goes on alone and reports the loss of the main rank next to that rank's error."""
    first, second = run_ranks(lock_as_rank, 2, Path("/dev/null"))
    assert first == second and "'/dev/null': cannot be written" in first
    first, second = run_ranks(lock_as_rank, 2, tmp_path)
    assert first == second and first.isdigit()


def test_locked_names_a_folder_with_a_nul():
    refuses(Path("runs/\0"), r"'runs/\\x00': cannot be written \(.*null byte")


def test_locked_on_a_read_only_or_full_disk_names_the_folder(tmp_path: Path):
    with small_disk(tmp_path / "full") as disk:
        fill(disk)
        refuses(disk, r"full.*cannot be written \(No space left")
    with small_disk(tmp_path / "read only") as disk:
        make_read_only(disk)
        refuses(disk / "run", r"cannot be written \(Read-only file system")
