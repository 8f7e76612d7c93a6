"""Feed: the microbatches of a pass, each on its way to the device while another computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from pyrl_ext.dist.topology import Topology
from pyrl_ext.dist.upload import Upload
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.plan import Plan
from pyrl_ext.replay.routed_experts import Forced, Routes
from pyrl_ext.replay.router_hook import Replay
from pyrl_ext.samples import route_dtype


@dataclass
class Prepared:
    """A microbatch with what the model needs beside its tokens."""

    micro: Microbatch
    packed: PackedSequences
    routes: Routes
    readers: int  # model chunks that have not taken it yet


class Feed:
    """What a data-parallel rank computes in one pass, in the order of ``schedule``.

    Args:
        batch:    on the host.
        schedule: [microbatch] -> sample ids of this rank.
        replayed: whether routers use the routes of the batch; else they choose for themselves.
        depths:   layers for multi-token prediction whose inputs are needed.

    Raises: ValueError when routes are to be replayed and the batch has none.
    """

    def __init__(
        self,
        batch: Batch,
        schedule: Sequence[Sequence[int]],
        plan: Plan,
        topo: Topology,
        replay: Replay,
        replayed: bool,
        depths: int = 0,
    ):
        if replayed and batch.routes is None:
            raise ValueError(
                "replay: the samples carry no routes; the engine must return them, or the plan "
                "must switch replay off (replay: {old: false, reference: false, train: false})"
            )
        self.batch, self.plan, self.topo, self.replay = batch, plan, topo, replay
        self.replayed, self.depths = replayed, depths
        self.ids = list(schedule)
        if topo.vpp_size is not None:  # interleaving wants whole rounds: fill up with padding
            self.ids += [()] * (-len(self.ids) % topo.pp_size)
        self._upload = Upload(topo.device)
        self._ready: dict[int, Prepared] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self.ids)

    def of_chunk(self, chunk: int) -> Iterator[tuple[int, Prepared, list[Forced | None]]]:
        """(chunk, microbatch, what its routers are to use) of every microbatch in turn."""
        layers = self.replay.layer_ids(chunk)
        for number in range(len(self)):
            while self._made <= number:
                self._prepare()
            found = self._ready[number]
            found.readers -= 1
            if not found.readers:
                del self._ready[number]
            self._upload.arrive()
            with record_function("pyrl: routes"), self.replay.clock("time/replay"):
                routes = found.routes.of_layers(layers)
            yield chunk, found, routes

    def prepare_next(self) -> None:
        """Send the next microbatch on its way, unless one waits already."""
        chunks = len(self.replay.hooks)
        waiting = any(each.readers == chunks for each in self._ready.values())
        if not waiting and self._made < len(self):
            self._prepare()

    def _prepare(self) -> None:
        ids, topo = self.ids[self._made], self.topo
        with record_function("pyrl: pack"):
            micro = Microbatch.of(self.batch, ids, topo, self.depths, self._upload)
            packed = PackedSequences.of(micro.layout, topo.cp_rank, topo.device, micro.positions)
            packed.tokens_ahead = tuple(ahead.tokens for ahead in micro.ahead)
        with record_function("pyrl: routes"), self.replay.clock("time/replay"):
            routes = self._routes(micro)
        self._ready[self._made] = Prepared(micro, packed, routes, len(self.replay.hooks))
        self._made += 1

    def _routes(self, micro: Microbatch) -> Routes:
        """Layers for multi-token prediction replay where the samples have rows of their own."""
        sizes, batch = self.plan.sizes, self.batch
        ids, layer_ids = batch.routes, batch.layer_ids
        if ids is None or not self.replayed:
            dtype = route_dtype(max(1, sizes.num_experts))
            ids, layer_ids = torch.zeros(len(batch.tokens), 0, sizes.topk, dtype=dtype), ()
        wanted = [
            layer
            for layer in self.replay.layers
            if self.replayed and (layer < sizes.num_hidden_layers or layer in layer_ids)
        ]
        rows = micro.router_rows(self.topo)
        return Routes.of(
            ids, layer_ids, batch.route_mask, rows, wanted, sizes.num_experts, self._upload
        )
