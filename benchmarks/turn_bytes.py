"""Rows and bytes of samples whose contexts and answers are anti-correlated, next to padded layouts:
``python -m benchmarks.turn_bytes [--samples N]``.

With one sample a turn, early turns have short contexts and may answer at length, late ones long
contexts. Ours are the tensors that `shard_batch` keeps of a step, and the rows of its microbatches,
measured. Left padding makes every sample as long as the longest; two segments pad all prompts to
the longest prompt and all responses to the longest response: their rows are counted, at the bytes
that a row takes here.
"""

from __future__ import annotations

import argparse
import time
from itertools import cycle, islice
from pathlib import Path

import torch

from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.rank_rows import layout_of
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.plan import compile_plan
from pyrl_ext.samples import Sample
from tests.helpers.tiny import one_rank

CONFIG = Path(__file__).parents[1] / "configs" / "glm47.yaml"
TURNS = [(5, 50), (15, 40), (25, 30), (35, 24), (45, 14), (55, 4)]  # prompt, response [1000 tokens]
OPTIONS = (
    "parallel.dp=1",
    "parallel.ep=1",
    "rollout.tp=1",
    "hardware.gpu=null",
    "batching.minibatches=1",
    "batching.tokens_per_microbatch=65536",
)


def sample_of(turn: int, prompt: int, response: int, layers: tuple[int, ...]) -> Sample:
    """A turn with the routes of GLM-4.7-Flash."""
    tokens = prompt + response
    sampled = torch.arange(tokens) >= prompt
    return Sample(
        prompt_id=turn // len(TURNS),
        index=0,
        tokens=torch.full((tokens,), 7),
        prompt_len=prompt,
        loss_mask=sampled,
        rollout_logprobs=torch.where(sampled, -1.0, 0.0),
        routes=torch.arange(4, dtype=torch.uint8).expand(tokens, len(layers), 4),
        layer_ids=layers,
        route_mask=torch.arange(tokens) < tokens - 1,
        weight_version=0,
        finish_reason="stop",
        reward=1.0,
        turn=turn % len(TURNS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=6)
    start = time.perf_counter()
    count = parser.parse_args().samples
    plan = compile_plan(CONFIG, OPTIONS)
    sizes = [(1000 * p, 1000 * r) for p, r in islice(cycle(TURNS), count)]
    samples = [sample_of(i, *each, plan.router_layers) for i, each in enumerate(sizes)]
    index = BatchIndex.of(samples)
    schedules = Scheduler(plan).minibatches(index)
    batch = Batch.of(samples, torch.zeros(count))
    shard, _ = shard_batch(batch, index, schedules, plan, one_rank(plan))
    stored = sum(column.nbytes for column in shard.columns.values())
    layouts = [
        layout_of(group, shard.lengths, shard.role)
        for m in shard.schedule.microbatches
        for group in m
    ]
    computed = sum(len(layout.rows(0)) for layout in layouts)
    each = stored / int(index.starts[-1])
    print(f"{count} samples, {len(layouts)} microbatches, {each:.0f} bytes a row")
    longest = [max(part) for part in zip(*sizes, strict=True)]
    for name, rows, size in (
        ("ragged, ours", computed, stored),
        ("left padding", count * max(map(sum, sizes)), None),
        ("two segments", count * sum(longest), None),
    ):
        size = rows * each if size is None else size
        print(f"{name:14s} {rows:9,d} rows {size / 1e6:7.1f} MB {size / stored:5.2f}x")
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
