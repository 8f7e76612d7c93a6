"""Random kills: `python -m tests.kills [--kills 20] [--seed 0]`.

Small runs over two engines that ``pyrl serve`` keeps running. At random moments the trainer, an
engine or both get SIGKILL, and the same command goes on, until so many kills were made and the run
ends. Every other run generates a step ahead. Then

- a trainer that is started again lost at most the step whose checkpoint it had not written;
- the metrics have every step once, and its prompts are accounted for at each;
- what was trained on are the prompts of each step, whole groups, each once, and no token is older
  than it may be;
- a run that does not generate ahead trained on the samples of a run that nobody killed, and its
  weights are equal to the last bit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from pyrl_ext.data.recordings import load_samples
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.parallel.ports import absence_at
from pyrl_ext.rollout.versions import spans_of
from pyrl_ext.samples import Sample
from tests.helpers.checkpoints import content
from tests.helpers.deadline import DEADLINE
from tests.helpers.python_path import python_path
from tests.helpers.rows import rows_of
from tests.helpers.tiny import CONFIG, QUICK

ROOT = Path(__file__).parents[1]
STEPS = 8
PROMPTS = 4
SIZE = 4
SERVERS = 2
KINDS = ("trainer", "engine", "both")
AT_START = 0.2  # share of kills that come before a trainer's first step
SMALL = (
    *(each for each in QUICK if "max_new_tokens" not in each),
    "rollout.max_new_tokens=24",
    f"steps={STEPS}",
    "evaluate.every=0",
    "rollout.record=rollouts",
    "checkpoint.every=1",
    "checkpoint.keep=1",
)
FATES = ("returned", "aborted", "failed", "in_flight")
REFUSED = "no whole checkpoint"  # killed between the first row and the first checkpoint
FEW = "servers are left, expected at least 1"  # both engines were killed


def command(module: str, folder: Path, more: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, str(CONFIG), f"run={folder}", *SMALL, *more]


def start(line: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
    with log.open("wb") as out:
        return subprocess.Popen(
            line, cwd=ROOT, env=os.environ | own, stdout=out, stderr=out, start_new_session=True
        )


class Engines:
    """Two engines on ports that the kernel chose; `keys` names them to a trainer."""

    def __init__(self, folder: Path):
        doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(SERVERS)]
        self.addresses = [f"http://127.0.0.1:{door.getsockname()[1]}" for door in doors]
        for door in doors:
            door.close()
        self.key = f"rollout.servers=[{', '.join(self.addresses)}]"
        self.log = folder / "serve.log"
        self.process = start(
            command("pyrl_ext.train.serve", folder / "serve", [self.key]), self.log
        )

    def wait(self) -> None:
        end = time.monotonic() + DEADLINE
        while any(map(absence_at, self.addresses)):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def kill_one(self, chance: random.Random) -> None:
        """Kill an engine; none is there while both are about to be started again."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        if pids := [int(pid) for pid in children.read_text().split()]:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)


@contextmanager
def engines(folder: Path) -> Iterator[Engines]:
    made = Engines(folder)
    try:
        made.wait()
        yield made
    finally:
        made.process.send_signal(signal.SIGTERM)
        made.process.wait()


class Run:
    """A run that is started again whenever its trainer was killed, or had no engine left."""

    def __init__(self, folder: Path, more: Sequence[str]):
        self.folder = folder
        self.more = more
        # rows that were there at the last start
        self.starts = 0
        self.before = 0
        self.lost = Counter[int]()  # steps that were trained again
        self._start()

    @property
    def rows(self) -> int:
        """Whole lines of the metrics."""
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{self.starts}.log")

    @property
    def ended(self) -> bool:
        """True if the last step is trained; a trainer that ended before it is started again."""
        if self.process.poll() is None:
            return False
        said = self.log.read_text()
        self._check_resumed(said)
        if self.process.returncode == 0:
            return True
        refused = self.process.returncode == 1 and REFUSED in said
        known = self.process.returncode == -signal.SIGKILL or FEW in said or refused
        assert known, f"exit code {self.process.returncode}: {said}"
        self._start(*(["resume=never"] if refused else []))
        return False

    def _start(self, *more: str) -> None:
        self.starts = self.starts + 1
        self.before = 0 if more else self.rows
        self.process = start(command("pyrl_ext.train", self.folder, [*self.more, *more]), self.log)

    def _check_resumed(self, said: str) -> None:
        """It went on from the last step that has a row, or from the one before."""
        if found := re.search(r"resuming from .*step-(\d+) ", said):
            step = int(found[1])
            assert step in (self.before - 1, self.before), (self.before, said)
            self.lost[self.before - step] += 1

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def until_next_row(self) -> bool:
        """Wait for a row; False: there will be none, the run has ended."""
        known = self.rows
        end = time.monotonic() + DEADLINE
        while not self.ended:
            if self.rows > known:
                return True
            known = min(known, self.rows)  # the last one was taken back
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return False

    def finish(self) -> None:
        while self.until_next_row():
            pass


def shaken(run: Run, apart: Engines, kills: int, chance: random.Random, pace: float) -> int:
    """Kill up to ``kills`` times until the run ends; how often."""
    for done in range(kills):
        kind = chance.choice(KINDS)
        early = chance.random() < AT_START
        if early:
            time.sleep(chance.random() * 10 * pace)
            alive = not run.ended
        else:
            alive = run.until_next_row()
            time.sleep(chance.random() * 2 * pace)
        if not alive:
            return done
        if kind != "engine":
            run.kill()
        if kind != "trainer":
            apart.kill_one(chance)
        where = "at its start" if early else f"in step {run.rows}"
        print(f"{run.folder.name}: {kind} killed, start {run.starts}, {where}", flush=True)
    run.finish()
    return kills


def samples_of(folder: Path) -> list[list[Sample]]:
    """The samples that each step was trained on."""
    files = sorted((folder / "rollouts").glob("step-*.safetensors"))
    return [load_samples(file) for file in files]


def check(run: Run, whole: Path, ahead: int) -> None:
    """It trained on its steps' samples, each once; with ``ahead`` 0 on those of ``whole``, to the
    same weights."""
    rows = rows_of(run.folder)
    assert [row["step"] for row in rows] == [*range(STEPS)]
    for row in rows:
        assert row["servers/prompts_asked"] == sum(row[f"servers/prompts_{f}"] for f in FATES), row
        assert row.get("age/max", 0) <= ahead
    steps = samples_of(run.folder)
    expected = samples_of(whole)
    assert len(steps) == len(expected) == STEPS
    for step, (found, wanted) in enumerate(zip(steps, expected, strict=True)):
        keys = [(s.prompt_id, s.index) for s in found]
        assert len({*keys}) == PROMPTS * SIZE and keys == [(s.prompt_id, s.index) for s in wanted]
        versions = {version for s in found for *_, version in spans_of(s)}
        assert versions <= {*range(step - ahead, step + 1)}, (step, versions)
        if not ahead:
            same = [torch.equal(a.tokens, b.tokens) for a, b in zip(found, wanted, strict=True)]
            assert all(same), (step, same)
    if not ahead:
        weights, others = (content(f / f"checkpoints/step-{STEPS}") for f in (run.folder, whole))
        assert weights.keys() == others.keys()
        for name, value in weights.items():  # a tensor, or the optimizer's of several
            torch.testing.assert_close(value, others[name], rtol=0, atol=0, msg=name)
        print(
            f"{run.folder.name}: all {len(weights)} entries of the checkpoint are equal", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    done = 0
    number = 0
    starts = 0
    lost = Counter[int]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with engines(folder) as apart:
            with Run(folder / "whole", [apart.key]) as whole:
                whole.finish()
            assert whole.starts == 1, "nobody killed it"
            rows = read_rows(whole.folder / "metrics.jsonl")
            pace = sum(row["time/step"] for row in rows) / len(rows)
            while done < options.kills:
                ahead = number % 2
                more = [apart.key, *([f"rollout.ahead={ahead}"] if ahead else [])]
                with Run(folder / f"run-{number}-ahead-{ahead}", more) as run:
                    done += shaken(run, apart, options.kills - done, chance, pace)
                check(run, whole.folder, ahead)
                number = number + 1
                starts = starts + run.starts
                lost = lost + run.lost
    print(
        f"{done} kills in {number} runs of {STEPS} steps: {starts} starts, {lost[0]} went on where "
        f"they were, {lost[1]} trained a step again; all samples are trained once"
    )


if __name__ == "__main__":
    main()
