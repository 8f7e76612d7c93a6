"""The costs of context parallelism on this machine, fitted to microbatches that really run.

`python -m benchmarks.run dynamic_cp --calibrate [CONFIG] [key=value ...]` prints the section
`cp_cost` of that config, for groups of up to its `parallel.dynamic_cp` ranks (2 without it). A
microbatch is timed as half the difference between the gradient of three of them and of one, so that
the reduction of gradients is left out: the median of several rounds over all shapes, so that a busy
moment slows one round of each. Launch, tokens and squared tokens are fitted to microbatches on one
rank; the exchange, to what a group takes beyond its share of that. Errors count relative to the
time, and those beyond `USUAL` less than squared. Under torchrun this module measures and prints
JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
import yaml

from benchmarks.configs import TINY
from benchmarks.end_to_end import batch_of, index_of
from benchmarks.measure import in_turns
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.schedule import Group, Schedule
from pyrl_ext.schedule.cp_problem import CostModel, ExchangeCost
from pyrl_ext.schedule.cp_sizes import cp_sizes
from pyrl_ext.trainer.policy import Policy

SHAPES = ((64,) * 4, (256,), (64,) * 16, (1024,), (256,) * 8, (2048,), (1024, 512, 256), (3072,))
"""Lengths of the samples of each microbatch."""
ROUNDS = 7
USUAL = 0.05
MOST = 0.15
"""Relative errors of a fit: those that are expected, and the largest that is trusted."""


class Timed(NamedTuple):
    """A microbatch that ran."""

    cp_size: int
    lengths: tuple[int, ...]
    seconds: float
    spread: float = 0.0
    """Half of the rounds differ by less than this from the median, relative to it."""


def calibrate(arguments: Sequence[str]) -> None:
    """Time microbatches of a config and print the fitted costs."""
    timed = timings(arguments)
    print("\n".join(report(timed, fit(timed))))


def timings(arguments: Sequence[str]) -> list[Timed]:
    """Microbatches of a config, timed on one rank and on groups of every larger size."""
    timed: list[Timed] = []
    for size in sizes_of(compile_plan(*split(arguments))):
        ranks = group_plan(*split(arguments), size).world_size
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "benchmarks.calibrate_cp", str(size)]
        command += arguments
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        told = json.loads(ran.stdout.splitlines()[-1])
        timed += [Timed(size, tuple(lengths), *each) for _, lengths, *each in told]
    return timed


def split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """(config, overrides)."""
    given = [a for a in arguments if "=" not in a]
    return given[0] if given else str(TINY), [a for a in arguments if "=" in a]


LAYOUT = ("parallel.dp", "parallel.cp", "parallel.dynamic_cp", "replay")


def group_plan(config: str, overrides: Sequence[str], size: int) -> Plan:
    """The config on one group of ``size`` context-parallel ranks."""
    kept = [each for each in overrides if each.partition("=")[0] not in LAYOUT]
    layout = ("parallel.dp=1", f"parallel.cp={size}", "parallel.dynamic_cp=null", "replay=off")
    return compile_plan(config, [*layout, *kept])


def sizes_of(plan: Plan) -> list[int]:
    """Ranks of the groups to measure: 1, and the larger sizes that groups of the plan may have."""
    grid = plan.parallel.dp * plan.parallel.cp
    largest = plan.parallel.dynamic_cp
    return [1, 2] if largest is None else sorted({1, *cp_sizes(grid, plan.parallel.cp, largest)})


def report(timed: Sequence[Timed], cost: CostModel) -> list[str]:
    """Every measured point next to its fit, whether the fit is to be trusted, and the section."""
    lines = []
    errors = [predicted(cost, each) / each.seconds - 1 for each in timed]
    for each, error in zip(timed, errors, strict=True):
        shape = f"CP {each.cp_size}, {len(each.lengths)} x at most {max(each.lengths)} tokens"
        took = 1e3 * each.seconds
        fitted = 1e3 * predicted(cost, each)
        lines.append(
            f"# {shape}: {took:.1f} ms (+- {each.spread:.0%}), fitted {fitted:.1f} ms: {error:+.0%}"
        )
    worst = max(map(abs, errors))
    spread = max(each.spread for each in timed)
    if max(worst, spread) > MOST:
        verdict = (
            f"NOT to be trusted, expected errors and rounds within {MOST:.0%}. Measure again while "
            "nothing else runs, with a processor core for every rank"
        )
    else:
        verdict = f"to be trusted: errors and rounds are within {MOST:.0%}"
    lines.append(
        f"# largest error {worst:.0%}, rounds within {spread:.0%} of their median: {verdict}"
    )
    return [*lines, as_yaml(cost)]


def fit(timed: Sequence[Timed]) -> CostModel:
    """Costs, none negative, with the least relative errors."""
    alone = [t for t in timed if t.cp_size == 1]
    launch, token, square = _robust(alone, [t.seconds for t in alone])
    own = CostModel(token, square, launch)
    exchanges = []
    for size in sorted({t.cp_size for t in timed} - {1}):
        shared = [t for t in timed if t.cp_size == size]
        beyond = _robust(shared, [t.seconds - predicted(own, t) for t in shared], (size - 1) / size)
        exchanges.append(ExchangeCost(size, *beyond))
    return CostModel(token, square, launch, tuple(exchanges))


def predicted(cost: CostModel, timed: Timed) -> float:
    """Seconds of a microbatch by the costs."""
    fixed, token, square = cost.rates(timed.cp_size)
    work = sum(token * n + square * n * n for n in timed.lengths)
    return cost.launch_seconds + fixed + work


def _robust(timed: Sequence[Timed], values: Sequence[float], part: float = 1.0) -> list[float]:
    """Coefficients of 1, ``part`` of the tokens and squared tokens, none negative, that leave the
    least errors relative to the times: squared up to `USUAL`, linear beyond (Huber), by weights
    that are computed anew from each fit."""
    rows = [(1.0, sum(t.lengths) * part, sum(n * n for n in t.lengths)) for t in timed]
    table = np.array(rows)
    sought = np.array(values)
    times = np.array([t.seconds for t in timed])
    found = _least_squares(table / times[:, None], sought / times)
    for _ in range(10):
        errors = abs(table @ found - sought) / times
        units = times * np.maximum(1.0, errors / USUAL) ** 0.5
        found = _least_squares(table / units[:, None], sought / units)
    return found.tolist()


def _least_squares(table: np.ndarray, sought: np.ndarray) -> np.ndarray:
    """Coefficients, none negative, of the best fit: columns whose coefficients would be negative
    are left out, by trying all choices of columns."""
    scale = abs(table).max(0)
    best = np.zeros_like(scale)
    least = np.square(sought).sum()
    for count in range(1, len(scale) + 1):
        for chosen in map(list, combinations(range(len(scale)), count)):
            part = (table / scale)[:, chosen]
            found = np.linalg.lstsq(part, sought)[0]
            error = np.square(part @ found - sought).sum()
            if (found >= 0).all() and error < least:
                best = np.zeros_like(scale)
                best[chosen] = found
                least = error
    return best / scale


def as_yaml(cost: CostModel) -> str:
    """The section of a config that `costs_of` reads."""
    fields = {
        "token_seconds": cost.token_seconds,
        "square_seconds": cost.square_seconds,
        "launch_seconds": cost.launch_seconds,
        "exchanges": [list(each) for each in cost.exchanges],
    }
    return yaml.safe_dump({"cp_cost": fields}, sort_keys=False, default_flow_style=None).rstrip()


# Under torchrun ----------------------------------------------------------------------------------


def measure(plan: Plan, shapes: Sequence[Sequence[int]]) -> list[Timed]:
    """Time microbatches that all ranks of the plan share as one group."""
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        loss = build_loss(plan.objective)

        def gradient(shard: BatchShard) -> None:
            policy.accumulate(shard, loss)
            if plan.device == "cuda":
                torch.cuda.synchronize()

        runs = [
            partial(gradient, _shard(policy, lengths, copies))
            for lengths in shapes
            for copies in (1, 3)
        ]
        # the first round loads what is loaded once, and attention compiles in shapes
        times = np.array(in_turns(runs, ROUNDS))
    taken = (times[1::2] - times[::2]) / 2
    return [
        _timed(plan.parallel.cp, tuple(each), took)
        for each, took in zip(shapes, taken, strict=True)
    ]


def _timed(size: int, lengths: tuple[int, ...], taken: np.ndarray) -> Timed:
    """The median of the rounds; at least a microsecond, which a busy machine may undercut."""
    median = max(1e-6, float(np.median(taken)))
    return Timed(size, lengths, median, float(np.median(abs(taken - median))) / median)


def _shard(policy: Policy, lengths: Sequence[int], copies: int) -> BatchShard:
    """Random samples of these lengths, once in each of ``copies`` microbatches."""
    plan = policy.plan
    topo = policy.topo
    rows = copies * sum(lengths)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, plan.sizes.vocab_size, (2, rows), generator=draw)
    batch = batch_of(
        tuple(lengths) * copies,
        tokens=tokens[0],
        targets=tokens[1],
        rollout_logprobs=torch.full((rows,), -4.0),
        advantages=torch.randn(rows, generator=draw),
    )
    ids = range(len(batch.seqlens))
    microbatches = (
        (Group(0, topo.cp_size, tuple(ids[i * len(lengths) : (i + 1) * len(lengths)])),)
        for i in range(copies)
    )
    schedule = Schedule(topo.cp_size, tuple(microbatches))
    shard, _ = shard_batch(batch, index_of(batch, topo.rank), [schedule], plan, topo)
    held = torch.full((len(shard.rows.tokens),), -4.0)
    return shard.with_columns(old_logprobs=held)


def main(arguments: Sequence[str]) -> None:
    """Measure, and print JSON on the first rank."""
    size, *others = arguments
    timed = measure(group_plan(*split(others), int(size)), SHAPES)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(timed))


if __name__ == "__main__":
    main(sys.argv[1:])
