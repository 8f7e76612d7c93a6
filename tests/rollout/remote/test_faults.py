"""Runs over servers that are killed or hang: what is left goes on, with the same numbers."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from pyrl_ext.data.recordings import load_samples
from pyrl_ext.rollout.build import build_in_this_process
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.identity import make_identity
from pyrl_ext.samples import Sample
from tests.helpers.agent_program import SAY
from tests.helpers.conversations import TOKENIZER
from tests.helpers.rows import rows_of
from tests.helpers.server_processes import SelfSignal, ServerProcess
from tests.helpers.server_runs import COMMON, assert_same, over, run
from tests.helpers.servers import running
from tests.helpers.tiny import CONFIG, tiny_plan
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


AGENTS = (
    "turns.max_turns=3",
    "turns.max_tokens=90",
    "turns.timeout=600",
    "rollout.record=rollouts",
)
PLAYED = "turns.agent=tests.helpers.played_agents:capitals", "turns.options={}"
# what the agent above does, in a program that knows no package
PROGRAM = (
    SAY
    + """
messages = [{"role": "user", "content": os.environ["PYRL_PROMPT"]}]
count = 0
for _ in range(3):
    said = say(messages)
    count += sum(letter.isupper() for letter in said["content"])
    messages += [said, {"role": "user", "content": "+"}]
print(count)
"""
)


def with_agents(folder: Path, *overrides: str) -> str:
    """Run agents, check that no process and no thread is left, and return the stderr."""
    here = psutil.Process()
    before = {process.pid for process in here.children(recursive=True)}
    config = CONFIG.parent / "examples/agent.yaml"
    code, said = run(folder, *AGENTS, *overrides, config=config)
    assert code == 0, said
    assert {process.pid for process in here.children(recursive=True)} <= before
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"agents endpoint", "servers"}
    return said


def assert_same_samples(folder: Path, other: Path) -> None:
    """The same trajectories were trained, token by token, with their rewards."""
    assert files(folder) == files(other)
    batches = sorted((folder / "rollouts").glob("step-*.safetensors"))
    assert len(batches) == 3
    for batch in batches:
        samples = by_trajectory(batch)
        expected = by_trajectory(other / "rollouts" / batch.name)
        assert samples.keys() == expected.keys() and len(samples) == 16
        for key, sample in samples.items():
            assert torch.equal(sample.tokens, expected[key].tokens)
            assert torch.equal(sample.loss_mask, expected[key].loss_mask)
            assert len(sample.spans) == 3
            answers = (TOKENIZER.decode(sample.tokens[b:e].tolist()) for b, e in sample.spans)
            assert sample.reward == sum(map(str.isupper, "".join(answers)))


def by_trajectory(batch: Path) -> dict[tuple[int, int], Sample]:
    return {(sample.prompt_id, sample.index): sample for sample in load_samples(batch)}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_agents_go_on_without_servers_that_die_or_hang_under_their_calls(
    steady: ServerProcess, tmp_path: Path
):
    """One is killed in the second step, another one stops in the third one."""
    with_agents(tmp_path / "colocated", *PLAYED)
    killed = SelfSignal(signal.SIGKILL, 1)
    stopped = SelfSignal(signal.SIGSTOP, 2)
    with (
        ServerProcess(tmp_path / "killed.log", COMMON, sends=killed) as second,
        ServerProcess(tmp_path / "stopped.log", COMMON, sends=stopped) as third,
    ):
        limits = ("rollout.request_timeout=10", "rollout.publish_timeout=20")
        servers = over([steady, second, third])
        said = with_agents(tmp_path / "remote", *PLAYED, servers, *limits)
        assert second.process.exitcode == -signal.SIGKILL
    assert f"{second.address}/inference/v1/generate: the connection ended" in said
    assert f"{third.address}/inference/v1/generate: no token for 10 s" in said
    assert_same(tmp_path / "remote", tmp_path / "colocated")
    assert_same_samples(tmp_path / "remote", tmp_path / "colocated")
    rows = rows_of(tmp_path / "remote")
    assert [row["servers/used"] for row in rows[:3]] == [3, 3, 2]
    assert rows[2]["servers/resent"] > 0
    assert all(row["turns/dropped"] == row["turns/retries"] == 0 for row in rows[:3])


def test_commands_go_on_ahead_of_the_trainer_without_a_server_that_dies(
    steady: ServerProcess, tmp_path: Path
):
    """The weights stay as they are, so what is generated ahead of them is the same."""
    program = tmp_path / "agent.py"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    command = ("turns.agent=null", "turns.options={}", f"turns.command=[{program}]")
    still = "optimizer.lr=1e-30"
    with_agents(tmp_path / "colocated", *PLAYED, still)
    killed = SelfSignal(signal.SIGKILL, 1)
    with ServerProcess(tmp_path / "killed.log", COMMON, sends=killed) as second:
        servers = over([steady, second])
        said = with_agents(tmp_path / "remote", *command, still, servers, "rollout.ahead=2")
        assert second.process.exitcode == -signal.SIGKILL
    assert f"{second.address}/inference/v1/generate: the connection ended" in said
    assert_same_samples(tmp_path / "remote", tmp_path / "colocated")
    for row in rows_of(tmp_path / "remote")[:3]:
        assert row["mismatch/max"] < 1e-5
        assert row["turns/dropped"] == row["turns/retries"] == 0
