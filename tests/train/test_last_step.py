"""A run that fails keeps its last finished step, and the same command goes on from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from pyrl_ext import train
from pyrl_ext.loss.objective import policy_loss
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.parallel import topology
from pyrl_ext.train.folder import RunFolder
from pyrl_ext.train.last_step import LastStep
from pyrl_ext.train.loop import build_step
from tests.helpers.checkpoints import content
from tests.helpers.deadline import DEADLINE
from tests.helpers.python_path import python_path
from tests.helpers.rows import numbers
from tests.helpers.small_disk import fill, mounted_at, small_disk
from tests.helpers.tiny import CONFIG, QUICK, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
STEPS = 4
FAILS = 2  # the step in which something fails, once
COMMON = (
    *QUICK,
    f"steps={STEPS}",
    "checkpoint.every=0",
    "evaluate.every=0",
    "data.task=null",
    "data.task_options={}",
    "data.prompts=data/arithmetic.jsonl",
    f"data.reward={__name__}:flaky_reward",
)
CALM_REWARD = "data.reward=pyrl_ext.data.rewards:number_match"
KEPT = "the weights after step {} are kept: the same command resumes from {}/checkpoints/step-{}\n"


calls = 0  # of `scarce_reward`, in this process


def fails_now() -> bool:
    """True for one call of all processes, in the step that fails."""
    folder = Path(os.environ["FAILS_IN"])
    if len(read_rows(folder / "metrics.jsonl")) != int(os.environ["FAILS_AT"]):
        return False
    try:
        (folder / os.environ.get("FAILS_MARK", "failed")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def flaky_reward(prompt: object, text: str, tokens: list[int]) -> float:
    """The share of digits; one call fails."""
    if fails_now():
        raise KeyError("colour")
    return sum(letter.isdigit() for letter in text) / (1 + len(text))


def scarce_reward(prompt: object, text: str, tokens: list[int]) -> float:
    """One call in four fails, and from the failing step on all of them."""
    global calls
    calls += 1
    step = len(read_rows(Path(os.environ["FAILS_IN"]) / "metrics.jsonl"))
    if calls % 4 == 0 or step >= int(os.environ["FAILS_AT"]):
        raise KeyError("colour")
    return float(calls % 3)


def flaky_loss(logprobs, entropy, inputs, config):
    """The usual loss; one call fails."""
    if fails_now():
        raise ValueError("bad luck")
    return policy_loss(logprobs, entropy, inputs, config.model_copy(update={"loss": "ppo"}))


def flaky_advantage(rewards, groups):
    """The rewards; in one call, which is before the update, they are not finite."""
    return rewards * float("nan") if fails_now() else rewards


def arguments(folder: Path, *overrides: str) -> list[str]:
    named = {each.split("=")[0] for each in overrides}
    common = [each for each in COMMON if each.split("=")[0] not in named]
    return [str(CONFIG), f"run={folder}", *common, *overrides]


class Command:
    """The training command as its own process, or as two."""

    def __init__(self, folder: Path, *overrides: str, ranks: int = 1, at: int = FAILS):
        self.folder = folder
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launch = torchrun if ranks > 1 else []
        command = ["-m", "pyrl_ext.train", *arguments(folder, f"parallel.dp={ranks}", *overrides)]
        self.line = [sys.executable, *launch, *command]
        more = {"FAILS_IN": str(folder), "FAILS_AT": str(at), "PYTHONPATH": python_path(ROOT)}
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"} | more

    def run(self) -> tuple[int, str]:
        """Exit code, and stderr."""
        done = subprocess.run(
            self.line,
            cwd=ROOT,
            env=self.environment,
            timeout=DEADLINE,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("checkpoints/*"))


def assert_same(one: Path, other: Path) -> None:
    """Both runs have the same metrics, and the same weights to the last bit."""
    assert numbers(one) == numbers(other)
    ours = content(one / f"checkpoints/step-{STEPS}")
    theirs = content(other / f"checkpoints/step-{STEPS}")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():  # a tensor, or the optimizer's of several
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_goes_on_from_the_step_in_which_a_reward_failed(tmp_path: Path, ranks: int):
    whole = Command(tmp_path / "whole", ranks=ranks, at=STEPS)  # no step fails
    code, error = whole.run()
    assert code == 0, error

    failed = Command(tmp_path / "failed", ranks=ranks)
    code, error = failed.run()
    assert code == 1, error
    raised = r"raised KeyError: 'colour' \(.*/test_last_step\.py:\d+\), expected a number\n"
    assert len(re.findall(raised, error)) == 1, error
    assert KEPT.format(FAILS, failed.folder, FAILS) in error
    assert failed.checkpoints == [f"step-{FAILS}"]
    assert "flaky_reward" in (failed.folder / "error.txt").read_text()

    code, error = failed.run()  # the reward is fixed
    assert code == 0, error
    assert_same(failed.folder, whole.folder)


def test_train_goes_on_without_some_responses_and_stops_without_many(tmp_path: Path):
    reward = f"data.reward={__name__}:scarce_reward"
    options = (reward, "data.reward_min_share=0.75")
    short = Command(tmp_path / "run", *options, ranks=2)
    code, error = short.run()
    assert code == 1, error
    rows = read_rows(short.folder / "metrics.jsonl")
    samples = tiny_plan(*COMMON).samples
    dropped = [(row["scoring/dropped"], row["scoring/dropped/error"]) for row in rows]
    assert dropped == [(samples / 4, samples / 4)] * FAILS
    assert all(row["scoring/calls_per_second"] > 0 for row in rows)
    named = r"scarce_reward\(prompt .*\): raised KeyError: 'colour' \(.*; the response is dropped\n"
    assert len(re.findall(named, error)) == 2, error  # a rank each
    few = f"0 of {samples} responses have a reward, expected at least data.reward_min_share 0.75"
    assert few in error and KEPT.format(FAILS, short.folder, FAILS) in error
    assert short.checkpoints == [f"step-{FAILS}"]
    short.environment["FAILS_AT"] = str(STEPS)  # the reward is fixed
    code, error = short.run()
    assert code == 0, error
    assert len(read_rows(short.folder / "metrics.jsonl")) == STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_keeps_no_step_whose_update_failed(tmp_path: Path, ranks: int):
    loss = f"objective.loss={__name__}:flaky_loss"
    failed = Command(tmp_path / "run", loss, CALM_REWARD, ranks=ranks)
    code, error = failed.run()
    assert code == 1, error
    assert "bad luck" in error
    reason = "the failed update may have changed some of the weights" if ranks == 1 else ""
    assert f"no checkpoint of step {FAILS} could be written: {reason}" in error
    assert "there is no checkpoint: with resume=never the same command starts over" in error
    assert failed.checkpoints == []
    code, error = failed.run()
    assert code == 1
    assert f"holds metrics of {FAILS} steps but no whole checkpoint to resume from; add" in error


def run(folder: Path, *overrides: str) -> int:
    """Exit code of the command in this process."""
    return train.main(arguments(folder, *overrides))


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in which something fails once, in step `FAILS`."""
    monkeypatch.setenv("FAILS_IN", str(tmp_path / "run"))
    monkeypatch.setenv("FAILS_AT", str(FAILS))
    return tmp_path / "run"


def test_train_keeps_a_step_whose_batch_was_wrong(
    failing: Path, capsys: pytest.CaptureFixture[str]
):
    options = (CALM_REWARD, f"objective.advantage={__name__}:flaky_advantage")
    assert run(failing, *options) == 1
    error = capsys.readouterr().err
    assert "the advantage function returned nan" in error
    assert KEPT.format(FAILS, failing, FAILS) in error
    assert run(failing, *options) == 0


def test_train_writes_no_checkpoint_twice(
    failing: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run(failing, "checkpoint.every=1") == 1
    assert KEPT.format(FAILS, failing, FAILS) in capsys.readouterr().err
    folder = failing / f"checkpoints/step-{FAILS}"
    written = (folder / "counters.json").stat()
    # it fails again; a worker of the first run may still make its calls, and its mark
    monkeypatch.setenv("FAILS_MARK", "failed again")
    assert run(failing, "checkpoint.every=1") == 1
    assert KEPT.format(FAILS, failing, FAILS) in capsys.readouterr().err
    again = (folder / "counters.json").stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_train_starts_again_where_no_step_is_finished(
    failing: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAILS_AT", "0")
    assert run(failing) == 1
    start = "no step is finished: the same command starts from the beginning\n"
    assert start in capsys.readouterr().err
    assert not (failing / "checkpoints").exists()
    assert run(failing, "steps=1", "optimizer.lr=0.5") == 0  # any plan may start here


def test_train_keeps_the_step_whose_metrics_have_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The metrics are on a full disk, the checkpoints are not."""
    monkeypatch.setenv("FAILS_IN", str(tmp_path / "run"))
    monkeypatch.setenv("FAILS_AT", str(STEPS))
    (tmp_path / "run").mkdir()
    with small_disk(tmp_path / "disk") as disk:
        (disk / "metrics.jsonl").touch()
        with mounted_at(disk / "metrics.jsonl", tmp_path / "run/metrics.jsonl"):
            fill(disk)
            assert run(tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert "metrics.jsonl: step 0 cannot be written (No space left on device)" in error
    assert KEPT.format(1, tmp_path / "run", 1) in error


def test_kept_writes_no_weights_that_are_not_finite(tmp_path: Path):
    plan = tiny_plan(*QUICK, f"run={tmp_path}")
    with topology.start(plan) as topo, closing(build_step(plan, topo)) as step:
        policy = step.policy
        policy.step = 1
        with torch.no_grad():
            next(iter(policy.llm.weights().values())).fill_(float("nan"))
        last = LastStep(RunFolder(plan, topo), step)
        with pytest.raises(ValueError, match="bad luck") as raised, last.kept():
            raise ValueError("bad luck")
    (note,) = raised.value.__notes__
    assert "no checkpoint of step 1 could be written: FloatingPointError: " in note
    assert "is not finite; no step is finished: the same command starts from the" in note
    assert not (tmp_path / "checkpoints").exists()
