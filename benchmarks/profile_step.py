"""The time of one training step by part: `python -m benchmarks.profile_step [overrides]`.

The phases are measured by the wall clock of a step without a profiler. Inside the trainer's passes,
what this package computes is told apart from the model by a second step under torch's profiler:
its shares are applied to the wall time of that phase.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.configs import TINY
from benchmarks.tables import show
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.trainer.step import RolloutStep

OURS = {
    "pyrl: pack": "packing: index map and gathers",
    "pyrl: routes": "routes of this rank's rows and layers",
    "pyrl: replay": "replay in the routers, agreement counts",
    "pyrl: logprob": "LM head with log-prob and entropy, forward",
    "_LinearLogprobBackward": "LM head with log-prob and entropy, backward",
    "pyrl: loss": "loss",
}
WARM_STEPS = 3


def roll_out(step: RolloutStep, number: int, clock: Clock) -> tuple[BatchShard, BatchIndex]:
    """Publish the weights, generate the samples of a step, and make rows of them."""
    step.sync_weights(number, clock)
    rollout = step.take(number, clock)
    return step.batch_of(rollout, clock), rollout.index


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
    plan = compile_plan(TINY, [*sys.argv[1:], f"run={tempfile.gettempdir()}/profile"])
    rows: list[tuple[str, str, float]] = []
    with topology.start(plan) as topo:
        step = RolloutStep.build(plan, topo)
        clock = Clock()
        for number in range(WARM_STEPS):
            step.update(step.score(*roll_out(step, number, clock), clock)[0], clock)
        clock.take()
        batch = roll_out(step, WARM_STEPS, clock)
        scored, _ = step.score(*batch, clock)
        step.update(scored, clock)
        times = clock.take()
        for phase, run in (
            ("old_logprobs", lambda: step.score(*batch, Clock())),
            ("update", lambda: step.update(scored, Clock())),
        ):
            wall = times.get(f"time/{phase}")
            if wall is None:  # a step with one update has no pass for old log-probs
                continue
            spent, whole = ours_share(run)
            for label, name in OURS.items():
                if spent[label]:
                    rows.append((phase, name, wall * spent[label] / whole))
            rest = wall * (1 - sum(spent.values()) / whole)
            rows.append((phase, "megatron: model, schedule, optimizer", rest))
    show_parts(rows, times, plan)


def show_parts(rows: list[tuple[str, str, float]], times: dict[str, float], plan: Plan) -> None:
    others = [
        ("publish", "weights to the engine", times["time/publish"]),
        ("rollout", "transformers: model, sampling", times["time/rollout"]),
        ("exchange", "samples to rows, checks", times["time/exchange"]),
    ]
    everything = [*others, *rows]
    total = sum(seconds for *_, seconds in everything)
    sums = {"ours": 0.0, "model": 0.0}
    cells: list[tuple[str, ...]] = []
    for phase, part, seconds in everything:
        whose = "model" if part.startswith(("megatron", "transformers")) else "ours"
        sums[whose] += seconds
        cells.append((phase, part, whose, f"{1e3 * seconds:.2f}", f"{seconds / total:.1%}"))
    cells.append(())
    for whose, seconds in sums.items():
        cells.append(("all", "", whose, f"{1e3 * seconds:.2f}", f"{seconds / total:.1%}"))
    title = f"One step of {Path(plan.source).name}"
    show(("phase", "part", "whose", "ms", "share"), cells, words=3, title=title)
    replay = sum(s for _, part, s in rows if part in (OURS["pyrl: routes"], OURS["pyrl: replay"]))
    print(f"routing replay: {1e3 * replay:.2f} ms, {replay / total:.2%} of the step")


if __name__ == "__main__":
    main()
