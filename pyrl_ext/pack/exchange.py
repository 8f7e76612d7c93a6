"""The one exchange of a step: rows go from the ranks that own samples to those that compute them.

Which rows each rank needs of each owner follows from the schedule, which every rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.ops import gather_fields
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.delivery import Delivery, Moved, Stored
from pyrl_ext.pack.encoder_work import PatchStream
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.needs import KEPT_COUNTS, KEPT_IDS, Field, Items, Need, Needs
from pyrl_ext.pack.rank_rows import Lengths, Seat, SeatRows
from pyrl_ext.pack.schedule import Schedule
from pyrl_ext.pack.shard import BatchShard, joined
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.samples import route_dtype

PARTS = 4  # at most, of the rows of a step: a pass waits for the first one alone


def shard_batch(
    batch: Batch | None,
    index: BatchIndex,
    schedules: Sequence[Schedule],
    plan: Plan,
    topo: Topology,
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[BatchShard, Moved]:
    """The rows that this rank computes, whichever ranks own them.

    Rows of other hosts come in `PARTS`, runs of microbatches; a pass waits for a part when it comes
    to its first microbatch.

    Args:
        batch:     the samples that this rank owns, in the order of the index; None: it owns none.
            A caller that does not keep it has its memory back when other ranks see the rows.
        index:     of all samples, the same on every rank.
        schedules: of each minibatch, the same on every rank.
        waiting:   surrounds every wait for a part.

    Raises: RuntimeError naming the rank that did not send its rows, here or where a pass waits.
    Communicates: between hosts a message for each part and owner, with exactly the rows, and of the
        routes exactly the layers, that a rank computes; on a host 16 bytes of every rank, and a
        barrier.
    """
    schedule = joined(schedules)
    hosts = topo.hosts
    images = PatchStream.of(plan, index, schedule)
    exchange = Exchange(
        index,
        schedule,
        seats_of(plan, index),
        plan.sizes.num_experts,
        images,
        plan.sizes.vocab_size if plan.trains_on_sampling_mask else None,
        plan.rollout.ahead > 0,
    )
    owned = {} if batch is None else columns_of(batch, exchange.depths)
    del batch
    rows, needs = exchange.of(topo.rank)
    delivery = Delivery(topo.rank, needs, step_digest(index, schedules), waiting)
    if len({*hosts}) > 1:
        delivery.start(owned, hosts, lambda to: exchange.of(to, topo.rank)[1])
    if len({*hosts}) < topo.world_size:
        delivery.read_on_host(owned, hosts, exchange.stored_by)
    elif owned:
        delivery.take(topo.rank, owned)
    loss_tokens = tuple(
        tuple(int(n) for n in index.loss_tokens[each.samples].sum(0)) for each in schedules
    )
    seat = exchange.seats[topo.rank]
    columns = delivery.columns
    shard = BatchShard(
        schedule,
        tuple(map(len, schedules)),
        exchange.lengths,
        seat,
        rows,
        {name: column for name, column in columns.items() if name != "patches"},
        index.layer_ids,
        loss_tokens,
        {images.name: images.images(seat.replica, columns)} if images else {},
        wait_for=lambda microbatch: delivery.wait(exchange.part_of(microbatch)),
        kept_of=partial(exchange.kept_rows, delivery, rows) if exchange.kept(seat) else None,
    )
    return shard, delivery.moved


def step_digest(index: BatchIndex, schedules: Sequence[Schedule]) -> int:
    """32 bits, equal on ranks that know the same numbers of samples and plan the same."""
    return index.digest ^ joined(schedules).digest


def seats_of(plan: Plan, index: BatchIndex) -> list[Seat]:
    """[W] the part of a step that every rank computes."""
    parallel = plan.parallel
    last = plan.parallel.pp - 1
    decoder = plan.sizes.num_hidden_layers
    mtp = range(decoder, decoder + plan.num_mtp_layers)
    held = [
        {i for chunk in stage for i in (*chunk.layers, *(mtp if chunk.mtp else ()))}
        for stage in plan.stages
    ]
    routed = index.layer_ids if plan.replay.enabled else ()
    layers = [tuple(i for i in routed if i in stage) for stage in held]
    seats = [Seat(-1, last_stage=False)] * plan.world_size
    for name, grid in plan.grids.items():
        for r in map(grid.place, grid.ranks):
            if name == "llm":
                shared = r.dp * parallel.cp + r.cp, r.tp, parallel.tp
                seats[r.rank] = Seat(*shared, r.pp == last, layers[r.pp], plan.tile_rows)
            elif r.pp == 0:
                seats[r.rank] = seats[r.rank]._replace(replica=r.dp)
    return seats


def columns_of(batch: Batch, depths: int) -> dict[str, Tensor]:
    """All columns of ``batch`` that a rank may need, in narrow types.

    Args:
        depths: MTP layers. Depth d predicts the token d further on; where the sample has ended its
            target is 0, outside the loss mask.
    """
    rows = torch.arange(len(batch.tokens))
    columns = {"tokens": batch.tokens.int()}
    for depth in range(1 + depths):
        ahead = batch.rows_ahead(rows, depth) if depth else rows
        fields = gather_fields([batch.targets, batch.loss_mask], ahead, [0.0, 0.0]).views
        columns[f"targets_{depth}"], columns[f"loss_mask_{depth}"] = fields[0].int(), fields[1]
    columns |= {"rollout_logprobs": batch.rollout_logprobs, "advantages": batch.advantages}
    if batch.routes is not None:
        columns |= {"routes": batch.routes, "route_mask": batch.route_mask}
    if batch.patches is not None:
        columns["patches"] = batch.patches
    if batch.versions is not None:
        columns["versions"] = batch.versions
    if batch.kept is not None:
        columns |= {"kept_counts": batch.kept.counts, "kept_ids": batch.kept.ids}
    return columns


class Exchange:
    """Who owns and who needs which rows of a step; the same on every rank.

    Args:
        images: the patches that an encoder reads; None: there is none.
        vocab_size: of the vocabulary of kept sets; None: rows have none.
        aged: rows have the version of the weights that sampled their target.

    Attributes:
        depths: MTP layers whose targets move.
        lengths: of all samples.
    """

    def __init__(
        self,
        index: BatchIndex,
        schedule: Schedule,
        seats: Sequence[Seat],
        num_experts: int,
        images: PatchStream | None = None,
        vocab_size: int | None = None,
        aged: bool = False,
    ):
        self.aged = aged
        self.index = index
        self.schedule = schedule
        self.seats = seats
        self.images = images
        self.depths = index.loss_tokens.shape[1] - 1
        self.lengths = Lengths(index.seqlens, index.starts)
        self.items = Items(self.lengths, index.owners)
        self._routed = any(seat.layers for seat in seats)
        self._route_dtype = route_dtype(num_experts)
        self._vocab_size = vocab_size
        parts = min(PARTS, len(schedule))
        self._first = np.arange(parts + 1) * len(schedule) // parts  # microbatch of each part
        self._found: dict[tuple[int, int, int | None], SeatRows] = {}

    def part_of(self, microbatch: int) -> int:
        """The part in which the rows of a microbatch come."""
        return int(np.searchsorted(self._first, microbatch, side="right")) - 1

    def kept_rows(self, delivery: Delivery, rows: SeatRows, microbatch: int) -> KeptSets:
        """The kept sets of the ``rows`` of ``microbatch``, which were delivered."""
        first, end = rows.first_token[microbatch : microbatch + 2]
        return delivery.kept.rows(self.part_of(microbatch), int(first), int(end))

    def of(self, rank: int, owner: int | None = None) -> tuple[SeatRows, Needs]:
        """The rows that ``rank`` computes, and what it needs of each stream.

        Args:
            owner: only of its rows; None: of all.
        """
        seat = self.seats[rank]
        key = seat.grid_rank, seat.tp_rank, owner  # the same rows on every pipeline stage
        if key not in self._found:
            owned = None if owner is None else self.index.owners == owner
            self._found[key] = SeatRows.of(self.schedule, self.lengths, seat, owned)
        rows = self._found[key]
        fields = self.fields(seat)
        streams = {
            "tokens": (rows.tokens, rows.first_token),
            "routers": (rows.routers, rows.first_router),
        }
        needs = {
            name: Need(self.items, found, first[self._first], fields[name])
            for name, (found, first) in streams.items()
            if fields[name]
        }
        if kept := self.kept(seat):
            needs["tokens"] = needs["tokens"]._replace(kept=kept)
        if self.images and seat.replica >= 0:
            needs["patches"] = self.images.need(seat.replica, self._first, owner)
        return rows, needs

    def kept(self, seat: Seat) -> tuple[int, int] | None:
        """[first, end) of the vocabulary, the shard of ``seat``; None: it needs no kept sets."""
        if self._vocab_size is None or not seat.last_stage:
            return None
        columns = -(-self._vocab_size // seat.tp_size)
        return seat.tp_rank * columns, (seat.tp_rank + 1) * columns

    def fields(self, seat: Seat) -> dict[str, dict[str, Field]]:
        """Stream -> column -> what ``seat`` needs of it."""
        tokens = {"tokens": Field("tokens", torch.int32)}
        for depth in range(1 + self.depths):
            tokens[f"targets_{depth}"] = Field("tokens", torch.int32)
            tokens[f"loss_mask_{depth}"] = Field("tokens", torch.bool)
        if seat.last_stage:
            for name in ("rollout_logprobs", "advantages"):
                tokens[name] = Field("logprobs", torch.float32)
            if self.aged:
                tokens["versions"] = Field("logprobs", torch.int32)
        routers: dict[str, Field] = {}
        if seat.layers:
            shape = len(seat.layers), self.index.topk
            slots = tuple(self.index.layer_ids.index(i) for i in seat.layers)
            routers["routes"] = Field("routes", self._route_dtype, shape, slots)
            routers["route_mask"] = Field("routes", torch.bool)
        return {"tokens": tokens, "routers": routers}

    def stored_by(self, owner: int) -> Stored:
        """How ``owner`` lays out its samples for the ranks of its host."""
        rows = self.items.rows_held_by(owner)
        everything = self.fields(Seat(layers=self.index.layer_ids if self._routed else ()))
        streams = [(rows, fields) for fields in everything.values()]
        if self._vocab_size is not None:
            ids = int(self.index.kept[self.index.owners == owner].sum())
            streams += [(rows, KEPT_COUNTS), (ids, KEPT_IDS)]
        if self.images:
            streams.append((self.images.items.rows_held_by(owner), self.images.fields))
        return Stored.of(streams)
