"""Host memory of one rollout batch on 1, 2, 4 and 8 ranks: ``python -m benchmarks.batch_parts
[--samples N] [--tokens N]``.

Every rank generates its share of the same batch. Then either all ranks gather all samples, as the
trainer did before, or `shard_batch` moves to each rank the rows that it computes. Printed are the
bytes that stay on a rank and the most that it held meanwhile, above what it held before. Written
before measuring: gathered, a rank holds the whole batch (twice at the peak) at any number of
ranks; in parts, batch / ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.plan import compile_plan
from pyrl_ext.samples import Sample
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import one_rank

CONFIG = Path(__file__).parents[1] / "configs" / "glm47.yaml"
_M_MMAP_THRESHOLD = -3  # of malloc.h


def sample_of(prompt: int, tokens: int, layers: tuple[int, ...]) -> Sample:
    """A sample of so many tokens with routes of GLM-4.7-Flash."""
    mask = torch.arange(tokens) >= tokens // 4
    routes = torch.arange(4, dtype=torch.uint8).repeat(tokens, len(layers), 1)
    return Sample(
        prompt_id=prompt,
        index=0,
        tokens=torch.full((tokens,), 7),
        prompt_len=tokens // 4,
        loss_mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        routes=routes,
        layer_ids=layers,
        route_mask=torch.arange(tokens) < tokens - 1,
        weight_version=0,
        finish_reason="stop",
        reward=float(prompt % 2),
    )


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory; or the most since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def held(make: Callable[[list[Sample]], Any], mine: list[Sample]) -> dict[str, float]:
    """Bytes above those without a batch, and seconds, of what ``make`` does with the samples.

    ``make`` empties the list when it no longer needs it.
    """
    dist.barrier()
    samples = [replace(s, routes=s.routes.clone()) for s in mine if s.routes is not None]
    forget_peak()
    before = resident() - sum(s.routes.nbytes for s in samples if s.routes is not None)
    start = time.perf_counter()
    kept = make(samples)
    seconds = time.perf_counter() - start
    most = resident(peak=True) - before
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps of freed memory is not the batch
    stays = resident() - before
    del kept
    return {"stays": stays, "peak": most, "seconds": seconds}


def on_rank(group: dist.ProcessGroup, samples: int, tokens: int) -> dict[str, Any]:
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # freed memory leaves the process
    ranks = group.size()
    rank = group.rank()
    options = (f"parallel.dp={ranks}", f"parallel.ep={ranks}", "rollout.tp=1", "hardware.gpu=null")
    plan = compile_plan(CONFIG, (*options, "batching.minibatches=1"))
    topo = replace(one_rank(plan), rank=rank, world_size=ranks, hosts=(0,) * ranks)
    mine = [sample_of(p, tokens, plan.router_layers) for p in range(rank, samples, ranks)]
    advantages = torch.zeros(len(mine))

    def everything(own: list[Sample]) -> Any:
        gathered = [s for part in gather_objects(own, group) for s in part]
        own.clear()
        batch = Batch.of(gathered, torch.zeros(len(gathered)))
        gathered.clear()
        return batch

    def parts(own: list[Sample]) -> Any:
        indices = gather_objects(BatchIndex.of(own, rank), group)
        index = BatchIndex.joined(indices, range(samples))
        batches = [Batch.of(own, advantages)]
        own.clear()
        return shard_batch(batches.pop(), index, Scheduler(plan).minibatches(index), plan, topo)

    return {
        "own": sum(s.routes.nbytes for s in mine if s.routes is not None),
        "gathered": held(everything, mine),
        "in parts": held(parts, mine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="of each sample")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    print(f"{options.samples} samples of {options.tokens} tokens, load {os.getloadavg()[0]:.1f}")
    print(f"{'':6s} {'gathered: stays':>16s} {'peak':>8s} {'s':>6s} {'in parts: stays':>18s}"
          f" {'peak':>8s} {'s':>6s}   MB of the largest rank")  # fmt: skip
    for ranks in options.ranks:
        found = run_ranks(on_rank, ranks, options.samples, options.tokens, timeout=900)
        cells = [f"{ranks:2d} rank{'s' * (ranks > 1):1s}"]
        for way in ("gathered", "in parts"):
            worst = {k: max(each[way][k] for each in found) for k in ("stays", "peak", "seconds")}
            cells.append(f"{worst['stays'] / 1e6:16.0f} {worst['peak'] / 1e6:8.0f}")
            cells.append(f"{worst['seconds']:6.2f}")
        print(" ".join(cells), flush=True)


if __name__ == "__main__":
    main()
