"""Quality and time of plans of dynamic context parallelism.

`python -m benchmarks.run dynamic_cp` prints a table: four distributions of lengths, several numbers
of ranks.

A rank's cost is its share of L^2 + 16384 L over the samples of its group. balance: cost of the
slowest rank of each microbatch, summed, over an even share of all cost. microbatches: their number
over the least that the tokens allow. CP: ranks that share a sample, averaged over tokens. "All at
the largest CP" is perfectly balanced and slow, so the three belong together.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import NamedTuple

from rich.progress import track

from benchmarks.measure import in_turns
from benchmarks.tables import markdown
from pyrl_ext.schedule import plan_dynamic_cp
from pyrl_ext.schedule.cp_problem import CostModel, CpGroups, ExchangeCost
from pyrl_ext.schedule.native_search import search_native

Groups = Sequence[tuple[int, Sequence[int]]]
"""A microbatch: ranks and samples of each group."""
LINEAR = 16384
"""Tokens at which attention costs as much as everything else."""
RANKS = (8, 16, 32, 64, 128)
SEEDS = 20
MEAN_BALANCE = 1.02
WORST_BALANCE = 1.08
MOST_MICROBATCHES = 1.10
"""The bars."""


class Lengths(NamedTuple):
    """A distribution of lengths."""

    name: str
    draw: Callable[[random.Random], float]
    per_rank: int
    """Samples for each rank."""
    limit: int
    """Most tokens on a rank."""

    def of(self, num_ranks: int, seed: int) -> list[int]:
        """Lengths of a batch, at most 49152 and what all ranks together can hold."""
        longest = min(49152, self.limit // 2 * 2 * num_ranks)
        return self.drawn(self.per_rank * num_ranks, longest, seed)

    def drawn(self, samples: int, longest: int, seed: int) -> list[int]:
        """Lengths from 64 to ``longest``."""
        random_ = random.Random(seed)
        return [min(longest, max(64, int(self.draw(random_)))) for _ in range(samples)]


def _two_modes(draw: random.Random) -> float:
    return draw.gauss(1500, 300) if draw.random() < 0.9 else draw.gauss(33000, 4000)


DISTRIBUTIONS = (
    Lengths("lognormal 2k, sigma 1.1", lambda r: r.lognormvariate(math.log(2000), 1.1), 8, 3072),
    Lengths("90 % 1.5k, 10 % 33k", _two_modes, 8, 3072),
    Lengths("uniform to 16k", lambda r: r.uniform(256, 16384), 8, 3072),
    Lengths("lognormal 1k, sigma 1.5", lambda r: r.lognormvariate(math.log(1000), 1.5), 128, 2048),
)


class Quality(NamedTuple):
    """Measures of one plan, as the module explains them."""

    balance: float
    microbatches: float
    cp: float


def affine(limit: int, linear: int = LINEAR) -> CostModel:
    """The cost that the planner is given: L^2 + linear L, 10 % of a full microbatch to launch one,
    and 1 % of a token's linear work for each token that a rank receives."""
    return CostModel(
        token_seconds=linear,
        square_seconds=1,
        launch_seconds=0.1 * linear * limit,
        exchanges=(ExchangeCost(1 << 20, 0, 0.01 * linear),),
    )


def quality(
    plan: Iterable[Groups], lengths: Sequence[int], ranks: int, limit: int, linear: int = LINEAR
) -> Quality:
    """Measure a plan by the cost L^2 + linear L."""
    costs = [length * (length + linear) for length in lengths]
    slowest = 0.0
    count = 0
    tokens = 0
    for groups in plan:
        count += 1
        slowest += max(sum(costs[i] for i in ids) / size for size, ids in groups)
        tokens += sum(size * lengths[i] for size, ids in groups for i in ids)
    even = sum(costs) / ranks
    fewest = -(-sum(lengths) // (ranks * limit))
    return Quality(slowest / even, count / fewest, tokens / sum(lengths))


def planned(lengths: Sequence[int], ranks: int, limit: int) -> list[Groups]:
    """The planner's groups."""
    plan = plan_dynamic_cp(lengths, CpGroups(ranks, limit, cost=affine(limit)))
    return [[(g.cp_size, g.samples) for g in groups] for groups in plan.microbatches]


class Row(NamedTuple):
    """Means of one distribution and number of ranks over the seeds."""

    lengths: str
    ranks: int
    balance: float
    worst: float
    """The balance of the worst seed."""
    microbatches: float
    cp: float

    @property
    def passes(self) -> bool:
        return (
            self.balance <= MEAN_BALANCE
            and self.worst <= WORST_BALANCE
            and self.microbatches <= MOST_MICROBATCHES
        )


def row_of(lengths: Lengths, ranks: int, seeds: int) -> Row:
    """Measures of the planner's plans for batches of several seeds."""
    measures = []
    for seed in range(seeds):
        batch = lengths.of(ranks, seed)
        plan = planned(batch, ranks, lengths.limit)
        measures.append(quality(plan, batch, ranks, lengths.limit))
    balances, microbatches, cp = zip(*measures, strict=True)
    means = statistics.mean(microbatches), statistics.mean(cp)
    return Row(lengths.name, ranks, statistics.mean(balances), max(balances), *means)


def planning_ms(samples: int = 4096, ranks: int = 256, calls: int = 9) -> float:
    """Milliseconds of processor time of the fastest call for a batch of the first distribution."""
    batch = DISTRIBUTIONS[0]._replace(per_rank=samples // ranks).of(ranks, 0)
    limit = DISTRIBUTIONS[0].limit
    problem = CpGroups(ranks, limit, cost=affine(limit)).problem
    (times,) = in_turns([lambda: search_native(problem(batch))], calls, clock=time.process_time)
    return 1e3 * min(times)


def table(ranks: Sequence[int], seeds: int) -> bool:
    """Print the table; True if the planner meets its bars."""
    print(f"dynamic_cp: {seeds} seeds, {date.today()}\n")
    places = [(lengths, count) for lengths in DISTRIBUTIONS for count in ranks]
    rows = [row_of(*place, seeds) for place in track(places, "plans", transient=True)]
    cells = []
    for row in rows:
        measures = f"{row.balance:.3f}", f"{row.worst:.3f}", f"{row.microbatches:.2f}"
        cells.append((row.lengths, f"{row.ranks}", *measures, f"{row.cp:.1f}"))
    print(markdown(("lengths", "ranks", "balance", "worst seed", "microbatches", "CP"), cells))
    passes = all(row.passes for row in rows)
    print(
        f"{'PASS' if passes else 'FAIL'}  balance at most {MEAN_BALANCE} in the mean and "
        f"{WORST_BALANCE} at worst, at most {MOST_MICROBATCHES} times the least microbatches"
    )
    return passes


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run dynamic_cp")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--calibrate",
        nargs="*",
        metavar="CONFIG, key=value",
        help="fit the costs to microbatches of a config (configs/tiny.yaml) that run here",
    )
    args = parser.parse_args(arguments)
    if args.calibrate is not None:
        from benchmarks.calibrate_cp import calibrate  # imports the trainer

        calibrate(args.calibrate)
        return 0
    passes = table(args.ranks, args.seeds)
    taken = planning_ms()
    fast = taken < 20
    print(f"{'PASS' if fast else 'FAIL'}  4096 samples on 256 ranks in at most 20 ms: {taken:.1f}")
    return 0 if passes else 1  # a busy machine may be slow
