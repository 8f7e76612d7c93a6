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
from pyrl_ext.pack.delivery import Delivery, TransferStats, block_of
from pyrl_ext.pack.encoder_work import PatchStream
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.needs import KEPT_COUNTS, KEPT_IDS, Field, Items, NeededRows, Needs
from pyrl_ext.pack.rank_rows import Lengths, RankRole, RankRows
from pyrl_ext.pack.shard import BatchShard, joined
from pyrl_ext.parallel.buckets import Bucket
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.samples import route_dtype
from pyrl_ext.schedule import Schedule

PARTS = 4  # at most, of the rows of a step: a pass waits for the first one alone


def shard_batch(
    batch: Batch | None,
    index: BatchIndex,
    schedules: Sequence[Schedule],
    plan: Plan,
    topo: Topology,
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    taught: bool = False,
) -> tuple[BatchShard, TransferStats]:
    """The rows that this rank computes, whichever ranks own them.

    Rows of other hosts come in `PARTS`, runs of microbatches; a pass waits for a part when it comes
    to its first microbatch.

    Args:
        batch:     the samples that this rank owns, in the order of the index; None: it owns none.
            A caller that does not keep it has its memory back when other ranks see the rows.
        index:     of all samples, the same on every rank.
        schedules: of each minibatch, the same on every rank.
        waiting:   surrounds every wait for a part.
        taught:    batches have ``teacher_logprobs``, which move too.

    Raises: RuntimeError naming the rank that did not send its rows, here or where a pass waits.
    Communicates: between hosts a message for each part and owner, with exactly the rows, and of the
        routes exactly the layers, that a rank computes; on a host 16 bytes of every rank, and a
        barrier.
    """
    schedule = joined(schedules)
    hosts = topo.hosts
    images = PatchStream.of(plan, index, schedule)
    exchange = RowExchange(
        index,
        schedule,
        roles_of(plan, index),
        plan.sizes.num_experts,
        images,
        vocab_size=plan.sizes.vocab_size if plan.trains_on_sampling_mask else None,
        aged=plan.rollout.ahead > 0,
        taught=taught,
    )
    owned = {} if batch is None else columns_of(batch, exchange.depths)
    del batch
    rows, needs = exchange.of(topo.rank)
    delivery = Delivery(topo.rank, needs, step_digest(index, schedules), waiting)
    if len({*hosts}) > 1:
        delivery.start(owned, hosts, lambda to: exchange.of(to, topo.rank)[1])
    if len({*hosts}) < topo.world_size:
        delivery.read_on_host(owned, hosts, exchange.block_layout)
    elif owned:
        delivery.take(topo.rank, owned)
    loss_tokens = tuple(
        tuple(int(n) for n in index.loss_tokens[each.samples].sum(0)) for each in schedules
    )
    role = exchange.roles[topo.rank]
    columns = delivery.columns
    shard = BatchShard(
        schedule,
        tuple(map(len, schedules)),
        exchange.lengths,
        role,
        rows,
        {name: column for name, column in columns.items() if name != "patches"},
        index.layer_ids,
        loss_tokens,
        {images.name: images.images(role.replica, columns)} if images else {},
        wait_for=lambda microbatch: delivery.wait(exchange.part_of(microbatch)),
        kept_of=partial(exchange.kept_rows, delivery, rows) if exchange.kept(role) else None,
    )
    return shard, delivery.stats


def step_digest(index: BatchIndex, schedules: Sequence[Schedule]) -> int:
    """32 bits, equal on ranks that know the same numbers of samples and plan the same."""
    return index.digest ^ joined(schedules).digest


def roles_of(plan: Plan, index: BatchIndex) -> list[RankRole]:
    """[W] the part of a step that every rank computes."""
    parallel = plan.parallel
    routed_layers = [_routed_layers(plan, index, stage) for stage in plan.stages]
    roles = [RankRole(-1, last_stage=False)] * plan.world_size
    for name, grid in plan.grids.items():
        for place in map(grid.place, grid.ranks):
            if name == "llm":
                roles[place.rank] = RankRole(
                    grid_rank=place.dp * parallel.cp + place.cp,
                    tp_rank=place.tp,
                    tp_size=parallel.tp,
                    last_stage=place.pp == parallel.pp - 1,
                    layers=routed_layers[place.pp],
                    tile_rows=plan.tile_rows,
                )
            elif place.pp == 0:
                roles[place.rank] = roles[place.rank]._replace(replica=place.dp)
    return roles


def _routed_layers(plan: Plan, index: BatchIndex, stage: Sequence[ModelChunk]) -> tuple[int, ...]:
    """Layers of a pipeline stage that replay samples' routes, ascending; MTP layers come last."""
    if not plan.replay.of_engine:
        return ()
    num_layers = plan.sizes.num_hidden_layers
    layers: set[int] = set()
    for chunk in stage:
        layers.update(chunk.layers)
        if chunk.mtp:
            layers.update(range(num_layers, num_layers + plan.num_mtp_layers))
    return tuple(layer for layer in index.layer_ids if layer in layers)


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
        columns[f"targets_{depth}"] = fields[0].int()
        columns[f"loss_mask_{depth}"] = fields[1]
    columns |= {"rollout_logprobs": batch.rollout_logprobs, "advantages": batch.advantages}
    if batch.routes is not None:
        columns |= {"routes": batch.routes, "route_mask": batch.route_mask}
    if batch.patches is not None:
        columns["patches"] = batch.patches
    if batch.versions is not None:
        columns["versions"] = batch.versions
    if batch.teacher_logprobs is not None:
        columns["teacher_logprobs"] = batch.teacher_logprobs
    if batch.kept is not None:
        columns |= {"kept_counts": batch.kept.counts, "kept_ids": batch.kept.ids}
    return columns


class RowExchange:
    """Who owns and who needs which rows of a step; the same on every rank.

    Args:
        images: the patches that an encoder reads; None: there is none.
        vocab_size: of the vocabulary of kept sets; None: rows have none.
        aged: rows have the version of the weights that sampled their target.
        taught: rows have the log-prob of their target under a teacher on servers.

    Attributes:
        depths: MTP layers whose targets move.
        lengths: of all samples.
    """

    def __init__(
        self,
        index: BatchIndex,
        schedule: Schedule,
        roles: Sequence[RankRole],
        num_experts: int,
        images: PatchStream | None = None,
        vocab_size: int | None = None,
        aged: bool = False,
        taught: bool = False,
    ):
        self.index = index
        self.schedule = schedule
        self.roles = roles
        self.images = images
        self.aged = aged
        self.taught = taught
        self.depths = index.loss_tokens.shape[1] - 1
        self.lengths = Lengths(index.seqlens, index.starts)
        self.items = Items(self.lengths, index.owners)
        self._route_dtype = route_dtype(num_experts)
        self._vocab_size = vocab_size
        parts = min(PARTS, len(schedule))
        self._first = np.arange(parts + 1) * len(schedule) // parts  # microbatch of each part
        self._rows: dict[tuple[int, int, int | None], RankRows] = {}

    def part_of(self, microbatch: int) -> int:
        """The part in which the rows of a microbatch come."""
        return int(np.searchsorted(self._first, microbatch, side="right")) - 1

    def kept_rows(self, delivery: Delivery, rows: RankRows, microbatch: int) -> KeptSets:
        """The kept sets of the ``rows`` of ``microbatch``, which were delivered."""
        first, end = rows.first_token[microbatch : microbatch + 2]
        return delivery.kept(self.part_of(microbatch), int(first), int(end))

    def of(self, rank: int, owner: int | None = None) -> tuple[RankRows, Needs]:
        """The rows that ``rank`` computes, and what it needs of each stream.

        Args:
            owner: only of its rows; None: of all.
        """
        role = self.roles[rank]
        key = role.grid_rank, role.tp_rank, owner  # the same rows on every pipeline stage
        if key not in self._rows:
            owned = None if owner is None else self.index.owners == owner
            self._rows[key] = RankRows.of(self.schedule, self.lengths, role, owned)
        rows = self._rows[key]
        fields = self.fields(role)
        cuts = rows.first_token[self._first]
        needs = {
            "tokens": NeededRows(self.items, rows.tokens, cuts, fields["tokens"], self.kept(role)),
        }
        if fields["routers"]:
            cuts = rows.first_router[self._first]
            needs["routers"] = NeededRows(self.items, rows.routers, cuts, fields["routers"])
        if self.images and role.replica >= 0:
            needs["patches"] = self.images.need(role.replica, self._first, owner)
        return rows, needs

    def kept(self, role: RankRole) -> tuple[int, int] | None:
        """[first, end) of the vocabulary, the shard of ``role``; None: it needs no kept sets."""
        if self._vocab_size is None or not role.last_stage:
            return None
        columns = -(-self._vocab_size // role.tp_size)
        return role.tp_rank * columns, (role.tp_rank + 1) * columns

    def fields(self, role: RankRole) -> dict[str, dict[str, Field]]:
        """Stream -> column -> what ``role`` needs of it."""
        tokens = {"tokens": Field("tokens", torch.int32)}
        for depth in range(1 + self.depths):
            tokens[f"targets_{depth}"] = Field("tokens", torch.int32)
            tokens[f"loss_mask_{depth}"] = Field("tokens", torch.bool)
        if role.last_stage:
            scored = ("teacher_logprobs",) if self.taught else ()
            for name in ("rollout_logprobs", "advantages", *scored):
                tokens[name] = Field("logprobs", torch.float32)
            if self.aged:
                tokens["versions"] = Field("logprobs", torch.int32)
        routers: dict[str, Field] = {}
        if role.layers:
            shape = len(role.layers), self.index.topk
            slots = tuple(self.index.layer_ids.index(i) for i in role.layers)
            routers["routes"] = Field("routes", self._route_dtype, shape, slots)
            routers["route_mask"] = Field("routes", torch.bool)
        return {"tokens": tokens, "routers": routers}

    def block_layout(self, owner: int) -> Bucket:
        """The layout of the samples of ``owner`` for the ranks of its host."""
        rows = self.items.rows_held_by(owner)
        routed = any(role.layers for role in self.roles)
        everything = self.fields(RankRole(layers=self.index.layer_ids if routed else ()))
        streams = [(rows, fields) for fields in everything.values()]
        if self._vocab_size is not None:
            ids = int(self.index.kept[self.index.owners == owner].sum())
            streams += [(rows, KEPT_COUNTS), (ids, KEPT_IDS)]
        if self.images:
            streams.append((self.images.items.rows_held_by(owner), self.images.fields))
        return block_of(streams)
