"""Edges between modules as operations of autograd: each module runs its own megatron schedule.

An encoder's last stage ends in `give`, the "loss" of its schedule: forward sends rows to the ranks
that embed them, backward waits for their gradients. A reader's first stage begins with `Edge.take`:
leaf tensors whose gradients go back as soon as they are complete. MTP layers, which embed the same
rows one row earlier and on another stage, have separate edges. Who sends which rows to whom
follows from the batch (`pack/encoder_work.py`), so no shapes are exchanged, and nothing is sent
where no row is wanted. Each rank gets the rows of its shard alone, and sends back their gradient.

A rank waits where it receives; a launch of sends alone is waited for at the end of a pass. So
modules of any depth and any schedule can be joined, if an encoder's schedule runs as far ahead as
its readers do (`RunsAhead`, `ahead_of`). On a GPU a send ends when the other rank receives it, and
what a rank launches later in the same group begins after that. Three things keep ranks from waiting
for each other in a circle: each way of an edge has a group, whose communicator all its ranks make
when the run starts (`GroupMaker.connect`); all messages of a rank for one microbatch and way are
one launch; and all ranks launch in the order of microbatches.

Where an encoder shares the ranks of its reader's first stage, both ends are in one graph: `swap` is
sender and receiver at once, and the reader's backward continues into the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.megatron.p2p import KnownShapes
from pyrl_ext.ops.tensors import dtype_of, to_device
from pyrl_ext.pack.encoder_work import EncoderWork, Route
from pyrl_ext.pack.rank_rows import RankRole
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.groups import reading_stage, source_ranks

# (the other rank, rows [n, width]) of every message of one launch
Messages = list[tuple[int, Tensor]]

# (rank, number of rows) of each sender of a microbatch
Senders = Sequence[tuple[int, int]]


class Arriving(NamedTuple):
    """The rows of one microbatch that other ranks send to a reading rank.

    Args:
        dest: [n] int64, rows of its shard, on the host.
        values: [n, width], in the order of ``dest``.
        senders: global rank and number of rows of each; their rows follow each other.
    """

    dest: Tensor
    values: Tensor
    senders: Senders


class Sending(NamedTuple):
    """A launch of sends alone, with the rows, which stay in memory until it is complete."""

    works: list[Any]
    messages: Messages

    @property
    def is_complete(self) -> bool:
        return all(work.is_completed() for work in self.works)


@dataclass(eq=False)
class Edge:
    """From an encoder's last stage to the stage of a module that reads it.

    Args:
        sources: global rank of each replica of the encoder that sends.
        readers: global rank -> its role, as the routes know it.
        there, back: process groups of all these ranks, one a direction, so that neither way waits
            for the other.
        width: first numbers of a row that are read.
        dtype: of the rows and their gradients.
        trained: True if gradients go back.
        depth: of the MTP layer that reads; 0: the first stage.

    Attributes:
        sent: bytes that this rank sent ``there`` and ``back``.
    """

    sources: Sequence[int]
    readers: Mapping[int, Any]
    there: dist.ProcessGroup
    back: dist.ProcessGroup
    width: int
    dtype: torch.dtype
    device: torch.device
    trained: bool = True
    depth: int = 0
    sent: dict[str, int] = field(default_factory=lambda: {"there": 0, "back": 0}, init=False)
    _pending: list[Sending] = field(default_factory=list[Sending], init=False)

    def take(self, work: EncoderWork, microbatch: int) -> list[tuple[Tensor, Tensor]]:
        """On a reading rank: (rows of its shard [n] int64, their values [n, width]) of all senders,
        in one piece; [] if there are none. The values are a leaf of autograd, whose gradient goes
        back as soon as it is complete.

        Communicates: receives the values.
        """
        arriving = self.arriving(work, microbatch)
        self.exchange("there", [], _by_sender(arriving.values, arriving.senders))
        if not arriving.senders:
            return []
        if self.trained and torch.is_grad_enabled():
            arriving.values.requires_grad_()
            send_back = partial(self._send_leaf, arriving.senders)
            arriving.values.register_post_accumulate_grad_hook(send_back)
        return [(to_device(arriving.dest, self.device), arriving.values)]

    def _send_leaf(self, senders: Senders, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self.exchange("back", _by_sender(leaf.grad, senders), [])
        leaf.grad = None

    def arriving(self, work: EncoderWork, microbatch: int) -> Arriving:
        """On a reading rank: what every other rank sends; the values have yet to be received."""
        me = dist.get_rank()
        senders = list[tuple[int, int]]()
        parts = [torch.empty(0, dtype=torch.int64)]
        for replica, rank in enumerate(self.sources):
            if rank == me:
                continue
            dest = self.route(work, microbatch, replica, me).dest
            if len(dest):
                senders.append((rank, len(dest)))
                parts.append(dest)
        dest = torch.cat(parts)
        return Arriving(dest, self._empty(len(dest)), senders)

    def leaving(self, work: EncoderWork, microbatch: int, replica: int, output: Tensor) -> Messages:
        """On a sending rank: its rows for every other rank that reads some."""
        messages: Messages = []
        for rank, route in self._reached(work, microbatch, replica):
            source = to_device(route.source, self.device)
            rows = output[:, : self.width].index_select(0, source)
            messages.append((rank, rows.to(self.dtype)))
        return messages

    def send(self, work: EncoderWork, microbatch: int, replica: int, output: Tensor) -> None:
        """On a sending rank: its rows to every other rank that reads some."""
        self.exchange("there", self.leaving(work, microbatch, replica, output), [])

    def gradients(
        self, work: EncoderWork, microbatch: int, replica: int, sends: Messages
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """On a sending rank: (rows of the output, their gradients) of every other rank that reads
        some.

        Args:
            sends: gradients that this rank, a reader as well, owes other ranks.

        Communicates: receives the same number of elements as `send` sent.
        """
        reached = list(self._reached(work, microbatch, replica))
        grads = [(rank, self._empty(len(route.source))) for rank, route in reached]
        self.exchange("back", sends, grads)
        for (_, route), (_, grad) in zip(reached, grads, strict=True):
            yield to_device(route.source, self.device), grad

    def exchange(self, way: str, sends: Messages, receives: Messages) -> None:
        """All messages of this rank for one microbatch and way, in one launch.

        Args:
            way: ``there`` or ``back``.
            receives: memory to receive into.

        Communicates: returns once ``receives`` have arrived; on a GPU its stream waits for them.
            Without any, the sends are on their way.
        """
        # NCCL tells when sends are complete, gloo not before they are waited for
        self._pending = [sending for sending in self._pending if not sending.is_complete]
        group = self.there if way == "there" else self.back
        ops = [dist.P2POp(dist.isend, rows, rank, group) for rank, rows in sends]
        ops += [dist.P2POp(dist.irecv, rows, rank, group) for rank, rows in receives]
        if not ops:
            return
        self.sent[way] += sum(rows.nbytes for _, rows in sends)
        works = dist.batch_isend_irecv(ops)
        if not receives:
            self._pending.append(Sending(works, sends))
            return
        for work in works:  # NCCL has one for the whole launch, gloo one a message
            work.wait()

    def finish(self) -> None:
        """Wait, at the end of a pass, until all that was sent has arrived."""
        for sending in self._pending:
            for work in sending.works:
                work.wait()
        self._pending.clear()

    def route(self, work: EncoderWork, microbatch: int, replica: int, reader: int) -> Route:
        """The rows of a microbatch that a replica of the encoder sends to a reading rank."""
        return work.route(microbatch, replica, self.readers[reader], depth=self.depth)

    def _reached(
        self, work: EncoderWork, microbatch: int, replica: int
    ) -> Iterator[tuple[int, Route]]:
        for rank in self.readers:
            if rank == dist.get_rank():
                continue
            route = self.route(work, microbatch, replica, rank)
            if len(route.source):
                yield rank, route

    def _empty(self, rows: int) -> Tensor:
        return torch.empty(rows, self.width, dtype=self.dtype, device=self.device)


def _by_sender(rows: Tensor, senders: Senders) -> Messages:
    """The parts of ``rows`` [n, width] that belong to each sender."""
    parts = rows.contiguous().split([count for _, count in senders])
    return [(rank, part) for (rank, _), part in zip(senders, parts, strict=True)]


Edges = Mapping[tuple[str, int], Edge]
"""By the encoder's name and the depth of the MTP layer that reads it; 0: the first stage."""


def build_edges(plan: Plan, topo: Topology, trainable: bool) -> Edges:
    """The edges of this rank; without ``trainable`` of a frozen policy.

    Communicates: where the plan's list has no such group, with its members, to make it.
    """
    found = dict[tuple[str, int], Edge]()
    tower = plan.sizes.vision
    depths = range(1 + (plan.num_mtp_layers if trainable else 0))
    encoders = [grid for grid in plan.grids.values() if grid.name != "llm"]
    for grid, depth in product(encoders, depths):
        sources = source_ranks(grid)
        readers = _readers(plan, depth)
        if topo.rank in readers or topo.of(grid.name):
            ranks = [*dict.fromkeys([*readers, *sources])]
            deep = tower.deepstack if tower else ()
            roles = (f"{grid.name} {depth} {way}" for way in ("there", "back"))
            there, back = (topo.make_group(role, ranks) for role in roles)
            found[grid.name, depth] = Edge(
                sources,
                readers,
                there,
                back,
                width=plan.sizes.hidden_size * (1 if depth else 1 + len(deep)),
                dtype=dtype_of(plan.model.dtype),
                device=topo.device,
                trained=trainable
                and plan.modules[grid.name].train
                and not (depth and plan.objective.mtp_detach),
                depth=depth,
            )
    return found


def _readers(plan: Plan, depth: int) -> dict[int, RankRole]:
    """The ranks of the language model that embed rows at ``depth``, each with its role."""
    llm = plan.grids["llm"]
    tile = plan.tile_rows
    sizes = llm.parallel
    stage = reading_stage(plan, depth)
    readers: dict[int, RankRole] = {}
    for d, c, t in product(range(sizes.dp), range(sizes.cp), range(sizes.tp)):
        rank = llm.rank_of(dp=d, pp=stage, cp=c, tp=t)
        readers[rank] = RankRole(d * sizes.cp + c, t, sizes.tp, tile_rows=tile)
    return readers


def embedded_depths(plan: Plan, topo: Topology, chunk: int) -> tuple[int, ...]:
    """The depths whose rows a chunk of this rank of the language model embeds."""
    here = plan.stages[topo.pp_rank][chunk]
    return (*([0] if here.embedding else []), *range(1, 1 + here.mtp))


def give(
    output: Tensor,
    edges: Sequence[Edge],
    work: EncoderWork,
    microbatch: int,
    replica: int,
    tp_group: Any,
) -> Tensor:
    """Send the rows of an encoder's output to all readers; returns a zero, whose gradient is the
    sum of theirs.

    Args:
        output: [F, width], equal on all ranks of ``tp_group``; its first rank sends.
        edges: of the encoder, to all its readers.

    Communicates: `Edge.send`; in backward `Edge.gradients`, and a broadcast over ``tp_group``.
    """
    zero: Any = _Give.apply(output, edges, (work, microbatch, replica), tp_group)
    return zero


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, edges: Any, at: Any, tp_group: Any) -> Tensor:
        ctx.like = output.new_empty(0, output.shape[1])
        ctx.edges = edges
        ctx.at = at
        ctx.tp_group = tp_group
        ctx.rows = len(output)
        if tp_group.rank() == 0:
            for edge in edges:
                edge.send(*at, output.detach())
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        tp_group = ctx.tp_group
        total = _wide_zeros(ctx.like, ctx.rows)
        if tp_group.rank() == 0:
            for edge in ctx.edges:
                for source, grad in edge.gradients(*ctx.at, []) if edge.trained else ():
                    total[:, : edge.width].index_add_(0, source, grad.to(total.dtype))
        if tp_group.size() > 1:
            dist.broadcast(total, dist.get_global_rank(tp_group, 0), group=tp_group)
        return total.to(ctx.like.dtype), None, None, None


def _wide_zeros(like: Tensor, rows: int) -> Tensor:
    """[rows, width] at least in fp32: the gradients of several readers may add up in them."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros(rows, like.shape[1], dtype=wide)


def swap(
    edge: Edge, work: EncoderWork, microbatch: int, replica: int, output: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """On a rank that encodes and reads: send its rows to the others that embed them, and take those
    that it embeds, its own among them.

    All ranks of the stage call it in the same order of microbatches. One that has no part in a
    microbatch communicates nothing.

    Args:
        output: [F, width], the rows that this rank encoded; None: none.

    Returns: as `Edge.take`; the gradient reaches the ``output`` of every rank.
    Communicates: `Edge.exchange`; in backward the gradients, the same number of elements.
    """
    sends: Messages = []
    if output is not None:
        sends = edge.leaving(work, microbatch, replica, output.detach())
        output = output if edge.trained else output.detach()
    arriving = edge.arriving(work, microbatch)
    edge.exchange("there", sends, _by_sender(arriving.values, arriving.senders))
    if output is None and not arriving.senders:
        return []
    if output is None:  # a graph all the same, which sends the gradients back
        output = torch.empty(0, edge.width, dtype=edge.dtype, device=edge.device)
        output.requires_grad_(edge.trained)
    own = edge.route(work, microbatch, replica, dist.get_rank())
    rows = torch.cat([own.dest, arriving.dest])
    values: Any = _Swap.apply(output, edge, (work, microbatch, replica), own, arriving)
    return [(to_device(rows, edge.device), values)]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, edge: Edge, at: Any, own: Route, arriving: Arriving
    ) -> Tensor:
        ctx.edge = edge
        ctx.at = at
        ctx.like = output.new_empty(0, output.shape[1])
        ctx.rows = len(output)
        ctx.source = to_device(own.source, edge.device)
        ctx.senders = arriving.senders
        mine = output[:, : edge.width].index_select(0, ctx.source).to(edge.dtype)
        return torch.cat([mine, arriving.values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mine = grads[0][: len(ctx.source)]
        sends = _by_sender(grads[0][len(ctx.source) :], ctx.senders)
        total = _wide_zeros(ctx.like, ctx.rows)
        read = total[:, : ctx.edge.width]
        read.index_add_(0, ctx.source, mine.to(total.dtype))
        for source, part in ctx.edge.gradients(*ctx.at, sends):
            read.index_add_(0, source, part.to(total.dtype))
        return total.to(ctx.like.dtype), None, None, None, None


class RunsAhead(KnownShapes):
    """A module's pipeline with ``more`` stages that do not exist behind its last one, so that its
    stages do that many more forward passes before they wait for a gradient."""

    def __init__(self, more: int, *arguments: Any):
        super().__init__(*arguments)
        self.more = more

    @property
    def total_stages(self) -> int:
        """See megatron's."""
        return super().total_stages + self.more
