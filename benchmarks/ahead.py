"""``python -m benchmarks.ahead [--json FILE]``: what training while engines generate saves.

Two servers of the embedded engine, started with ``pyrl_ext.train.serve``, and a trainer share this
machine's cores. An environment that answers each turn after 50 ms stands for engines on other
hardware: generation is mostly waiting. The same steps are run with rollout.ahead 0, 1 and 2. With 0
the trainer waits for the rollouts and the engines for the trainer, so its parts are the times that
each takes alone. The bar is 80 % of the longer one. A step can also be shorter than that: engines
that wait for one step's environments work for the next step's.

The JSON is what ``python -m benchmarks.ahead_forecast`` reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from pyrl_ext.data.environment import StepResult
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.rollout.recorded_file import load_samples
from pyrl_ext.samples import Prompt, Sample
from pyrl_ext.train.serve import healthy

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "tiny_turns.yaml"
BAR = 0.8
# more keep two cores busy alone
SERVERS = 2
LATENCY = 0.05
TURNS = 24
PROMPTS = 2
SIZE = 4
MICROBATCH = 64  # tokens
WARM = 3  # steps that are not counted: kernels, caches and, with ahead, the first rollouts
PATIENCE = 120.0  # for servers to start [s]


class Slow:
    """Answers each turn after ``latency`` seconds, ``guesses`` times; a high token earns a reward.

    The options are those of the built-in environment that the config names, and the latency.
    """

    def __init__(self, guesses: int, higher: str, lower: str, latency: float):
        self.left = guesses
        self.answers = (higher, lower)
        self.latency = latency

    def start(self, prompt: Prompt) -> None:
        """The prompt is the first context."""

    async def step(self, tokens: list[int], text: str) -> StepResult:
        """Answer with one token."""
        await asyncio.sleep(self.latency)
        self.left -= 1
        high = tokens[0] >= 64
        return StepResult(self.answers[high], float(high), self.left == 0)


def overrides(options: argparse.Namespace) -> list[str]:
    """Keys of the run, but for its folder, servers and ahead; those of the command line win."""
    turns = options.turns
    given = {key.partition("=")[0] for key in options.keys}
    keys = [
        f"batching.prompts={PROMPTS}",
        f"batching.samples_per_prompt={SIZE}",
        "threads=1",
        f"batching.tokens_per_microbatch={MICROBATCH}",
        "turns.environment=benchmarks.ahead:Slow",
        "turns.form=concatenated",
        f"turns.options.guesses={turns}",
        f"turns.options.latency={options.latency}",
        f"turns.max_turns={turns}",
        f"turns.max_tokens={2 * turns + 8}",
        f"steps={options.steps}",
        "evaluate.every=0",
        "checkpoint.every=0",
        "log.progress=false",
        "rollout.max_num_seqs=128",
        "rollout.record=rollouts",
    ]
    return [key for key in keys if key.partition("=")[0] not in given] + options.keys


@contextmanager
def served(folder: Path, keys: Sequence[str], config: Path = CONFIG) -> Iterator[str]:
    """Servers, until the end; the override that names them."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(SERVERS)]
    addresses = [f"http://localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    named = f"rollout.servers=[{', '.join(addresses)}]"
    command = [sys.executable, "-m", "pyrl_ext.train.serve", str(config), *keys, named]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"run={folder / 'serve'}"], cwd=ROOT, stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + PATIENCE
        while not all(map(healthy, addresses)):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"benchmarks.ahead: {(folder / 'serve.log').read_text()}")
            time.sleep(0.2)
        yield named
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def train_in(folder: Path, *keys: str, config: Path = CONFIG) -> None:
    """Run the trainer in another process. Raises: RuntimeError with what it said."""
    command = [sys.executable, "-m", "pyrl_ext.train", str(config), *keys, f"run={folder}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"benchmarks.ahead: {run.stdout}{run.stderr}")


def trained(folder: Path, *keys: str) -> list[dict[str, Any]]:
    """The rows of a run without its first steps, and the last ones, whose engines idle."""
    train_in(folder, *keys)
    return read_rows(folder / "metrics.jsonl")[WARM:-2]


def parts_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds of a step and of its parts."""
    mean = {
        name: statistics.mean(row.get(name, 0.0) for row in rows)
        for name in (
            "time/step",
            "time/rollout",
            "time/publish",
            "time/old_logprobs",
            "age/mean",
            "publish/seconds",
            "servers/seconds",
        )
    }
    seconds = mean["time/step"]
    wait = mean["time/rollout"]
    gather = mean["time/publish"]
    return dict(
        seconds=seconds,
        wait=wait,
        gather=gather,
        publish=mean["publish/seconds"],
        train=seconds - wait - gather,
        beside=mean["time/old_logprobs"],
        request=mean["servers/seconds"],
        age=mean["age/mean"],
    )


def turns_of(sample: Sample) -> tuple[int, list[int]]:
    """Tokens of its prompt, and those of every turn: runs of loss tokens."""
    runs = groupby(sample.loss_mask.tolist())
    return sample.prompt_len, [len([*run]) for is_turn, run in runs if is_turn]


def groups_in(file: Path) -> list[list[tuple[int, list[int]]]]:
    """The trajectories of a step's groups."""
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for sample in load_samples(file):
        found.setdefault(sample.prompt_id, []).append(turns_of(sample))
    return [*found.values()]


def measure(options: argparse.Namespace, folder: Path) -> tuple[Plan, list[dict[str, Any]], Any]:
    """The plan, mean parts of a step for each value of ahead, and the groups of a step.

    Rounds take turns, so that a busy time of the machine meets every value; the round of the
    middle step time counts.
    """
    keys = overrides(options)
    rounds = dict[int, list[dict[str, float]]]()
    with served(folder, keys) as servers:
        plan = compile_plan(CONFIG, [*keys, servers])
        for number in range(options.rounds):
            for ahead in options.ahead:
                run = folder / f"{number}-{ahead}"
                rows = trained(run, *keys, servers, f"rollout.ahead={ahead}")
                rounds.setdefault(ahead, []).append(parts_of(rows))
    groups = groups_in(folder / f"0-0/rollouts/step-{WARM:06d}.safetensors")
    steps = [
        {"ahead": ahead} | sorted(each, key=lambda parts: parts["seconds"])[(len(each) - 1) // 2]
        for ahead, each in rounds.items()
    ]
    return plan, steps, groups


def show(steps: Sequence[dict[str, Any]]) -> bool:
    """Print the table; whether every value of ahead reaches the bar."""
    generate = steps[0]["wait"]
    train = steps[0]["train"]
    bound = max(generate, train)
    print(f"alone: generate {generate:.3f} s, train {train:.3f} s; bound {bound:.3f} s a step")
    print("ahead  step [s]  waited  publish  of it alone  train  of the bound  mean age  against 0")
    for each in steps:
        print(
            f"{each['ahead']:5d}  {each['seconds']:8.3f}  {each['wait']:6.3f}  "
            f"{each['publish']:7.3f}  {each['gather']:11.3f}  {each['train']:5.3f}  "
            f"{bound / each['seconds']:12.0%}  "
            f"{each['age']:8.2f}  {steps[0]['seconds'] / each['seconds']:8.2f}x"
        )
    reached = all(bound / each["seconds"] >= BAR for each in steps[1:])
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"bar {BAR:.0%}: {'reached' if reached else 'MISSED'}; load of the machine {load}")
    return reached


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, also where the bar is missed: it is printed, other machines are slower."""
    parser = argparse.ArgumentParser("benchmarks.ahead", description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2], help="the first is 0")
    parser.add_argument("--turns", type=int, default=TURNS, help="of a trajectory")
    parser.add_argument("--latency", type=float, default=LATENCY, help="of a turn [s]")
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("keys", nargs="*", help="further keys of the runs, section.key=value")
    options = parser.parse_args(arguments)
    if options.ahead[0] or options.steps < WARM + 3:
        parser.error(f"expected --ahead that begins with 0, and --steps of at least {WARM + 3}")
    with tempfile.TemporaryDirectory() as folder:
        plan, steps, groups = measure(options, Path(folder))
    show(steps)
    if options.json is not None:
        report = {
            "engines": SERVERS,
            "slots": plan.rollout.max_num_seqs,
            "latency": options.latency,
            "pause": plan.rollout.pause,
            "keep": plan.batching.prompts,
            "groups": groups,
            "steps": steps,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
