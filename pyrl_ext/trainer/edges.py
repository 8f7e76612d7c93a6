"""Edges between modules as operations of autograd: each module runs its own megatron schedule.

An encoder's last stage ends in `give`, the "loss" of its schedule: forward sends rows to the ranks
that embed them, backward waits for their gradients. A reader's first stage begins with `Edge.take`:
leaf tensors whose gradients go back as soon as they are complete. MTP layers, which embed the same
rows one row earlier and on another stage, have edges for themselves. Who sends which rows to whom
follows from the batch (`pack/encoder_work.py`), so no shapes are exchanged, and nothing is sent
where no row is wanted. Each rank gets the rows of its shard alone, and sends back their gradient.

Sends never wait; only receives do. So modules of any depth and any schedule can be joined, if an
encoder's schedule runs as far ahead as its readers do (`RunsAhead`, `ahead_of`).

Where an encoder shares the ranks of its reader's first stage, both ends are in one graph: `swap` is
sender and receiver at once, and the reader's backward goes on through the encoder.
"""

# torch.distributed is not fully typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.dist.topology import Topology
from pyrl_ext.megatron.p2p import KnownShapes
from pyrl_ext.ops.dtypes import dtype_of
from pyrl_ext.ops.to_device import to_device
from pyrl_ext.pack.encoder_work import Route
from pyrl_ext.pack.shard import Seat
from pyrl_ext.plan import Plan

# (microbatch, replica of the encoder, seat of the reading rank) -> the rows that move
Routes = Callable[[int, int, Any], Route]


@dataclass(eq=False)
class Edge:
    """From an encoder's last stage to the stage of a module that reads it.

    Args:
        sources: global rank of each replica of the encoder that sends.
        readers: global rank -> its seat, as the routes know it.
        there, back: process groups of all these ranks, one a direction, so that neither way waits
            for the other.
        width: first numbers of a row that are read.
        dtype: of the rows and their gradients.
        trained: whether gradients go back.

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
    sent: dict[str, int] = field(default_factory=lambda: {"there": 0, "back": 0}, init=False)
    _pending: list[tuple[Any, Tensor]] = field(default_factory=list, init=False)

    def take(self, routes: Routes, microbatch: int) -> list[tuple[Tensor, Tensor]]:
        """On a reading rank: (rows of its shard [n] int64, their values [n, width]) of each replica
        that has some; the values are leaves of autograd.

        Communicates: receives the values.
        """
        taken: list[tuple[Tensor, Tensor]] = []
        for rank, dest, values in self.receive(routes, microbatch):
            if self.trained and torch.is_grad_enabled():
                values.requires_grad_()
                values.register_post_accumulate_grad_hook(partial(self._send_leaf, rank))
            taken.append((to_device(dest, self.device), values))
        return taken

    def _send_leaf(self, rank: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self.send_back(leaf.grad, rank)
        leaf.grad = None

    def receive(self, routes: Routes, microbatch: int) -> list[tuple[int, Tensor, Tensor]]:
        """On a reading rank: (sender, rows of its shard [n], their values [n, width]) of every
        other rank that sends some."""
        me, arriving = dist.get_rank(), list[tuple[int, Tensor, Tensor, Any]]()
        for replica, rank in enumerate(self.sources):
            if rank != me and len(dest := routes(microbatch, replica, self.readers[me]).dest):
                values = self._empty(len(dest))
                arriving.append((rank, dest, values, dist.irecv(values, rank, group=self.there)))
        for *_, receiving in arriving:
            receiving.wait()
        return [(rank, dest, values) for rank, dest, values, _ in arriving]

    def send_back(self, grad: Tensor, rank: int) -> None:
        """On a reading rank: the gradient of the values that ``rank`` sent."""
        self._send("back", grad, rank)

    def send(self, routes: Routes, microbatch: int, replica: int, output: Tensor) -> None:
        """On a sending rank: its rows to every other rank that reads some."""
        for rank, route in self._reached(routes, microbatch, replica):
            source = to_device(route.source, self.device)
            rows = output[:, : self.width].index_select(0, source)
            self._send("there", rows.to(self.dtype), rank)

    def gradients(
        self, routes: Routes, microbatch: int, replica: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """On a sending rank: (rows of the output, their gradients) of every other rank that reads
        some.

        Communicates: receives as many numbers as `send` sent.
        """
        arriving: list[tuple[Tensor, Tensor, Any]] = []
        for rank, route in self._reached(routes, microbatch, replica):
            grad = self._empty(len(route.source))
            arriving.append((route.source, grad, dist.irecv(grad, rank, group=self.back)))
        for source, grad, receiving in arriving:
            receiving.wait()
            yield to_device(source, self.device), grad

    def finish(self) -> None:
        """Wait, at the end of a pass, until all that was sent has arrived."""
        for sending, _ in self._pending:
            sending.wait()
        self._pending.clear()

    def _reached(
        self, routes: Routes, microbatch: int, replica: int
    ) -> Iterator[tuple[int, Route]]:
        me = dist.get_rank()
        for rank, seat in self.readers.items():
            if rank != me and len((route := routes(microbatch, replica, seat)).source):
                yield rank, route

    def _empty(self, rows: int) -> Tensor:
        return torch.empty(rows, self.width, dtype=self.dtype, device=self.device)

    def _send(self, way: str, rows: Tensor, to: int) -> None:
        rows = rows.contiguous()
        self.sent[way] += rows.nbytes
        group = self.there if way == "there" else self.back
        self._pending.append((dist.isend(rows, to, group=group), rows))  # alive until it arrived


Edges = Mapping[tuple[str, int], Edge]
"""By the encoder's name and the depth of the MTP layer that reads it; 0: the first stage."""


def build_edges(plan: Plan, topo: Topology, trainable: bool) -> Edges:
    """The edges of this rank; without ``trainable`` of a frozen policy.

    Communicates: with the other ranks of each edge, to make its groups.
    """
    found, tower = dict[tuple[str, int], Edge](), plan.sizes.vision
    depths = range(1 + (plan.num_mtp_layers if trainable else 0))
    encoders = [grid for grid in plan.grids.values() if grid.name != "llm"]
    for grid, depth in product(encoders, depths):
        last, readers = grid.parallel.pp - 1, _readers(plan, depth)
        sources = [grid.rank_of(dp=d, pp=last) for d in range(grid.parallel.dp)]
        if topo.rank in readers or topo.of(grid.name):
            ranks, deep = [*dict.fromkeys([*readers, *sources])], tower.deepstack if tower else ()
            roles = (f"{grid.name} {depth} {way}" for way in ("there", "back"))
            there, back = (topo.make_group(role, ranks) for role in roles)
            found[grid.name, depth] = Edge(
                *(sources, readers, there, back),
                width=plan.sizes.hidden_size * (1 if depth else 1 + len(deep)),
                dtype=dtype_of(plan.model.dtype),
                device=topo.device,
                trained=trainable
                and plan.modules[grid.name].train
                and not (depth and plan.objective.mtp_detach),
            )
    return found


def _readers(plan: Plan, depth: int) -> dict[int, Seat]:
    """The ranks of the language model that embed rows at ``depth``, each with its seat."""
    llm, tile = plan.grids["llm"], plan.tile_rows
    sizes, stage = llm.parallel, 0
    if depth:
        stage = next(i for i, chunks in enumerate(plan.stages) if any(c.mtp for c in chunks))
    return {
        llm.rank_of(dp=d, pp=stage, cp=c, tp=t): Seat(d * sizes.cp + c, t, sizes.tp, tile_rows=tile)
        for d, c, t in product(range(sizes.dp), range(sizes.cp), range(sizes.tp))
    }


def embedded_depths(plan: Plan, topo: Topology, chunk: int) -> tuple[int, ...]:
    """The depths whose rows a chunk of this rank of the language model embeds."""
    here = plan.stages[topo.pp_rank][chunk]
    return (*([0] if here.embedding else []), *range(1, 1 + here.mtp))


class Outlet(NamedTuple):
    """An edge that a rank feeds, with the routes of the pass."""

    edge: Edge
    routes: Routes


def give(
    output: Tensor, outlets: Sequence[Outlet], microbatch: int, replica: int, tp_group: Any
) -> Tensor:
    """Send the rows of an encoder's output to all readers; returns a zero, whose gradient is the
    sum of theirs.

    Args:
        output: [F, width], equal on all ranks of ``tp_group``; its first rank sends.

    Communicates: `Edge.send`; in backward `Edge.gradients`, and a broadcast over ``tp_group``.
    """
    zero: Any = _Give.apply(output, outlets, microbatch, replica, tp_group)
    return zero


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, outlets: Any, *where: Any) -> Tensor:
        ctx.like, ctx.outlets, ctx.where = output.new_empty(0, output.shape[1]), outlets, where
        ctx.rows = len(output)
        *at, tp_group = where
        if tp_group.rank() == 0:
            for edge, routes in outlets:
                edge.send(routes, *at, output.detach())
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        *at, tp_group = ctx.where
        total = _wide_zeros(ctx.like, ctx.rows)
        if tp_group.rank() == 0:
            for edge, routes in ctx.outlets:
                for source, grad in edge.gradients(routes, *at) if edge.trained else ():
                    total[:, : edge.width].index_add_(0, source, grad.to(total.dtype))
        if tp_group.size() > 1:
            dist.broadcast(total, dist.get_global_rank(tp_group, 0), group=tp_group)
        return total.to(ctx.like.dtype), None, None, None, None


def _wide_zeros(like: Tensor, rows: int) -> Tensor:
    """[rows, width] at least in fp32: the gradients of several readers may add up in them."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros(rows, like.shape[1], dtype=wide)


def swap(
    edge: Edge, routes: Routes, microbatch: int, replica: int, output: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """On a rank that encodes and reads: send its rows to the others that embed them, and take those
    that it embeds, its own among them.

    All ranks of the stage call it in the same order of microbatches. One that has no part in a
    microbatch communicates nothing.

    Args:
        output: [F, width], the rows that this rank encoded; None: none.

    Returns: as `Edge.take`, in one piece, whose gradient reaches the ``output`` of every rank.
    Communicates: `Edge.send`, `Edge.receive`; in backward the gradients, as many numbers.
    """
    if output is not None:
        edge.send(routes, microbatch, replica, output.detach())
        output = output if edge.trained else output.detach()
    parts = edge.receive(routes, microbatch)
    if output is None and not parts:
        return []
    if output is None:  # a graph all the same, which sends the gradients back
        output = torch.empty(0, edge.width, dtype=edge.dtype, device=edge.device)
        output.requires_grad_(edge.trained)
    own = routes(microbatch, replica, edge.readers[dist.get_rank()])
    rows = torch.cat([own.dest, *(dest for _, dest, _ in parts)])
    values: Any = _Swap.apply(output, edge, routes, (microbatch, replica), own, parts)
    return [(to_device(rows, edge.device), values)]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, edge: Edge, routes: Routes, at: Any, own: Route, parts: Any
    ) -> Tensor:
        ctx.edge, ctx.routes, ctx.at = edge, routes, at
        ctx.like, ctx.rows = output.new_empty(0, output.shape[1]), len(output)
        ctx.source = to_device(own.source, edge.device)
        ctx.others = [(rank, len(values)) for rank, _, values in parts]
        mine = output[:, : edge.width].index_select(0, ctx.source).to(edge.dtype)
        return torch.cat([mine, *(values for *_, values in parts)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sizes = [len(ctx.source), *(count for _, count in ctx.others)]
        mine, *parts = grads[0].split(sizes)
        for (rank, _), part in zip(ctx.others, parts, strict=True):
            ctx.edge.send_back(part, rank)
        total = _wide_zeros(ctx.like, ctx.rows)
        read = total[:, : ctx.edge.width]
        read.index_add_(0, ctx.source, mine.to(total.dtype))
        for source, part in ctx.edge.gradients(ctx.routes, *ctx.at):
            read.index_add_(0, source, part.to(total.dtype))
        return total.to(ctx.like.dtype), None, None, None, None, None


class RunsAhead(KnownShapes):
    """A module's pipeline with ``more`` stages that do not exist behind its last one, so that its
    stages do as many forward passes more before they wait for a gradient."""

    def __init__(self, more: int, *arguments: Any):
        super().__init__(*arguments)
        self.more = more

    @property
    def total_stages(self) -> int:
        """See megatron's."""
        return super().total_stages + self.more
