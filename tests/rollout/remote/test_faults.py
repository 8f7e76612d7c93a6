"""Runs over servers that are killed or hang: what is left goes on, with the same numbers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyrl_ext.rollout.build import build_in_this_process
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.identity import make_identity
from tests.helpers.rows import rows_of
from tests.helpers.server_processes import ServerProcess
from tests.helpers.server_runs import COMMON, assert_same, over, run
from tests.helpers.servers import running
from tests.helpers.tiny import tiny_plan
from tests.helpers.wrong_routes import StaleRoutes, server_of

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the colocated engine."""
    folder = tmp_path_factory.mktemp("beside")
    assert run(folder)[0] == 0
    return folder


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory):
    with ServerProcess(tmp_path_factory.mktemp("steady") / "log", COMMON) as server:
        yield server


class During:
    """Calls a function once, in a thread, as soon as a server generates for a step after the first.

    Args:
        folder: of the run
        act: what happens then
    """

    def __init__(self, folder: Path, act: Callable[[], None]):
        self.folder = folder
        self.act = act
        self.acted = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        lines = self.folder / "metrics.jsonl"
        while not lines.exists() or not lines.read_text().strip():  # the first step is over
            time.sleep(0.005)
        time.sleep(0.05)
        self.act()
        self.acted.set()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_train_goes_on_without_a_server(
    how: str, steady: ServerProcess, beside: Path, tmp_path: Path
):
    """SIGKILL ends its connections; a process that SIGSTOP stopped answers nothing, ever."""
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    with ServerProcess(tmp_path / "log", COMMON) as third:
        _ = third.address
        during = During(tmp_path / "apart", lambda: third.signal(number))
        asked = ("rollout.request_timeout=6", "rollout.publish_timeout=15")
        code, said = run(tmp_path / "apart", over([steady, third]), *asked)
        assert code == 0 and during.acted.is_set()
    assert_same(tmp_path / "apart", beside)
    rows = rows_of(tmp_path / "apart")
    assert rows[0]["servers/used"] == 2 and rows[-2]["servers/used"] == 1
    assert third.address in said and "1 of 2 servers are left" in said


def test_train_makes_again_what_a_server_with_old_routes_made(
    steady: ServerProcess, beside: Path, tmp_path: Path
):
    """The canary is asked while it generates; the log-probs of its samples are right."""
    plan = tiny_plan(*COMMON)
    engine = build_in_this_process(plan, torch.device("cpu"))
    assert isinstance(engine, HFEngine)
    known = make_identity(plan.hf, engine.shapes(), plan.rollout_dtype, plan.tokenizer_path)
    with running(engine, plan.longest + 50, server_of(StaleRoutes)) as stale:
        stale.server.identity = known
        servers = f"rollout.servers={[steady.address, stale.url]}"
        code, said = run(tmp_path / "apart", servers)
        assert code == 0 and stale.server.worker.counts["answers"] > 4
    assert f"{stale.url}: canary of version 1: " in said and "of layer 1 differ" in said
    assert_same(tmp_path / "apart", beside)


def test_train_stops_with_the_reasons_of_all_servers(tmp_path: Path):
    with ServerProcess(tmp_path / "log", COMMON) as alone:
        During(tmp_path / "apart", lambda: alone.signal(signal.SIGKILL))
        address = alone.address
        code, said = run(tmp_path / "apart", over([alone]))
    assert code == 1
    assert "0 of 1 servers are left, expected at least 1" in said and address in said
