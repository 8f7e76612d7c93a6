"""Run a function on several real processes: the helper behind every multi-rank test."""

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.helpers.deadline import DEADLINE
from tests.helpers.nccl_rules import Watch, install

PRELOAD: list[str] = []  # before anything else
GPU_BACKENDS = "cpu:gloo,cuda:nccl"
LOOP = ("pyrl_ext.train.loop", "pyrl_ext.rollout.hf.engine")  # the second brings transformers


def poison_empty() -> None:
    """Fill what ``torch.empty`` returns, which torch does in its deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = DEADLINE,
    preload: tuple[str, ...] = LOOP,
    device: str = "cpu",
    rules: bool | None = None,
) -> list[Any]:
    """Call ``fn(group, *args)`` on ``world_size`` processes and return the results by rank.

    ``fn`` must be importable (top level of a test module). The first rank that failed fails the
    test with its own traceback, not with the broken connections it caused; so does a rank that a
    signal ended, or one still running after ``timeout`` [s]. No port is taken: the ranks meet in a
    file. They begin with the modules ``preload`` imported.

    With ``device="cuda"`` every rank has a GPU, the one of its number, and the backends of a run:
    NCCL for tensors on GPUs, gloo for those on the host.

    With ``rules`` it fails, too, if the ranks do what NCCL does not forgive (`nccl_rules`); None:
    as the environment says, PYRL_NCCL_RULES=1.
    """
    rules = os.environ.get("PYRL_NCCL_RULES") == "1" if rules is None else rules
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        servers = [_server(preload, number) for number in range(min(2, world_size))]
        backend = GPU_BACKENDS if device == "cuda" else "gloo"
        watch = Watch(Path(folder), world_size) if rules else None
        task = (world_size, backend, folder, rules, _environment(device), fn, args)
        processes = [
            context.Process(target=_rank_main, args=(rank, *task)) for rank in range(world_size)
        ]
        try:
            for rank, process in enumerate(processes):
                connect = servers[rank.bit_count() % 2].connect_to_new_process
                with patch.object(forkserver, "connect_to_new_process", connect):
                    process.start()
            in_circle = _wait(processes, Path(folder), time.monotonic() + timeout, watch)
            stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
            crashed = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode}
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()

        if in_circle:
            raise AssertionError(f"{fn.__name__}: {in_circle}")
        failures = sorted(Path(folder).glob("*.failed"), key=lambda path: path.stat().st_mtime_ns)
        if failures and min(crashed.values(), default=0) >= 0:
            first = failures[0]
            raise AssertionError(f"rank {first.stem} of {world_size}\n{first.read_text()}")
        if crashed:
            raise AssertionError(f"{fn.__name__}: exit codes by rank {crashed}, no traceback")
        if stuck:
            raise TimeoutError(f"{fn.__name__}: ranks {stuck} still running after {timeout} s")
        if watch is not None and (broken := watch.report()):
            raise AssertionError(f"{fn.__name__}: {broken}")
        return [torch.load(f"{folder}/{r}.pt", weights_only=False) for r in range(world_size)]


@contextmanager
def fork_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> Iterator[list[Any]]:
    """``fn(rank, world_size, port of a store, *args)`` on many light processes, which are killed
    when the block ends. Unlike `run_ranks`, no rank waits for another, and any of them may die."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    processes = list[Any]()
    try:
        for rank in range(world_size):
            processes.append(fork(fn, rank, world_size, store.port, *args))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def fork(fn: Callable[..., None], *args: Any) -> Any:
    """A process that runs ``fn(*args)``, without the seconds of its imports."""
    process = mp.get_context("forkserver").Process(target=fn, args=args)
    connect = _server(LOOP, 0).connect_to_new_process
    with patch.object(forkserver, "connect_to_new_process", connect):
        process.start()
    return process


@cache
def _server(preload: tuple[str, ...], number: int) -> ForkServer:
    """A process to fork ranks from, which imported the modules ``preload`` and did no more.

    So a rank is as fresh as a new process without the seconds of its imports. Ranks of different
    servers share neither addresses nor the seed of hashes, which set their sets' order. Two servers
    are enough: of the ranks of a group in a grid of powers of two, which differ in some of their
    bits, half have an odd number of ones, and those are of the second.
    """
    server = ForkServer()
    server.set_forkserver_preload([*PRELOAD, *preload])
    # megatron's imports ask for GPUs, and CUDA cannot be used in forks of who did; gloo ranks need
    # none
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        server.ensure_running()
    return server


def _wait(processes: list[Any], folder: Path, deadline: float, watch: Watch | None) -> str:
    """Return when all ranks ended, one failed (with a moment for its peers), or time is up; and
    when they wait for each other, with who waits for whom."""
    while time.monotonic() < deadline:
        if not any(process.is_alive() for process in processes):
            return ""
        if watch is not None and (in_circle := watch.stuck()):
            return in_circle
        if any(process.exitcode for process in processes) or any(folder.glob("*.failed")):
            deadline = min(deadline, time.monotonic() + 2.0)
        time.sleep(0.02)
    return ""


def _environment(device: str) -> dict[str, str]:
    """Environment of the ranks; like their server, ranks on the CPU see no GPU."""
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _rank_main(rank, world_size, backend, folder, rules, environment, fn, args):
    os.environ.clear()  # a fork has that of the first call
    os.environ.update(environment, WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    if backend == GPU_BACKENDS:
        os.environ["LOCAL_RANK"] = str(rank)
        torch.cuda.set_device(rank)
    gc.freeze()  # what was imported is here to stay, and costs a second of each full collection
    poison_empty()
    store = f"file://{folder}/store"
    try:
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
        if rules:
            install(Path(folder))
        torch.save(fn(dist.group.WORLD, *args), f"{folder}/{rank}.pt")
    except BaseException:
        partial = Path(folder, f"{rank}.partial")
        partial.write_text(traceback.format_exc())
        partial.rename(Path(folder, f"{rank}.failed"))
        raise
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()
