"""Heartbeats between ranks; ranks that are killed under torchrun are in test_faults."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pyrl_ext.parallel import heartbeat
from pyrl_ext.parallel.timers import Clock
from tests.helpers.ranks import fork_ranks, run_ranks

pytestmark = pytest.mark.multiprocess

ALONE = SimpleNamespace(rank=0, world_size=1, has_modules=False)


def slow_rank(group):
    """Rank 1 spends twice the patience in one phase; rank 0 waits for it."""
    heartbeat.INTERVAL = 0.1
    topo = SimpleNamespace(rank=group.rank(), world_size=group.size(), has_modules=False)
    with heartbeat.heartbeats(topo) as beats:  # pyright: ignore[reportArgumentType]
        clock = Clock(on_phase=beats.enter)
        beats.step = 0
        with clock("time/rollout"):
            time.sleep(2 * heartbeat.SILENT * heartbeat.INTERVAL * group.rank())
        dist.barrier(group)
    return beats.cause, threading.active_count()


def test_heartbeats_take_a_long_phase_for_no_fault():
    threads = (1, 2)  # rank 1 sends heartbeats until it exits
    assert run_ranks(slow_rank, 2) == [(None, number) for number in threads]


def test_heartbeats_of_one_rank_need_no_thread():
    with heartbeat.heartbeats(ALONE):  # pyright: ignore[reportArgumentType]
        assert not [t.name for t in threading.enumerate() if t.name.startswith("heartbeat")]


def test_place_names_the_phase_and_the_step():
    beats = heartbeat.Heartbeat(ALONE)  # pyright: ignore[reportArgumentType]
    assert beats.place == "start-up"
    clock = Clock(on_phase=beats.enter)
    beats.step = 7
    with clock("time/step"):
        assert beats.place == "step 7"
        with clock("time/update"):
            assert beats.place == "update of step 7"
        assert beats.place == "step 7"


HOSTS = 3
PER_HOST = 4
SHARED = 2  # keys that every rank reads


def one_of_many(rank: int, world_size: int, port: int, folder: Path, kind: str) -> None:
    """A rank on one of several hosts; in some of ``kind`` rank 3 or rank 0 fails by itself."""
    os.environ |= {"LOCAL_RANK": str(rank % PER_HOST), "LOCAL_WORLD_SIZE": str(PER_HOST)}
    os.dup2(os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
    heartbeat.INTERVAL = 0.25
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    minute = timedelta(minutes=1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=minute)
    topo = SimpleNamespace(rank=rank, world_size=world_size, has_modules=False)
    requests: list[int] = []
    multi_get = dist.PrefixStore.multi_get  # pyright: ignore[reportPrivateImportUsage]

    def counted(self, keys):
        requests.append(len(keys))
        return multi_get(self, keys)

    dist.PrefixStore.multi_get = counted  # pyright: ignore
    with heartbeat.heartbeats(topo) as beats:  # pyright: ignore[reportArgumentType]
        beats.step = 5
        dist.barrier()
        while len(requests) < 8:
            time.sleep(0.05)
        (folder / f"{rank}.requests").write_text(repr(set(requests)))
        (folder / f"{rank}.requests").rename(folder / f"{rank}.ready")
        if kind == "error" and rank == 3:
            raise ValueError("bad luck")
        while kind == "collective" and rank == 0 and not (folder / "killed").exists():
            time.sleep(0.05)
        if kind == "collective" and rank == 0:
            raise RuntimeError("connection closed")
        time.sleep(60)


def ends_of(tmp_path: Path, kind: str, killed: range) -> dict[int, str]:
    """The output of each rank of three hosts, after ``killed`` were killed at once."""
    with fork_ranks(one_of_many, HOSTS * PER_HOST, tmp_path, kind) as processes:
        while len(ready := [*tmp_path.glob("*.ready")]) < len(processes):
            time.sleep(0.05)
            assert all(process.is_alive() for process in processes) or kind == "error"
        for path in ready:
            watched = len(processes) - 1 if path.stem == "0" else 1
            assert path.read_text() == f"{{{SHARED + watched}}}"
        for rank in killed:
            os.kill(processes[rank].pid, signal.SIGKILL)
        (tmp_path / "killed").touch()
        for process in processes:
            process.join(60)
        assert not any(process.is_alive() for process in processes)
    lived = set(range(len(processes))).difference(killed)
    return {rank: (tmp_path / f"{rank}.txt").read_text() for rank in lived}


@pytest.mark.parametrize(
    ("kind", "killed", "words"),
    [
        ("silence", range(4, 8), "no heartbeat for 5 s from"),
        ("collective", range(9, 10), "no heartbeat for 1 s from"),
        ("error", range(0), "failed in step 5: ValueError: bad luck"),
    ],
)
def test_heartbeats_name_the_lost_ranks_on_every_rank(tmp_path, kind, killed, words):
    """A host of four ranks goes silent; a collective fails on a rank that does not watch the dead
    one; a rank fails. Rank 0 reads a key of each other rank, the others that of rank 0."""
    for rank, text in ends_of(tmp_path, kind, killed).items():
        if kind == "error" and rank == 3:
            continue
        assert words in text, (rank, text)
        first = text.split("\n")[0]
        named = [r for r in range(HOSTS * PER_HOST) if f"rank {r} (" in first]
        assert named == (list(killed) or [3]), (rank, text)
