"""The costs of context parallelism on this machine, fitted to microbatches that really run.

`python -m benchmarks.run dynamic_cp --calibrate [CONFIG] [key=value ...]` prints a `CostModel` as
YAML. A microbatch is timed as the difference between the gradient of three of them and of one, each
the fastest of several, so that the reduction of gradients is left out. Launch, tokens and squared
tokens are fitted to microbatches on one rank; the exchange, to what a group takes beyond its share
of that. Under torchrun this module measures and prints JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from benchmarks.whole import index_of
from pyrl_ext.dist import topology
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.schedule import Group, Schedule
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.cp_problem import CostModel, Exchange
from pyrl_ext.trainer.policy import Policy

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SHAPES = ((64,) * 4, (256,), (64,) * 16, (1024,), (256,) * 8, (2048,), (1024, 512, 256), (3072,))
"""Lengths of the samples of each microbatch."""
REPEATS = 5


class Timed(NamedTuple):
    """A microbatch that ran."""

    cp_size: int
    lengths: tuple[int, ...]
    seconds: float


def calibrate(arguments: Sequence[str], sizes: Sequence[int] = (2,)) -> None:
    """Time microbatches on one rank and on groups of ``sizes`` ranks; print the fitted costs."""
    timed: list[Timed] = []
    for size in (1, *sizes):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(size), "-m", "benchmarks.calibrate_cp", *arguments]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        told = json.loads(ran.stdout.splitlines()[-1])
        timed += [Timed(size, tuple(lengths), seconds) for _, lengths, seconds in told]
    cost, error = fit(timed)
    for each in timed:
        shape = f"{len(each.lengths)} x at most {max(each.lengths)} tokens"
        took, fitted = 1e3 * each.seconds, 1e3 * predicted(cost, each)
        print(f"# CP {each.cp_size}, {shape}: {took:.1f} ms, fitted {fitted:.1f} ms")
    print(f"# largest error {error:.0%}\n{as_yaml(cost)}", end="")


def fit(timed: Sequence[Timed]) -> tuple[CostModel, float]:
    """Costs, none negative, with the least squared relative errors.

    Returns: the costs, and the largest relative error.
    """
    alone = [t for t in timed if t.cp_size == 1]
    launch, token, square = _least_squares(
        [(1.0, sum(t.lengths), sum(n * n for n in t.lengths)) for t in alone],
        [t.seconds for t in alone],
        [t.seconds for t in alone],
    )
    exchanges = []
    for size in sorted({t.cp_size for t in timed} - {1}):
        shared = [t for t in timed if t.cp_size == size]
        own = CostModel(token, square, launch)
        fixed, received = _least_squares(
            [(1.0, sum(t.lengths) * (size - 1) / size) for t in shared],
            [t.seconds - predicted(own, t) for t in shared],
            [t.seconds for t in shared],
        )
        exchanges.append(Exchange(size, fixed, received))
    cost = CostModel(token, square, launch, tuple(exchanges))
    return cost, max(abs(predicted(cost, t) / t.seconds - 1) for t in timed)


def predicted(cost: CostModel, timed: Timed) -> float:
    """Seconds of a microbatch by the costs."""
    fixed, token, square = cost.rates(timed.cp_size)
    work = sum(token * n + square * n * n for n in timed.lengths)
    return cost.launch_seconds + fixed + work


def _least_squares(
    rows: Sequence[Sequence[float]], values: Sequence[float], units: Sequence[float]
) -> list[float]:
    """Coefficients, none negative, of the best fit relative to ``units``: columns whose
    coefficients would be negative are left out, by trying all choices of columns."""
    unit = torch.tensor(units, dtype=torch.float64)
    table = torch.tensor(rows, dtype=torch.float64) / unit[:, None]
    sought = torch.tensor(values, dtype=torch.float64) / unit
    scale = table.abs().amax(0)
    best, least = torch.zeros_like(scale), sought.square().sum()
    for count in range(1, len(scale) + 1):
        for chosen in map(list, combinations(range(len(scale)), count)):
            part = (table / scale)[:, chosen]
            found = torch.linalg.lstsq(part, sought[:, None]).solution[:, 0]
            error = (part @ found - sought).square().sum()
            if (found >= 0).all() and error < least:
                best, least = torch.zeros_like(scale), error
                best[chosen] = found
    return (best / scale).tolist()


def as_yaml(cost: CostModel) -> str:
    """The fields of the costs; an exchange is (up_to, launch_seconds, token_seconds)."""
    fields = {
        "token_seconds": cost.token_seconds,
        "square_seconds": cost.square_seconds,
        "launch_seconds": cost.launch_seconds,
        "exchanges": [list(each) for each in cost.exchanges],
    }
    return yaml.safe_dump(fields, sort_keys=False, default_flow_style=None)


# Under torchrun ----------------------------------------------------------------------------------


def measure(config: str, overrides: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Timed]:
    """Time microbatches that all ranks of the job share as one group."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    plan = compile_plan(config, [f"parallel.cp={size}", "replay=off", *overrides])
    timed = []
    with topology.start(plan) as topo:
        policy, loss = Policy.build(plan, topo), build_loss(plan.objective)

        def seconds(copies: BatchShard) -> float:
            start = time.perf_counter()
            policy.accumulate(copies, loss)
            return time.perf_counter() - start

        for lengths in shapes:
            one, three = _shard(policy, lengths, 1), _shard(policy, lengths, 3)
            taken = [(seconds(three), seconds(one)) for _ in range(1 + REPEATS)][1:]
            least = [min(each) for each in zip(*taken, strict=True)]
            timed.append(Timed(size, tuple(lengths), max(1e-6, (least[0] - least[1]) / 2)))
    return timed


def _shard(policy: Policy, lengths: Sequence[int], copies: int) -> BatchShard:
    """Random samples of these lengths, once in each of ``copies`` microbatches."""
    plan, topo, rows = policy.plan, policy.topo, copies * sum(lengths)
    draw = torch.Generator().manual_seed(0)
    batch = Batch(
        seqlens=tuple(lengths) * copies,
        tokens=_tokens(plan.sizes.vocab_size, rows, draw),
        targets=_tokens(plan.sizes.vocab_size, rows, draw),
        positions=torch.cat([torch.arange(n) for n in lengths] * copies),
        loss_mask=torch.ones(rows, dtype=torch.bool),
        rollout_logprobs=torch.full((rows,), -4.0),
        advantages=torch.randn(rows, generator=draw),
        routes=None,
        layer_ids=(),
        route_mask=torch.zeros(rows, dtype=torch.bool),
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


def _tokens(vocabulary: int, rows: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, vocabulary, (rows,), generator=draw)


def main(arguments: Sequence[str]) -> None:
    """Measure, and print JSON on the first rank."""
    given = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    timed = measure(given[0] if given else str(CONFIG), overrides, SHAPES)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(timed))


if __name__ == "__main__":
    main(sys.argv[1:])
