"""Prefetch: the microbatches of a pass, each copied to the device while another is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch.profiler import record_function

from pyrl_ext.megatron.p2p import Shape
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.pack.rank_rows import layout_of
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.plan import Plan
from pyrl_ext.replay.routed_experts import RoutedExperts
from pyrl_ext.replay.router_hook import Replay


@dataclass
class DeviceMicrobatch:
    """A microbatch on the device, with what layers and routers need in addition to its tokens.

    Args:
        micro: the rows of this rank.
        packed: for the layers.
        routes: for the routers; None on a rank without routers.
        chunks_left: model chunks that have not taken it yet.
    """

    micro: Microbatch
    packed: PackedSequences
    routes: RoutedExperts | None
    chunks_left: int


@dataclass(eq=False)
class MicrobatchPrefetcher:
    """The microbatches of this rank in one pass.

    Args:
        shard:    of this rank, on the host.
        topo:     gives this rank's place in each microbatch.
        replay:   the routers of the model.
        replayed: True if routers use the routes of the samples; else they choose.
        depths:   MTP layers whose inputs are needed.
        axes:     rows of images have positions in time, height and width.

    Raises: ValueError when routes are to be replayed and the samples have none.
    """

    shard: BatchShard
    topo: Topology
    replay: Replay
    replayed: bool
    depths: int = 0
    axes: bool = False
    _ready: dict[int, DeviceMicrobatch] = field(default_factory=dict, init=False)
    _made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.replayed and not self.shard.layer_ids:
            raise ValueError(
                "replay: the samples carry no routes; the engine must return them, or the plan "
                "must switch replay off (replay: {old: false, reference: false, train: false})"
            )
        self._upload = Upload(self.topo.device)

    def __len__(self) -> int:
        return len(self.shard.schedule)

    def handed_on(self, plan: Plan, number: int, place: int) -> Shape:
        """The shape of what the chunk at ``place`` of the pipeline hands to the next one for
        microbatch ``number``; from the MTP layers on, rows of all depths."""
        chunks = [chunk for turn in zip(*plan.stages, strict=True) for chunk in turn]
        behind = any(chunk.mtp for chunk in chunks[: place + 1])
        return self._rows[number] * (1 + self.depths * behind), 1, plan.sizes.hidden_size

    @cached_property
    def _rows(self) -> list[int]:
        """The rows of each microbatch on one tensor-parallel rank."""
        shard = self.shard
        role = self.shard.role
        groups = (shard.schedule.group_of(i, role.grid_rank) for i in range(len(self)))
        return [layout_of(g, shard.lengths, role).num_local // role.tp_size for g in groups]

    def microbatches(self, chunk: int) -> Iterator[tuple[int, DeviceMicrobatch]]:
        """(``chunk``, microbatch) in the order of the schedule, for one model chunk."""
        for number in range(len(self)):
            while self._made <= number:
                self._prepare()
            ready = self._ready[number]
            ready.chunks_left -= 1
            if not ready.chunks_left:
                del self._ready[number]
            self._upload.arrive()
            yield chunk, ready

    def prepare_next(self) -> None:
        """Start the copy of the next microbatch, unless one waits already."""
        chunks = len(self.replay.hooks)
        waiting = any(ready.chunks_left == chunks for ready in self._ready.values())
        if not waiting and self._made < len(self):
            self._prepare()

    def _prepare(self) -> None:
        shard = self.shard
        group = shard.schedule.group_of(self._made, shard.role.grid_rank)
        place = self.topo.place(group.cp_size)
        with record_function("pyrl: pack"):
            micro = Microbatch.of(shard, self._made, place, self.depths, self._upload, self.axes)
            packed = PackedSequences.of(micro)
        routes = self._routes(micro) if self.replay.layers else None
        self._ready[self._made] = DeviceMicrobatch(micro, packed, routes, len(self.replay.hooks))
        self._made += 1

    def _routes(self, micro: Microbatch) -> RoutedExperts:
        """Start the upload of the routed experts of ``micro``."""
        shard = self.shard
        replay = self.replay
        layers = replay.layers_to_replay(shard.role.layers) if self.replayed else ()
        with record_function("pyrl: routes"), replay.clock("time/replay"):
            where = self._upload, replay.shares_rows
            return RoutedExperts.of(shard, micro.at_router, layers, *replay.sizes, *where)
