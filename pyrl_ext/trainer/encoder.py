"""The pass of an encoder over the images of a step's microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.dist.upload import to_device
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.trainer.edges import Outlet, RunsAhead, give
from pyrl_ext.trainer.module import Module


def encode(
    module: Module, shard: BatchShard, outlets: list[Outlet], more: int, forward_only: bool
) -> None:
    """Run the stages of ``module`` over all microbatches and hand its rows to the readers.

    Args:
        module: its chunk takes patches [p, C] on its first stage, scaled as its processor says, and
            the grid (t, h, w) of each image; on its last stage it returns [rows, width], equal on
            all tensor-parallel ranks.
        outlets: the edges that it feeds.
        more: microbatches that it runs further ahead than its stages ask for (`ahead_of`).

    Communicates: waits for patches that are still on their way; then as megatron's schedule does.
    """
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )

    topo, (chunk,), images = module.topo, module.chunks, shard.images[module.name]

    def step(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[..., tuple]]:
        number = next(numbers)
        shard.wait(number)
        patches, grids, rows = images.microbatch(number, topo.dp_rank)
        if patches is not None:
            patches = to_device(patches, topo.device)
            patches = patches if module.scale is None else module.scale(patches)
        with record_function("pyrl: encode"):
            output = chunk(patches, grids)

        def hand_on(output: Tensor) -> tuple[Tensor, Tensor, None]:
            if rows and len(output) != rows:
                raise RuntimeError(
                    f"encode: {module.name} made {len(output)} rows of images of {grids} patches, "
                    f"expected {rows}"
                )
            zero = give(output[:rows], outlets, number, topo.dp_rank, topo.groups.tp)
            return zero, torch.zeros((), dtype=torch.int), None  # the readers count the tokens

        return output, hand_on

    num_microbatches = len(images.work.schedule)
    forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=iter(range(num_microbatches)),
        model=chunk,
        num_microbatches=num_microbatches,
        seq_length=0,  # ignored: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=RunsAhead(topo.groups.pp, module.config, more),
        pg_collection=topo.groups,
    )
