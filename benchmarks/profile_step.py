"""Where the time of one training step goes: `python -m benchmarks.profile_step [overrides]`.

The phases are measured by the wall clock of a step without a profiler. Inside the trainer's passes,
what this package computes is told apart from the model by a second step under torch's profiler:
its shares are applied to the wall time of that phase.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from pyrl_ext.data.source import build_source
from pyrl_ext.dist import topology
from pyrl_ext.dist.clock import Clock
from pyrl_ext.dist.topology import Topology
from pyrl_ext.loss.registry import build_advantage, build_loss
from pyrl_ext.pack.batch import Batch
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.train import Rollouts, schedule
from pyrl_ext.trainer.policy import Policy

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
OURS = {
    "pyrl: pack": "packing: index map and gathers",
    "pyrl: routes": "routes of this rank's rows and layers",
    "pyrl: replay": "replay in the routers, agreement counts",
    "pyrl: logprob": "LM head with log-prob and entropy, forward",
    "_LinearLogprobBackward": "LM head with log-prob and entropy, backward",
    "pyrl: loss": "loss",
}
WARM_STEPS = 3


class Step:
    """One step of the loop in pieces that can be timed."""

    def __init__(self, plan: Plan, topo: Topology):
        self.plan, self.topo, self.number = plan, topo, 0
        self.rollouts = Rollouts(plan, topo, build_source(plan))
        self.policy = Policy.build(plan, topo)
        self.advantage, self.loss = build_advantage(plan.objective), build_loss(plan.objective)

    def roll_out(self, clock: Clock) -> Batch:
        with clock("publish"):
            self.rollouts.engine.load_weights(self.policy.weights(), version=self.number)
        with clock("rollout"):
            samples = self.rollouts.train(self.number)
        with clock("batch"):
            batch = Batch.of(samples, self.advantage)
        self.number += 1
        return batch

    def old(self, batch: Batch) -> Batch:
        scores = self.policy.scores(batch, schedule(self.plan, batch), self.plan.replay.old)
        return batch.with_(old_logprobs=scores.logprobs)

    def update(self, batch: Batch) -> None:
        self.policy.update(batch, schedule(self.plan, batch), self.loss)


def ours_share(run: Any) -> tuple[dict[str, float], float]:
    """Microseconds of each of `OURS` while ``run()`` runs, and of all of it, under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    spent = dict.fromkeys(OURS, 0.0)
    for event in trace.key_averages():
        for label in OURS:
            if event.key == label or event.key.startswith(
                f"autograd::engine::evaluate_function: {label}"
            ):
                spent[label] += event.cpu_time_total
    events = trace.events()
    assert events
    begin = min(e.time_range.start for e in events)
    return spent, max(e.time_range.end for e in events) - begin


def main() -> None:
    plan = compile_plan(CONFIG, [*sys.argv[1:], f"run={tempfile.gettempdir()}/profile"])
    rows: list[tuple[str, str, float]] = []
    with topology.start(plan) as topo:
        step, clock = Step(plan, topo), Clock()
        for _ in range(WARM_STEPS):
            step.update(step.old(step.roll_out(clock)))
        clock.take()
        batch = step.roll_out(clock)
        for phase, run in (("old log-probs", step.old), ("update", step.update)):
            ready = batch if phase == "old log-probs" else step.old(batch)
            with clock(phase):
                run(ready)
            spent, whole = ours_share(lambda run=run, ready=ready: run(ready))
            wall = clock.seconds[phase]
            for label, name in OURS.items():
                if spent[label]:
                    rows.append((phase, name, wall * spent[label] / whole))
            rest = wall * (1 - sum(spent.values()) / whole)
            rows.append((phase, "megatron: model, schedule, optimizer", rest))
        times = clock.take()
    show(rows, times, plan)


def show(rows: list[tuple[str, str, float]], times: dict[str, float], plan: Plan) -> None:
    table = Table(
        "phase", "part", "whose", "ms", "share", title=f"One step of {Path(plan.source).name}"
    )
    others = [
        ("publish", "weights to the engine", times["publish"]),
        ("rollout", "transformers: model, sampling", times["rollout"]),
        ("batch", "samples to rows, checks", times["batch"]),
    ]
    everything = [*others, *rows]
    total = sum(seconds for *_, seconds in everything)
    sums = {"ours": 0.0, "model": 0.0}
    for phase, part, seconds in everything:
        whose = "model" if part.startswith(("megatron", "transformers")) else "ours"
        sums[whose] += seconds
        table.add_row(phase, part, whose, f"{1e3 * seconds:.2f}", f"{seconds / total:.1%}")
    table.add_section()
    for whose, seconds in sums.items():
        table.add_row("all", "", whose, f"{1e3 * seconds:.2f}", f"{seconds / total:.1%}")
    replay = sum(s for _, part, s in rows if part in (OURS["pyrl: routes"], OURS["pyrl: replay"]))
    Console().print(table)
    Console().print(f"routing replay: {1e3 * replay:.2f} ms, {replay / total:.2%} of the step")


if __name__ == "__main__":
    main()
