"""Waits of real runs: each says its line, and a stop signal ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.process.client import ProcessEngine
from tests.helpers.deadline import DEADLINE
from tests.helpers.python_path import python_path
from tests.helpers.sleeper import Sleeper
from tests.helpers.tiny import CONFIG, QUICK

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
TRAIN = ["-m", "pyrl_ext.train", str(CONFIG), *QUICK]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Run:
    """A command whose output is read line by line."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.text = ""

    def said(self, words: str) -> str:
        """The next line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if words in line:
                return line
        raise AssertionError(f"no line with {words!r} in:\n{self.text}")

    def stopped_by(self, number: int) -> int:
        """Its exit code after a signal; `text` is all that it said."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=DEADLINE)
        self.text += rest
        return self.process.returncode


@contextmanager
def started(arguments: Sequence[str], **environment: str) -> Iterator[Run]:
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), **environment}
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | more,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield Run(process)
        finally:
            process.kill()


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that refuses connections, and that no other process gets."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@pytest.mark.parametrize(("number", "ahead"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_train_says_that_an_engine_is_down_and_stops(tmp_path: Path, number: int, ahead: int):
    """With ``ahead`` the wait is in the thread that publishes, and the main thread elsewhere."""
    with silent_port() as port:
        address = f"http://127.0.0.1:{port}"
        more = [f"rollout.servers=[{address}]", f"run={tmp_path}", f"rollout.ahead={ahead}"]
        with started([*TRAIN, *more]) as run:
            line = run.said("waiting for the remote engine: ")
            assert f"{address}: connection refused; " in line and ", at most 600 s, until " in line
            assert f". Start them with: pyrl serve {CONFIG} 'rollout.servers=[{address}]'" in line
            assert run.stopped_by(number) == 130
    name = signal.Signals(number).name
    assert f"stopped at once by {name} while waiting for the remote engine; " in run.text
    assert "error" not in run.text and not (tmp_path / "error.txt").exists()


def test_train_names_another_program_at_the_address_of_an_engine(tmp_path: Path):
    other = ["-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with started(other) as http:
        port = http.said("Serving HTTP on").split(" port ")[1].split()[0]
        servers = f"rollout.servers=[http://127.0.0.1:{port}]"
        with started([*TRAIN, servers, f"run={tmp_path}"]) as run:
            line = run.said("another program, no engine")
            assert f"port {port} is held by " in line and f"(pid {http.process.pid})" in line
            assert run.stopped_by(signal.SIGTERM) == 130


def test_train_stops_the_ranks_that_wait_for_the_one_that_asks(tmp_path: Path):
    with silent_port() as port:
        servers = f"rollout.servers=[http://127.0.0.1:{port}]"
        more = [*TRAIN, servers, f"run={tmp_path}", "parallel.dp=2"]
        with started([*TORCHRUN, *more]) as run:
            run.said("waiting for the remote engine: ")
            run.stopped_by(signal.SIGTERM)
    assert run.text.count("stopped at once by SIGTERM while waiting") == 1
    assert "error: " not in run.text and "ended in" not in run.text, run.text
    assert not (tmp_path / "error.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_says_that_others_are_missing_and_stops(tmp_path: Path, number: int):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with started([*TRAIN, f"run={tmp_path}", "parallel.dp=2"], **ranks, **place) as run:
        run.said(f"waiting for all 2 ranks at 127.0.0.1:{port}, the store of the rendezvous; ")
        assert run.stopped_by(number) == -number


def test_train_says_that_it_downloads_and_stops(tmp_path: Path):
    """A download that never ends."""
    script = f"""
import sys, time, huggingface_hub
from pyrl_ext import train
huggingface_hub.snapshot_download = lambda *_, **__: time.sleep({DEADLINE})
sys.exit(train.main(sys.argv[1:]))
"""
    weights = "model.weights=owner/name"
    hub = {"HF_ENDPOINT": "http://hub.invalid", "HF_HUB_OFFLINE": "0"}
    with started(["-c", script, *TRAIN[2:], weights, f"run={tmp_path}"], **hub) as run:
        run.said("waiting for owner/name from http://hub.invalid; ")
        assert run.stopped_by(signal.SIGTERM) == -signal.SIGTERM


def builds_late(path: str, kind: Callable[[], Engine]) -> Engine:
    """An engine that is built once somebody writes to the named pipe."""
    with open(path) as gate:
        gate.read()
    return kind()


def test_an_engine_in_another_process_is_said_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    reads, writes = os.pipe()
    lines: list[str] = []

    def read_a_line() -> None:
        with os.fdopen(reads) as said:
            lines.append(said.readline())
            gate.write_text("build")
            said.read()

    reader = threading.Thread(target=read_a_line)
    reader.start()
    monkeypatch.setattr("pyrl_ext.parallel.waiting.QUIET_S", 0.0)
    with os.fdopen(writes, "w") as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        log = tmp_path / "log"
        engine = ProcessEngine(builds_late, (str(gate), Sleeper), transport="shm", log=log)
        try:
            assert engine.capabilities.routes is False
        finally:
            engine.close()
    reader.join()
    name = f"the engine's process (pid {engine.process.pid})"
    assert lines[0].startswith(f"waiting for {name} to start; 0 s so far, without a limit. It logs")
