"""A rank that is killed, hangs or fails under torchrun: the others end, name it, and leave a run
that the same command resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pyrl_ext.loss.objective import policy_loss
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.parallel import heartbeat
from tests.helpers import hosts
from tests.helpers.deadline import DEADLINE
from tests.helpers.python_path import python_path
from tests.helpers.tiny import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
QUICK = (
    "batching.prompts=4",
    "batching.samples_per_prompt=4",
    "rollout.max_new_tokens=6",
    "log.progress=false",
    "evaluate.every=0",
    "checkpoint.every=1",
    "parallel.dp=2",
)
# the steps in which rank 1 does not get through its update
KILLED = 1
STOPPED = 2
FAILED = 3


def faulty_loss(logprobs, entropy, inputs, config):
    """The usual loss, with one fault of rank 1 in each of three steps."""
    folder = Path(os.environ["FAULTS_OF"])
    step = len(read_rows(folder / "metrics.jsonl"))
    seen = folder / f"fault-{step}"
    if dist.get_rank() == 1 and step in (KILLED, STOPPED, FAILED) and not seen.exists():
        seen.write_text(str(os.getpid()))
        if step == FAILED:
            raise ValueError("bad luck")
        time.sleep(3)  # three heartbeats tell of the phase
        os.kill(os.getpid(), signal.SIGKILL if step == KILLED else signal.SIGSTOP)
    return policy_loss(logprobs, entropy, inputs, config.model_copy(update={"loss": "ppo"}))


def usual_loss(logprobs, entropy, inputs, config):
    """The usual loss, of a run whose rank 1 is stopped once all steps are done."""
    if dist.destroy_process_group is destroy and dist.get_rank() == 1:
        dist.destroy_process_group = stopped_before
    heartbeat.SILENT = 4
    return policy_loss(logprobs, entropy, inputs, config.model_copy(update={"loss": "ppo"}))


destroy = dist.destroy_process_group


def stopped_before(*groups) -> None:
    (Path(os.environ["FAULTS_OF"]) / "fault-at-exit").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    destroy(*groups)


class Launch:
    """The command on two ranks, with its output in a file."""

    def __init__(self, folder: Path, log: Path, loss: str = "faulty_loss", steps: int = 6):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        train = ["--nproc-per-node", "2", "-m", "pyrl_ext.train", str(CONFIG), f"run={folder}"]
        more = {"OMP_NUM_THREADS": "1", "FAULTS_OF": str(folder), "PYTHONPATH": python_path(ROOT)}
        self.folder = folder
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *torchrun,
                    *train,
                    *QUICK,
                    f"steps={steps}",
                    f"objective.loss=tests.parallel.test_faults:{loss}",
                ],
                cwd=ROOT,
                env=os.environ | more,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def fault(self, step: int | str) -> int:
        """Wait for the fault in ``step``; the process that it happened to."""
        seen = self.folder / f"fault-{step}"
        self.wait(lambda: (seen.exists() and seen.read_text()) or self.process.poll() is not None)
        assert seen.exists(), self.log.read_text()
        return int(seen.read_text())

    def error(self) -> str:
        """Wait for the message of rank 0."""
        self.wait(lambda: "\n  rank 0 ended in " in self.log.read_text())
        return self.log.read_text()

    def ended(self) -> int:
        self.wait(lambda: self.process.poll() is not None)
        return self.process.returncode

    def wait(self, done) -> None:
        deadline = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)


def whole_lines(folder: Path) -> list[float]:
    """The steps of the metrics; every line is a row."""
    lines = (folder / "metrics.jsonl").read_text()
    assert lines.endswith("\n")
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


def test_train_names_a_lost_rank_and_the_same_command_resumes(tmp_path):
    run = tmp_path / "run"

    killed = Launch(run, tmp_path / "killed.log")
    process = killed.fault(KILLED)
    text = killed.error()
    assert f"pid {process}), last heard in update of step {KILLED}\n" in text
    assert f"  rank 0 ended in update of step {KILLED}: RuntimeError: " in text
    assert killed.ended() == 1 and whole_lines(run) == [0]

    stopped = Launch(run, tmp_path / "stopped.log")
    process = stopped.fault(STOPPED)
    try:
        text = stopped.error()
        assert "resuming from" in text and "step-1 (step 1 of 6)" in text
        assert "no heartbeat for 20 s from rank 1 (" in text
        assert f"pid {process}), last heard in update of step {STOPPED}\n" in text
    finally:
        os.kill(process, signal.SIGKILL)  # torchrun would give it another half minute
    assert stopped.ended() == 1 and whole_lines(run) == [0, 1]

    failed = Launch(run, tmp_path / "failed.log")
    process = failed.fault(FAILED)
    text = failed.error()
    assert f"pid {process}) failed in update of step {FAILED}: ValueError: bad luck\n" in text
    assert failed.ended() == 1 and whole_lines(run) == [0, 1, 2]
    assert "bad luck" in (run / "error.txt").read_text()  # not overwritten by rank 0

    again = Launch(run, tmp_path / "again.log")
    assert again.ended() == 0, again.log.read_text()
    assert whole_lines(run) == [0, 1, 2, 3, 4, 5]


def test_train_ends_when_a_rank_is_stopped_after_the_last_step(tmp_path):
    """torchrun waits for every process without a limit, and kills those that SIGTERM does not end
    after half a minute."""
    stopped = Launch(tmp_path / "run", tmp_path / "log", "usual_loss", 1)
    process = stopped.fault("at-exit")
    try:
        stopped.wait(lambda: "error: no heartbeat" in stopped.log.read_text())
        text = stopped.log.read_text()
        assert "no heartbeat for 4 s from rank 1 (" in text
        assert f"pid {process}), last heard in step 0. All ranks had finished the run" in text
        assert stopped.process.poll() is None
    finally:
        os.kill(process, signal.SIGKILL)
    assert stopped.ended() == 1 and whole_lines(tmp_path / "run") == [0]
    assert (tmp_path / "run" / "checkpoints" / "step-1").is_dir()


def test_train_on_two_hosts():
    """The same numbers as on one host; what happens when the cable is pulled: see the script."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.two_hosts"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    assert f"pyrl-{process.pid}-" not in os.listdir("/var/run/netns"), output
