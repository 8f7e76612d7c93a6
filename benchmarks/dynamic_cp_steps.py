"""Updates on four ranks with fixed and with dynamic context parallelism: ``python -m
benchmarks.dynamic_cp_steps [--samples N] [--rounds N]``.

The same long-tailed samples, model and token limit; both ways in turns, so that a busy machine
slows both. Printed are medians of the slowest rank's seconds, and their ratio beside that of the
planner, whose costs are measured first (`calibrate_cp`).
Written before measuring: fixed groups of four send every layer's latents of every row and launch
every microbatch on all ranks, so 1.3 times as long at least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.calibrate_cp import fit, timings
from benchmarks.lengths import lognormal
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.strategies import Comparison
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, tiny_plan

WAYS = {"fixed": ("parallel.cp=4",), "dynamic": ("parallel.dp=4", "parallel.dynamic_cp=4")}


def plan_of(way: str, limit: int, longest: int, costs: Sequence[str] = ()) -> Plan:
    """The tiny model's plan, with positions for samples of ``longest`` tokens.

    Args:
        costs: overrides of ``cp_cost``.
    """
    sizes = json.loads((CONFIG.parent / "tiny" / "config.json").read_text())
    common = (f"batching.tokens_per_microbatch={limit}", f"rollout.max_new_tokens={longest}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(sizes | {"max_position_embeddings": 4 * longest}))
        model = f"model.config={path}"
        return tiny_plan(*WAYS[way], *common, *costs, model, "batching.minibatches=1")


def measured_costs() -> list[str]:
    """The costs that `calibrate_cp` fits on this machine, as overrides of ``cp_cost``."""
    cost = fit(timings([str(CONFIG), *WAYS["dynamic"]]))
    exchanges = [list(each) for each in cost.exchanges]
    return [
        f"cp_cost.token_seconds={cost.token_seconds}",
        f"cp_cost.square_seconds={cost.square_seconds}",
        f"cp_cost.launch_seconds={cost.launch_seconds}",
        f"cp_cost.exchanges={json.dumps(exchanges)}",
    ]


def batch_of(lengths: Sequence[int]) -> passes.WholeBatch:
    """Random tokens and routes of the tiny model."""
    g = torch.Generator().manual_seed(0)
    rows = sum(lengths)
    scores = torch.rand(rows, 3, 8, generator=g)
    return passes.WholeBatch(
        seqlens=tuple(lengths),
        tokens=torch.randint(3, 128, (rows,), generator=g),
        targets=torch.randint(3, 128, (rows,), generator=g),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        loss_mask=torch.ones(rows, dtype=torch.bool),
        rollout_logprobs=torch.full((rows,), -4.0),
        advantages=torch.randn(rows, generator=g),
        routes=scores.argsort(-1)[..., :2].to(torch.uint8),
        layer_ids=(1, 2, 3),
        route_mask=torch.ones(rows, dtype=torch.bool),
        old_logprobs=torch.full((rows,), -4.0),
    )


def on_rank(
    group: dist.ProcessGroup,
    lengths: Sequence[int],
    limit: int,
    rounds: int,
    costs: Sequence[str],
) -> dict[str, list[float]]:
    """Seconds of the slowest rank for each round's update, by way."""
    os.environ["WORLD_SIZE"] = str(group.size())
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    seconds = {way: list[float]() for way in WAYS}
    batch = batch_of(lengths)
    for _ in range(rounds):
        for way, found in seconds.items():
            plan = plan_of(way, limit, max(lengths), costs)
            with topology.start(plan) as topo:
                policy = Policy.build(plan, topo)
                loss = build_loss(plan.objective)
                shard = passes.shard_of(policy, batch, Scheduler(plan).schedule(batch.seqlens))
                policy.accumulate(shard, loss)  # the first allocates
                dist.barrier()
                start = time.perf_counter()
                policy.accumulate(shard, loss)
                took = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                found.append(float(took))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--mean", type=int, default=128, help="tokens")
    parser.add_argument("--longest", type=int, default=2048, help="tokens")
    parser.add_argument("--limit", type=int, default=512, help="tokens of a microbatch and rank")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    lengths = lognormal(given.samples, given.longest, given.samples * given.mean)
    costs = measured_costs()
    found = run_ranks(on_rank, 4, lengths, given.limit, given.rounds, costs, timeout=1200)[0]
    print(f"{len(lengths)} samples, {sum(lengths)} tokens, longest {max(lengths)}, 4 gloo ranks, "
          f"load {os.getloadavg()[0]:.1f}, median of {given.rounds}")  # fmt: skip
    median = {way: statistics.median(times) for way, times in found.items()}
    for way, times in found.items():
        print(f"{way:8s} {median[way]:7.2f} s   ({min(times):.2f} to {max(times):.2f})")
    ratios = [a / b for a, b in zip(found["fixed"], found["dynamic"], strict=True)]
    plan = plan_of("dynamic", given.limit, max(lengths), costs)
    planned = Comparison(plan, lengths, [0] * len(lengths)).strategies
    first_fit, balanced, dynamic = (each.makespan for each in planned)
    print(f"fixed / dynamic: {statistics.median(ratios):.2f}; by measured costs, a core a rank: "
          f"{balanced / dynamic:.2f} ({balanced:.2f} s and {dynamic:.2f} s), "
          f"{first_fit / dynamic:.2f} first fit")  # fmt: skip


if __name__ == "__main__":
    main()
