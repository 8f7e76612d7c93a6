"""Dynamic context parallelism at scale, by the forecast's cost model: no GPU runs.

`python -m benchmarks.run dynamic_cp --simulate` takes configs/qwen3_30b.yaml (32 GPUs, samples of
up to 49152 tokens, 3072 tokens on a rank, groups of up to 16 ranks) and prices the passes of an
update three ways: one sample at a time on a fixed group of 16, padded to the longest of its batch;
whole samples packed into fixed groups of 16; and the planner's groups.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pyrl_ext.pack.native_search import search
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.cp_groups import cp_groups
from pyrl_ext.plan.forecast.workload import step_samples
from pyrl_ext.schedule.cp_problem import CpSize, Problem
from pyrl_ext.schedule.packing import pack_samples

CONFIG = Path(__file__).parents[1] / "configs" / "qwen3_30b.yaml"
LONGEST = 49152
BATCH = 256
SEEDS = 10
ASSUMED = (
    "times are of forward and backward passes on one pipeline stage of tp 1, with expert "
    "parallelism 8 and full recomputation; the optimizer, the reduction of gradients and the "
    "rollout are left out",
    "work is counted exactly, at the shares of the data sheet's rates that `pyrl plan` assumes "
    "(compute_time.REACHED); attention of short parts is assumed as efficient as of long ones, "
    "which favours the fixed groups",
    "keys and values are gathered before attention and nothing overlaps; a group within a node "
    "uses its links, a larger one the network",
    "a microbatch takes as long as its slowest group, since experts are shared by all ranks",
    f"{BATCH} samples a minibatch; mean over {SEEDS} minibatches",
)


class Simulated(NamedTuple):
    """Seconds of a minibatch three ways, and the CP size of a token in the mean."""

    padded: float
    packed: float
    dynamic: float
    cp: float


def lognormal(median: float, sigma: float) -> Callable[[random.Random], list[int]]:
    """Draws the lengths of a minibatch."""

    def draw(of: random.Random) -> list[int]:
        drawn = (of.lognormvariate(math.log(median), sigma) for _ in range(BATCH))
        return [min(LONGEST, max(64, int(n))) for n in drawn]

    return draw


def of_plan(plan: Plan) -> Callable[[random.Random], list[int]]:
    """Draws from the samples that the config estimates."""
    rows = [sample.rows for sample in step_samples(plan)]
    return lambda of: of.sample(rows, BATCH)


def simulate(problem: Problem, size: int = 16) -> Simulated:
    """Price one minibatch; `size` ranks are the fixed group."""
    fixed = next(s for s in problem.sizes if s.size == size)
    groups = problem.num_ranks // size
    loads = [-(-n // fixed.unit) * fixed.unit for n in problem.lengths]
    alone = -(-len(loads) // groups)  # microbatches of one sample a group
    padded = alone * (problem.launch + _seconds(fixed, [max(loads)]))
    table = pack_samples(loads, groups, fixed.limit)
    packed = sum(
        problem.launch + max(_seconds(fixed, [loads[i] for i in ids]) for ids in bins)
        for bins in zip(*table, strict=True)
    )
    found = search(problem)
    tokens = sum(
        group.cp_size * problem.lengths[i]
        for placed in found.microbatches
        for group in placed
        for i in group.samples
    )
    return Simulated(padded, packed, found.makespan, tokens / sum(problem.lengths))


def _seconds(size: CpSize, rows: Sequence[int]) -> float:
    return size.fixed + size.token * sum(rows) + size.square * sum(n * n for n in rows)


def main() -> None:
    """Print the table and its assumptions."""
    print(
        "| GPU | lengths | padded CP16 [s] | packed CP16 [s] | dynamic [s] | CP | speed-up over |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for gpu in ("H100", "H200"):
        plan = compile_plan(CONFIG, [f"hardware.gpu={gpu}"])
        groups = cp_groups(plan)
        lengths = {
            "median 2k, sigma 1.1": lognormal(2000, 1.1),
            "median 1k, sigma 1.5": lognormal(1000, 1.5),
            "as the config estimates": of_plan(plan),
        }
        for name, draw in lengths.items():
            found = [simulate(groups.problem(draw(random.Random(seed)))) for seed in range(SEEDS)]
            padded, packed, dynamic, cp = (sum(x) / SEEDS for x in zip(*found, strict=True))
            print(
                f"| {gpu} | {name} | {padded:.1f} | {packed:.2f} | {dynamic:.2f} | {cp:.1f} | "
                f"padded {padded / dynamic:.1f}x, packed {packed / dynamic:.2f}x |"
            )
    print("\nAssumed:\n- " + ";\n- ".join(ASSUMED) + ".")
