"""The one exchange of a step: rows go from the ranks that own samples to those that compute them.

Every rank derives from the schedule which rows each rank needs of each owner, so all sizes are
known beforehand. Ranks of one host read each other's samples in shared memory.
"""

# torch.distributed is not fully typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.dist.buckets import Bucket, aligned
from pyrl_ext.dist.shared_memory import SharedBlock, map_block
from pyrl_ext.dist.topology import Topology
from pyrl_ext.ops import gather_fields
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Schedule
from pyrl_ext.pack.shard import BatchShard, Lengths, Seat, SeatRows, joined
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.ranks import ranks
from pyrl_ext.samples import route_dtype

Columns = Mapping[str, Tensor]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
KINDS = ("tokens", "logprobs", "routes")


def kind_of(column: str) -> str:
    """The kind of a column, one of KINDS."""
    if column.startswith("route"):
        return "routes"
    return "logprobs" if column in ("rollout_logprobs", "advantages") else "tokens"


@dataclass
class Moved:
    """Bytes that this rank received from other ranks, by kind of column.

    Args:
        network: between hosts.
        shared:  read in the memory of other processes of this host.
    """

    network: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    shared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def metrics(self, topo: Topology) -> dict[str, float]:
        """``batch/moved_bytes`` of all ranks, by kind, and ``batch/shared_bytes``.

        Communicates: an all-reduce of 4 numbers.
        """
        counts = torch.tensor([*self.network.values(), sum(self.shared.values())])
        if topo.world_size > 1:
            dist.all_reduce(counts)
        *network, shared = counts.tolist()
        kinds = {f"batch/moved_bytes/{k}": n for k, n in zip(KINDS, network, strict=True)}
        return {"batch/moved_bytes": sum(network), **kinds, "batch/shared_bytes": shared}


def shard_batch(
    batch: Batch | None,
    index: BatchIndex,
    schedules: Sequence[Schedule],
    plan: Plan,
    topo: Topology,
) -> tuple[BatchShard, Moved]:
    """The rows that this rank computes, whichever ranks own them.

    Args:
        batch:     the samples that this rank owns, in the order of the index; None: it owns none.
        index:     of all samples, the same on every rank.
        schedules: of each minibatch, the same on every rank.

    Communicates: between hosts one all-to-all, with exactly the rows, and of the routes exactly the
        layers, that each rank computes; on a host 16 bytes of every rank, and a barrier.
    """
    exchange = Exchange(index, joined(schedules), seats_of(plan, index), plan.sizes.num_experts)
    owned = {} if batch is None else columns_of(batch, exchange.depths)
    delivery = Delivery(exchange, topo.rank)
    if owned:
        delivery.take(topo.rank, owned)
    if len({*topo.hosts}) < topo.world_size:
        delivery.read_on_host(owned, topo.hosts)
    if len({*topo.hosts}) > 1:
        delivery.receive(owned, topo.hosts)
    loss_tokens = tuple(
        tuple(int(n) for n in index.loss_tokens[each.samples].sum(0)) for each in schedules
    )
    shard = BatchShard(
        exchange.schedule,
        tuple(map(len, schedules)),
        exchange.lengths,
        exchange.seats[topo.rank],
        delivery.rows,
        delivery.columns,
        index.layer_ids,
        loss_tokens,
    )
    return shard, delivery.moved


def seats_of(plan: Plan, index: BatchIndex) -> list[Seat]:
    """[W] the part of a step that every rank computes."""
    parallel, last = plan.parallel, plan.parallel.pp - 1
    decoder = plan.sizes.num_hidden_layers
    mtp = range(decoder, decoder + plan.num_mtp_layers)
    held = [
        {i for chunk in stage for i in (*chunk.layers, *(mtp if chunk.mtp else ()))}
        for stage in plan.stages
    ]
    routed = index.layer_ids if plan.replay.enabled else ()
    layers = [tuple(i for i in routed if i in stage) for stage in held]
    fp8 = plan.model.fp8 is not None
    seats = [
        Seat(r.dp * parallel.cp + r.cp, r.tp, parallel.tp, r.pp == last, layers[r.pp], fp8)
        for r in ranks(parallel)
    ]
    return seats + [Seat(-1, last_stage=False)] * (plan.world_size - len(seats))


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
    return columns


class Stored(NamedTuple):
    """The layout of columns in one block of memory."""

    bucket: Bucket

    @classmethod
    def of(cls, shapes: Shapes) -> Stored:
        return cls(Bucket.of((name, *shape) for name, shape in shapes.items()))

    @property
    def bytes(self) -> int:
        """Size of the block; blocks that follow each other stay aligned."""
        return aligned(self.bucket.bytes)

    def read(self, memory: Tensor) -> dict[str, Tensor]:
        """The columns as views of ``memory``, [bytes] uint8."""
        return {slot.name: slot.view(memory) for slot in self.bucket.slots}

    def write(self, memory: Tensor, columns: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the columns that have a place in ``memory`` there."""
        there = self.read(memory)
        for name, column in columns:
            if name in there:
                there[name].copy_(column)


class Exchange:
    """Who owns and who needs which rows of a step; the same on every rank.

    Attributes:
        depths: MTP layers whose targets move.
        lengths: of all samples.
    """

    def __init__(
        self, index: BatchIndex, schedule: Schedule, seats: Sequence[Seat], num_experts: int
    ):
        self.index, self.schedule, self.seats = index, schedule, seats
        self.depths = index.loss_tokens.shape[1] - 1
        self.lengths = Lengths(index.seqlens, index.starts)
        self.routed = any(seat.layers for seat in seats)
        self._route_dtype = route_dtype(num_experts)

    @cached_property
    def _starts_at_owner(self) -> np.ndarray:
        """[S] first row of each sample among those of its owner."""
        order = np.argsort(self.index.owners, kind="stable")
        lengths, owners = self.index.seqlens[order].astype(np.int64), self.index.owners[order]
        starts = np.cumsum(lengths) - lengths
        found = np.empty_like(starts)
        found[order] = starts - starts[np.searchsorted(owners, owners)]
        return found

    def owners_of(self, rows: np.ndarray) -> np.ndarray:
        """[M] owner of each row."""
        return self.index.owners[self.lengths.sample_of(rows)]

    def at_owner(self, rows: np.ndarray) -> Tensor:
        """[M] int64, place of each row among those of its owner."""
        samples = self.lengths.sample_of(rows)
        at = rows - self.lengths.starts[samples] + self._starts_at_owner[samples]
        return torch.from_numpy(at)

    def shapes(self, seat: Seat, tokens: int, routers: int) -> Shapes:
        """Column -> dtype and shape of what ``seat`` needs of so many rows."""
        ids, numbers = (torch.int32, (tokens,)), (torch.float32, (tokens,))
        found: Shapes = {"tokens": ids}
        for depth in range(1 + self.depths):
            found |= {f"targets_{depth}": ids, f"loss_mask_{depth}": (torch.bool, (tokens,))}
        if seat.last_stage:
            found |= {"rollout_logprobs": numbers, "advantages": numbers}
        if seat.layers:
            routes = routers, len(seat.layers), self.index.topk
            found |= {"routes": (self._route_dtype, routes), "route_mask": (torch.bool, (routers,))}
        return found

    def stored_by(self, owner: int) -> Stored:
        """How ``owner`` lays out its samples for others."""
        rows = int(self.index.seqlens[self.index.owned_by(owner)].sum())
        everything = Seat(layers=self.index.layer_ids if self.routed else ())
        return Stored.of(self.shapes(everything, rows, rows) if rows else {})

    def message(self, seat: Seat, rows: SeatRows) -> Stored:
        """The layout of ``rows``, all of one owner, on their way to ``seat``."""
        tokens, routers = len(rows.tokens), len(rows.routers)
        return Stored.of(self.shapes(seat, tokens, routers) if tokens else {})

    def pick(self, columns: Columns, seat: Seat, rows: SeatRows) -> Iterator[tuple[str, Tensor]]:
        """The columns that ``seat`` needs of ``rows``; their owner has ``columns``."""
        tokens, routers = self.at_owner(rows.tokens), self.at_owner(rows.routers)
        for name in self.shapes(seat, 0, 0):
            if name == "routes":
                slots = torch.tensor([self.index.layer_ids.index(i) for i in seat.layers])
                routes = _bits(columns[name]).index_select(0, routers).index_select(1, slots)
                yield name, routes.view(self._route_dtype)
            else:
                at = routers if kind_of(name) == "routes" else tokens
                yield name, columns[name].index_select(0, at)


class Delivery:
    """The rows that arrive at one rank.

    Attributes:
        rows: that it computes.
        columns: of these rows.
        moved: what other ranks sent.
    """

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.rank, self.seat = exchange, rank, exchange.seats[rank]
        self.rows = SeatRows.of(exchange.schedule, exchange.lengths, self.seat)
        self.moved = Moved()
        self._owners = tuple(map(exchange.owners_of, (self.rows.tokens, self.rows.routers)))
        sizes = len(self.rows.tokens), len(self.rows.routers)
        shapes = exchange.shapes(self.seat, *sizes)
        self.columns = {name: torch.empty(s, dtype=dtype) for name, (dtype, s) in shapes.items()}
        self._is_owned = exchange.index.owners == rank
        self._asked: dict[tuple[int, int], SeatRows] = {}

    def rows_of(self, owner: int) -> SeatRows:
        """The rows that it needs of ``owner``."""
        tokens, routers = self._owners
        return self.rows._replace(
            tokens=self.rows.tokens[tokens == owner], routers=self.rows.routers[routers == owner]
        )

    def take(self, owner: int, columns: Columns) -> dict[str, int]:
        """Store what it needs of the columns of ``owner``; returns bytes by kind."""
        rows = self.rows_of(owner)
        return self._put(owner, self.exchange.pick(columns, self.seat, rows))

    def _put(self, owner: int, parts: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        tokens, routers = (
            torch.from_numpy(np.flatnonzero(owners == owner)) for owners in self._owners
        )
        sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
        for name, part in parts:
            kind = kind_of(name)
            at = routers if kind == "routes" else tokens
            _bits(self.columns[name]).index_copy_(0, at, _bits(part))
            sizes[kind] += part.nbytes
        return sizes

    def read_on_host(self, owned: Columns, hosts: Sequence[int]) -> None:
        """Read the samples of the other ranks of this host in their memory.

        Args:
            owned: columns of this rank's samples.
            hosts: [W] `host_key` of every rank.

        Communicates: 16 bytes of every rank, and a barrier.
        """
        stored = self.exchange.stored_by(self.rank)
        block = SharedBlock(stored.bytes) if stored.bytes else None
        if block is not None:
            stored.write(block.memory, owned.items())
        mine = torch.tensor([os.getpid(), -1 if block is None else block.file])
        everyone = [torch.empty_like(mine) for _ in hosts]
        dist.all_gather(everyone, mine)
        for owner, host in enumerate(hosts):
            if host != hosts[self.rank] or owner == self.rank:
                continue
            if (there := self.exchange.stored_by(owner)).bytes:
                process, file = everyone[owner].tolist()
                columns = there.read(map_block(process, file, there.bytes))
                _add(self.moved.shared, self.take(owner, columns))
        dist.barrier()  # a block stays open until everyone has mapped it
        if block is not None:
            block.close()

    def receive(self, owned: Columns, hosts: Sequence[int]) -> None:
        """Exchange rows with the ranks of other hosts. Communicates: one all-to-all."""
        outgoing = [self._message(to, owned, hosts) for to in range(len(hosts))]
        incoming = [self._expected(owner, hosts) for owner in range(len(hosts))]
        sizes = [stored.bytes for stored in incoming]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        sent = torch.cat(outgoing)
        dist.all_to_all_single(received, sent, sizes, [len(part) for part in outgoing])
        for owner, (stored, memory) in enumerate(zip(incoming, received.split(sizes), strict=True)):
            if stored.bytes:
                columns = stored.read(memory)
                _add(self.moved.network, self._put(owner, columns.items()))

    def _expected(self, owner: int, hosts: Sequence[int]) -> Stored:
        """The layout of the message from ``owner``."""
        if hosts[owner] == hosts[self.rank]:
            return Stored.of({})
        rows = self.rows_of(owner)
        return self.exchange.message(self.seat, rows)

    def _message(self, to: int, owned: Columns, hosts: Sequence[int]) -> Tensor:
        """[bytes] uint8, what rank ``to`` needs of this rank's samples."""
        if hosts[to] == hosts[self.rank] or not owned:
            return torch.empty(0, dtype=torch.uint8)
        seat = self.exchange.seats[to]
        rows = self._wanted(seat.grid_rank, seat.tp_rank)
        stored = self.exchange.message(seat, rows)
        memory = torch.empty(stored.bytes, dtype=torch.uint8)
        if stored.bytes:
            stored.write(memory, self.exchange.pick(owned, seat, rows))
        return memory

    def _wanted(self, grid_rank: int, tp_rank: int) -> SeatRows:
        """The rows of this rank's samples that every pipeline stage of a seat computes."""
        if (grid_rank, tp_rank) not in self._asked:
            exchange = self.exchange
            seat = self.seat._replace(grid_rank=grid_rank, tp_rank=tp_rank)
            rows = SeatRows.of(exchange.schedule, exchange.lengths, seat, self._is_owned)
            self._asked[grid_rank, tp_rank] = rows
        return self._asked[grid_rank, tp_rank]


def _bits(column: Tensor) -> Tensor:
    """``column``; torch selects and copies no rows of uint16, so its bits as int16."""
    return column.view(torch.int16) if column.dtype == torch.uint16 else column


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for kind, size in more.items():
        total[kind] += size
