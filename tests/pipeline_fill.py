"""Utilization of the pipeline of an encoder and a language model on different ranks: stages that
sleep instead of computing, so that a busy machine shows the schedule and not itself.

    python -m tests.pipeline_fill

The bar is 1.10 of 1F1B over all stages without any wait: (microbatches + stages - 1) x 3 units. It
is not for the interleaved schedule, whose first chunk gets its gradients in bursts.
"""

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.ddp import unwrap
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from tests import parity, parity_modules
from tests.helpers import towers
from tests.helpers.ranks import run_ranks
from tests.parity_modules import Layout

# s of a stage's forward; its backward takes two
UNIT = 0.4
MICROBATCHES = 6
BAR = 1.10
LAYOUTS = {
    2: [Layout("1 -> 1")],
    3: [Layout("1 -> pp2"), Layout("pp2 -> 1")],
    4: [Layout("pp2 -> pp2"), Layout("pp2 -> pp2 vpp2")],
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


def sleepy(model: Any, seconds: float) -> None:
    forward = model.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return _Sleep.apply(output[0], seconds), *output[1:]
        return _Sleep.apply(output, seconds)

    model.forward = slow


def seconds_of(plan: Any, layout: Layout) -> float:
    """The better of two updates, on the slowest rank."""
    with topology.start(plan) as topo:
        policy = parity_modules.build(plan, topo, layout)
        loss = build_loss(plan.objective)
        for chunk in policy.module.chunks:
            sleepy(unwrap(chunk), UNIT / len(policy.module.chunks))
        g = torch.Generator().manual_seed(0)
        batch = parity._batch(plan, [50] * MICROBATCHES, plan.router_layers, g)
        batch = replace(batch, old_logprobs=torch.full((len(batch.tokens),), -4.0))
        images = towers.with_images(batch, ("vision",), 0)
        images = replace(images, old_logprobs=batch.old_logprobs)
        schedule = Scheduler(plan).schedule(images.seqlens)
        assert len(schedule) == MICROBATCHES
        shard = towers.image_shard(plan, topo, images, schedule)
        best = float("inf")
        for _ in range(2):
            dist.barrier()
            begun = time.perf_counter()
            policy.accumulate(shard, loss)
            best = min(best, time.perf_counter() - begun)
        slowest = torch.tensor(best)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


def on_ranks(group: Any, layouts: list[Layout], folder: Path) -> list[float]:
    os.environ["WORLD_SIZE"] = str(group.size())
    return [seconds_of(layout.plan(folder), layout) for layout in layouts]


def main() -> int:
    print(f"{MICROBATCHES} microbatches, {UNIT} s forward and {2 * UNIT} s backward a stage")
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        for size, layouts in LAYOUTS.items():
            for layout, took in zip(
                layouts, run_ranks(on_ranks, size, layouts, Path(name))[0], strict=True
            ):
                least = (MICROBATCHES + size - 1) * 3 * UNIT
                missed += took > BAR * least and "vpp" not in layout.name
                print(
                    f"{layout.name:20s} {took:6.2f} s, {took / least:.2f} of 1F1B's {least:.2f} s"
                )
    print(f"{missed} layouts above {BAR}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
