"""The pass of an encoder over the images of a step's microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.dist.upload import to_device
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.trainer.edges import Edge, Outlet, RunsAhead, give, swap
from pyrl_ext.trainer.module import Module


def encode(
    module: Module, shard: BatchShard, outlets: list[Outlet], more: int, forward_only: bool
) -> None:
    """Run the stages of ``module`` over all microbatches and hand its rows to the readers.

    Args:
        module: its chunk takes patches [p, C] on its first stage, those in 8 bits scaled as the
            model's processor does, and the grid (t, h, w) of each image; on its last stage it
            returns [rows, width], equal on all tensor-parallel ranks.
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
        output, rows_of = forward(module, shard, number)

        def hand_on(output: Tensor) -> tuple[Tensor, Tensor, None]:
            zero = give(rows_of(output), outlets, number, topo.dp_rank, topo.groups.tp)
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


def forward(
    module: Module, shard: BatchShard, number: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The output of this rank's stage for one microbatch, and what makes rows of the last one's.

    Communicates: waits for patches that are still on their way.
    """
    topo, (chunk,) = module.topo, module.chunks
    shard.wait(number)
    patches, grids, rows = shard.images[module.name].microbatch(number, topo.dp_rank)
    if patches is not None:
        patches = to_device(patches, topo.device)
        patches = module.scale(patches) if patches.dtype == torch.uint8 else patches

    def rows_of(output: Tensor) -> Tensor:
        if rows and len(output) != rows:
            raise RuntimeError(
                f"encode: {module.name} made {len(output)} rows of images of {grids} patches, "
                f"expected {rows}"
            )
        return output[:rows]

    with record_function("pyrl: encode"):
        return chunk(patches, grids), rows_of


Features = dict[int, list[tuple[Tensor, Tensor]]]
"""Rows of images that a stage embeds, as `Edge.take` returns them, by the depth of the MTP layer
that embeds them; 0: the model's first layer."""


def features(
    modules: Mapping[str, Module],
    edges: Mapping[tuple[str, int], Edge],
    shard: BatchShard,
    number: int,
    depths: Collection[int],
) -> Features:
    """The rows of images that a chunk of the language model embeds in a microbatch.

    An encoder that shares the ranks of the first stage runs with depth 0, and sends to the others.

    Args:
        modules: of this rank.
        edges: from each encoder, by its name and the depth.
        depths: that the chunk embeds at.

    Communicates: as `Edge.take`, `swap` and `give` do.
    """
    taken: Features = {depth: [] for depth in depths}
    for (name, depth), edge in edges.items():
        if name not in modules and depth in taken:
            route = partial(shard.images[name].work.route, depth=depth)
            taken[depth] += edge.take(route, number)
    for name, module in modules.items() if 0 in taken else ():
        mine = {depth: edge for (encoder, depth), edge in edges.items() if encoder == name}
        if mine:
            _encode_here(module, shard, mine, number, taken)
    return taken


def _encode_here(
    module: Module, shard: BatchShard, edges: Mapping[int, Edge], number: int, taken: Features
) -> None:
    """Add to ``taken`` the rows of an encoder that shares the ranks of the first stage."""
    work, replica, output = shard.images[module.name].work, module.topo.dp_rank, None
    if len(work.ids(number, replica)):
        with torch.set_grad_enabled(torch.is_grad_enabled() and module.optimizer is not None):
            encoded, rows_of = forward(module, shard, number)
            output = rows_of(encoded)
    zeros: list[Tensor] = []
    for depth, edge in edges.items():
        route = partial(work.route, depth=depth)
        if depth in taken:
            taken[depth] += swap(edge, route, number, replica, output)
        elif output is not None:  # another stage reads them
            given, outlets = output if edge.trained else output.detach(), [Outlet(edge, route)]
            zeros.append(give(given, outlets, number, replica, module.topo.groups.tp))
    if zeros:  # the gradients of that stage come with those of the first
        *others, (rows, values) = taken[0]
        taken[0] = [*others, (rows, values + sum(zeros))]
