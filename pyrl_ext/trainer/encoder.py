"""The pass of an encoder over the images of a step's microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.megatron.p2p import Shape
from pyrl_ext.megatron.vision import VisionTower
from pyrl_ext.ops.tensors import to_device
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.trainer.module_pipe import Edges, RunsAhead, embedded_depths, give, swap

Taken = dict[int, list[tuple[Tensor, Tensor]]]
"""Rows of images as `Edge.take` returns them, by the depth of the MTP layer that embeds them; 0: in
place of the model's own embeddings."""


def encode(
    module: TrainedModule, shard: BatchShard, edges: Edges, more: int, forward_only: bool
) -> None:
    """Run the stages of ``module`` over all microbatches and hand its rows to the readers.

    Args:
        module: its chunk takes patches [p, C] on its first stage, those in 8 bits scaled as the
            model's processor does, and the grid (t, h, w) of each image; on its last stage it
            returns [rows, width], equal on all tensor-parallel ranks.
        edges: that it feeds; see `Edges`.
        more: microbatches that it runs further ahead than its stages ask for (`ahead_of`).

    Communicates: waits for patches that are still on their way; then as megatron's schedule does.
    """
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )

    topo = module.topo
    (chunk,) = module.chunks
    images = shard.images[module.name]
    work = images.work
    tower = cast(VisionTower, module.models[0])

    def step(
        numbers: Iterator[int], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]]]:
        number = next(numbers)
        output, rows_of = forward(module, shard, number)

        def hand_on(output: Tensor) -> tuple[Tensor, Tensor, None]:
            fed = [*edges.values()]
            zero = give(rows_of(output), fed, work, number, topo.dp_rank, topo.groups.tp)
            return zero, torch.zeros((), dtype=torch.int), None  # the readers count the tokens

        return output, hand_on

    def handed_on(number: int, stage: int) -> Shape:
        _, grids, _ = images.microbatch(number, topo.dp_rank)
        return tower.handed_on(grids, stage)

    num_microbatches = len(work.schedule)
    # what a stage receives asks for a gradient, also in a frozen encoder: its graph would be kept
    with torch.set_grad_enabled(not forward_only):
        forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter(range(num_microbatches)),
            model=chunk,
            num_microbatches=num_microbatches,
            seq_length=0,  # ignored: variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=RunsAhead(
                more, topo.groups.pp, module.config, num_microbatches, handed_on
            ),
            pg_collection=topo.groups,
        )


def forward(
    module: TrainedModule, shard: BatchShard, number: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The output of this rank's stage for one microbatch, and what makes rows of the last one's.

    Communicates: waits for patches that are still on their way.
    """
    topo = module.topo
    (chunk,) = module.chunks
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


class Features:
    """The rows of images that the chunks of the language model embed, in one pass.

    An encoder that shares the ranks of the first stage runs with the first chunk.

    Args:
        modules: of this rank.
        edges: of the pass; see `Edges`.
        shard: the microbatches.
    """

    def __init__(self, modules: Mapping[str, TrainedModule], edges: Edges, shard: BatchShard):
        self.modules = modules
        self.edges = edges
        self.shard = shard
        self._numbers = [count() for _ in modules["llm"].chunks]  # of microbatches

    def next(self, chunk: int) -> Taken:
        """The rows of the next microbatch of a chunk.

        Communicates: as `Edge.take`, `swap` and `give` do.
        """
        llm = self.modules["llm"]
        number = next(self._numbers[chunk])
        taken: Taken = {depth: [] for depth in embedded_depths(llm.plan, llm.topo, chunk)}
        for (name, depth), edge in self.edges.items():
            if name not in self.modules and depth in taken:
                taken[depth] += edge.take(self.shard.images[name].work, number)
        for name in dict.fromkeys(name for name, _ in self.edges) if 0 in taken else ():
            if module := self.modules.get(name):
                self._encode(module, number, taken)
        return taken

    def _encode(self, module: TrainedModule, number: int, taken: Taken) -> None:
        """Add to ``taken`` the rows of an encoder that shares the ranks of the first stage."""
        work = self.shard.images[module.name].work
        replica = module.topo.dp_rank
        output = None
        zeros = list[Tensor]()
        if len(work.ids(number, replica)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and module.optimizer is not None):
                encoded, rows_of = forward(module, self.shard, number)
                output = rows_of(encoded)
        for (name, depth), edge in self.edges.items():
            if name == module.name and depth in taken:
                taken[depth] += swap(edge, work, number, replica, output)
            elif name == module.name and output is not None:  # another stage reads them
                rows = output if edge.trained else output.detach()
                zeros.append(give(rows, [edge], work, number, replica, module.topo.groups.tp))
        if zeros:  # the gradients of that stage come with those of the first
            *others, (rows, values) = taken[0]
            taken[0] = [*others, (rows, values + sum(zeros))]
