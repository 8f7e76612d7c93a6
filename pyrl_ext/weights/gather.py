"""Weights from the trainer's ranks, whole on every rank or on one, in buckets of few collectives.

A bucket holds consecutive rows of the family's weight table that lie on one pipeline stage. Each
rank fills one segment of a scratch buffer: tensor-parallel ranks with their shards, expert ranks
(expert and expert-tensor parallel together) with their experts. One all-gather per group completes
the buffer, one broadcast takes it to the other stages, and then its shards are put together to
checkpoint tensors. Offsets follow from the plan, so ranks exchange no metadata; no tensor is kept
between calls. A bucket for one rank alone is gathered by the groups of the rank of its stage in the
same pipeline. Where several modules run on different ranks, each bucket crosses from the first rank
of its module to all ranks outside, once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.models.shards import pieces_of
from pyrl_ext.models.weight_table import tensor_split
from pyrl_ext.ops.tensors import dtype_of, on_gpu
from pyrl_ext.parallel.buckets import Allocate, Bucket, BucketStream, Slot, aligned
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.plan.model.weight import Size, Weight

# the part of a name whose tensors all lie on one pipeline stage
_STAGE_KEY = re.compile(
    r"(decoder|mtp)\.layers\.\d+|decoder\.final_layernorm|embedding|output_layer"
)


@dataclass(frozen=True, slots=True)
class Shards:
    """The places of one parameter's shards in the scratch buffer.

    Args:
        row:    of the weight table.
        dtype:  of the shards.
        shape:  of one shard.
        owner:  expert-parallel rank that holds it; None: all hold it.
        starts: first byte of each shard, by rank of the tensor-parallel group that divides the
                parameter; none: the live parameter is whole on every rank of the world, and is not
                gathered.
    """

    row: Weight
    dtype: torch.dtype
    shape: Size
    owner: int | None
    starts: tuple[int, ...]

    def view(self, buffer: Tensor, rank: int) -> Tensor:
        """The shard of ``rank`` in the uint8 ``buffer``."""
        start = self.starts[rank % len(self.starts)]  # one for all ranks if it is not divided
        return Slot(self.row.megatron_name, self.dtype, self.shape, start).view(buffer)


@dataclass(frozen=True, slots=True)
class ShardedBucket:
    """A bucket, and how the ranks' shards of it are gathered.

    Args:
        bucket:   its whole checkpoint tensors, as they are sent.
        stage:    pipeline stage that holds them.
        shards:   of each parameter, in the order of the table.
        segments: name of a group -> (start of its first rank's segment, length of each) [bytes].
        scratch:  size of the buffer that the shards are gathered in [bytes].
    """

    bucket: Bucket
    stage: int
    shards: tuple[Shards, ...]
    segments: Mapping[str, tuple[int, int]]
    scratch: int


# planning: pure, and the same on every rank ------------------------------------------------------


def plan_buckets(
    plan: Plan,
    table: Sequence[Weight],
    dtype: torch.dtype | None = None,
    only: Set[str] | None = None,
    module: str = "llm",
) -> tuple[ShardedBucket, ...]:
    """The buckets of ``table``, in its order, of at most ``rollout.bucket_bytes`` of tensors each.

    The experts of a layer share a bucket, also if they exceed that size; a larger tensor has a
    bucket to itself.

    Args:
        dtype: of all tensors; None: of the weights.
        only:  checkpoint names that are wanted, of this table and others; None: all.
        module: whose table it is.
    """
    wanted = {name for row in table for name in row.hf_names if only is None or name in only}
    rows = [row for row in table if not wanted.isdisjoint(row.hf_names)]
    types = [dtype or (torch.float32 if r.float32 else dtype_of(plan.model.dtype)) for r in rows]
    typed = list(zip(rows, types))
    stages = _stages(plan, module)
    grid = plan.grids[module]
    return tuple(
        _sharded(plan, grid, stage, cut, wanted)
        for stage, cut in _cuts(typed, stages, plan.rollout.bucket_bytes)
    )


Typed = tuple[Weight, torch.dtype]


def _cuts(
    rows: list[Typed], stages: dict[str, int], limit: int
) -> Iterator[tuple[int, list[Typed]]]:
    """(stage, rows) of every bucket of at most ``limit`` bytes."""
    cut: list[Typed] = []
    cut_stage = 0
    cut_bytes = 0
    # engines load the experts of a layer together
    for _, group in groupby(
        rows, lambda typed: typed[0].megatron_name.partition(".local_experts.")[0]
    ):
        atom = list(group)
        key = _STAGE_KEY.match(atom[0][0].megatron_name)
        assert key is not None, atom[0][0].megatron_name
        stage = stages[key[0]]
        size = sum(math.prod(s) * dtype.itemsize for row, dtype in atom for s in row.shapes)
        if cut and (stage != cut_stage or cut_bytes + size > limit):
            yield cut_stage, cut
            cut = []
            cut_bytes = 0
        cut_stage = stage
        cut = cut + atom
        cut_bytes = cut_bytes + size
    if cut:
        yield cut_stage, cut


def _stages(plan: Plan, module: str) -> dict[str, int]:
    """Beginning of a name -> the pipeline stage whose copy is published."""
    if module != "llm" and (tower := plan.sizes.vision):
        pp = plan.grids[module].parallel.pp
        of_layers = [stage for stage, n in enumerate(tower.stages(pp)) for _ in range(n)]
        last = dict.fromkeys(("decoder.final_layernorm", "output_layer"), pp - 1)
        ids = {f"decoder.layers.{i}": stage for i, stage in enumerate(of_layers)}
        return {"embedding": 0} | ids | last
    layers = plan.sizes.num_hidden_layers
    stages = dict[str, int]()
    for stage, chunks in enumerate(plan.stages):
        for chunk in chunks:
            ids = *chunk.layers, *(layers + i for i in range(chunk.mtp))
            names = [f"decoder.layers.{i}" for i in ids]
            names += [f"mtp.layers.{i}" for i in range(chunk.mtp)]
            names += ["embedding"] * chunk.embedding + ["output_layer"] * chunk.loss
            # megatron puts it before the MTP layers if there are any, otherwise next to the loss
            is_last = layers - 1 in chunk.layers if plan.num_mtp_layers else chunk.loss
            names += ["decoder.final_layernorm"] * is_last
            stages |= dict.fromkeys(names, stage)
    return stages


def _sharded(
    plan: Plan, grid: Grid, stage: int, rows: list[Typed], wanted: Set[str]
) -> ShardedBucket:
    """Lays the scratch buffer out: group by group, its ranks' segments one after the other."""
    sizes = grid.parallel
    ranks = {"alone": 1, "tp": sizes.tp, "tp_ep": sizes.ep * sizes.etp_size}
    filled = {group: [0] * size for group, size in ranks.items()}  # bytes of each rank's segment
    laid_out: list[tuple[Shards, str, int, int, int]] = []
    for row, dtype in rows:
        owner = None
        split = sizes.tp
        if row.expert is not None:
            owner = row.expert // (plan.sizes.num_experts // sizes.ep)
            split = sizes.etp_size
        shards = Shards(row, dtype, row.shard_shape(split), owner, ())
        group, first = ("tp", 0) if owner is None else ("tp_ep", owner * split)
        if ranks[group] == 1 or (row.shard == "same" and owner is None):
            group = "alone"
            first = 0
            split = 1
        elif row.shard == "same":  # of an expert, whole on each of its ranks
            split = 1
        laid_out.append((shards, group, first, split, filled[group][first]))
        for rank in range(first, first + split):
            filled[group][rank] += aligned(math.prod(shards.shape) * dtype.itemsize)
    if sizes.pp == 1 and len(grid.ranks) == plan.world_size:
        filled["alone"] = [0]  # every rank has those
    segments = dict[str, tuple[int, int]]()
    end = 0
    for group, size in ranks.items():
        segments[group] = end, max(filled[group])
        end += size * max(filled[group])
    placed: list[Shards] = []
    for shards, group, first, split, offset in laid_out:
        start, length = segments[group]
        starts = tuple(start + (first + i) * length + offset for i in range(split))
        placed.append(replace(shards, starts=starts if length else ()))
    del segments["alone"]
    whole = [
        (name, dtype, size)
        for row, dtype in rows
        for name, size in zip(row.hf_names, row.shapes, strict=True)
        if name in wanted
    ]
    return ShardedBucket(Bucket.of(whole), stage, tuple(placed), segments, end)


# gathering ---------------------------------------------------------------------------------------


class SendTarget(NamedTuple):
    """From one rank of a module to all ranks that do not run it.

    Args:
        group:  of these ranks.
        source: global rank of the one that sends.
    """

    group: dist.ProcessGroup
    source: int


class GatheredWeights(BucketStream):
    """Every wanted checkpoint tensor (HF name, value) of a module, whole, in checkpoint order;
    without those of buckets that another rank gets.

    Iterating yields the live parameter if it is not sharded, otherwise a fresh tensor: engines may
    hold it across buckets until a fused group is complete. `buckets` writes all of them into the
    caller's memory instead.

    If one rank raises between two buckets, the others block in the next collective: in a run they
    end within seconds and name it (`dist.heartbeat`), elsewhere when its process ends or the time
    limit of the process group is reached.

    Args:
        planned: from `plan_buckets`.
        live: this rank's tensors by megatron name, as planned; None: it does not run the module.
        topo: of the module that they belong to.
        outward: to the ranks that do not run the module; None: this rank sends to none.
        sent: tensors in place of ``live``, by the same names and of the same kind, each of which is
            asked for once, when its bucket is gathered; None: ``live``.

    Communicates: per bucket an all-gather over the tensor-parallel and one over the expert-parallel
    group, of what they divide; a broadcast of all of it to the other stages, and one to the ranks
    that do not run the module.
    Raises: ValueError, before any of that, naming a live tensor that is missing or not as planned.
    """

    def __init__(
        self,
        planned: Sequence[ShardedBucket],
        live: Mapping[str, Tensor] | None,
        topo: Topology,
        outward: SendTarget | None = None,
        sent: Mapping[str, Tensor] | None = None,
    ):
        self.planned = planned
        self.live = live
        self.topo = topo
        self.outward = outward
        self.sent = live if sent is None else sent
        self.to: Sequence[int | None] = [None] * len(planned)
        if live is not None:
            self._check(live)

    def give(self, to: Sequence[int]) -> None:
        """Each bucket comes on one rank alone, the one in ``to``."""
        local = [sharded for sharded, rank in zip(self.planned, to) if rank == self.topo.rank]
        self.to = to
        self.names = {slot.name for sharded in local for slot in sharded.bucket.slots}

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((sharded.bucket.bytes for sharded in self.planned), default=0)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for sharded, scratch in self._gathered():
            wanted = {slot.name for slot in sharded.bucket.slots}
            for shards in sharded.shards:
                parts = self._parts(shards, scratch)
                if len(shards.starts) == 1:  # several are copied when they are concatenated
                    parts = [parts[0].clone()]
                pieces = pieces_of(shards.row, parts)
                for name, (tensors, dim) in zip(shards.row.hf_names, pieces, strict=True):
                    if name in wanted:
                        yield name, tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)

    @torch.no_grad()
    def buckets(self, allocate: Allocate) -> Iterator[tuple[Bucket, Tensor]]:
        for sharded, scratch in self._gathered():
            buffer = allocate(self.largest)
            slots = {slot.name: slot for slot in sharded.bucket.slots}
            for shards in sharded.shards:
                pieces = pieces_of(shards.row, self._parts(shards, scratch))
                for name, (tensors, dim) in zip(shards.row.hf_names, pieces, strict=True):
                    if name in slots:
                        torch.cat(tensors, dim, out=slots[name].view(buffer))
            yield sharded.bucket, buffer

    def _gathered(self) -> Iterator[tuple[ShardedBucket, Tensor]]:
        """Each bucket with its scratch buffer, complete until the next one is asked for."""
        size = max((sharded.scratch for sharded in self.planned), default=0)
        buffer = torch.empty(size, dtype=torch.uint8, device=self.topo.device)
        for sharded, to in zip(self.planned, self.to, strict=True):
            self._fill(sharded, to, buffer[: sharded.scratch])
            if to in (None, self.topo.rank):
                yield sharded, buffer

    def _parts(self, shards: Shards, scratch: Tensor) -> list[Tensor]:
        """All shards, by rank, or the live parameter if it is whole."""
        if not shards.starts:
            assert self.sent is not None  # no rank is outside the module
            return [self.sent[shards.row.megatron_name].detach()]
        return [shards.view(scratch, rank) for rank in range(len(shards.starts))]

    def _mine(self, sharded: ShardedBucket) -> Iterator[Shards]:
        """The parameters that this rank holds a shard of."""
        if sharded.stage == self.topo.pp_rank:
            expert_rank = self.topo.groups.ep.rank()
            yield from (s for s in sharded.shards if s.owner in (None, expert_rank))

    def _check(self, live: Mapping[str, Tensor]) -> None:
        for shards in (shards for sharded in self.planned for shards in self._mine(sharded)):
            tensor = live.get(shards.row.megatron_name)
            expected = (shards.shape, shards.dtype)
            if tensor is not None and (tensor.shape, tensor.dtype) == expected:
                continue
            found = "missing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(
                f"GatheredWeights: {shards.row.megatron_name} is {found} on rank {self.topo.rank}, "
                f"expected {list(shards.shape)} {shards.dtype}, the plan's shard of "
                f"{shards.row.hf_names}"
            )

    def _fill(self, sharded: ShardedBucket, to: int | None, buffer: Tensor) -> None:
        """Makes the scratch buffer of a bucket complete where it is wanted."""
        if self.sent is not None:
            self._fill_inside(sharded, to, buffer, self.sent)
        if self.outward is not None:
            dist.broadcast(buffer, self.outward.source, group=self.outward.group)

    def _fill_inside(
        self, sharded: ShardedBucket, to: int | None, buffer: Tensor, sent: Mapping[str, Tensor]
    ) -> None:
        """The same on the ranks of the module."""
        topo = self.topo
        near = None if to is None else topo.grid.group(to, "pp")[sharded.stage]
        if sharded.stage == topo.pp_rank:
            for shards in self._mine(sharded):
                if shards.starts:
                    _, rank, _ = tensor_split(shards.row, topo)
                    shards.view(buffer, rank).copy_(sent[shards.row.megatron_name])
                elif to not in (None, topo.rank):
                    _ = sent[shards.row.megatron_name]  # `MoveSeen` sees it on every rank
            for name, (start, length) in sharded.segments.items():
                group: dist.ProcessGroup = getattr(topo.groups, name)
                if length and group.size() > 1 and _has(group, near):
                    gather = _gather_at_once if on_gpu(buffer) else _gather_in_turn
                    segments = buffer[start : start + length * group.size()]
                    gather(segments.view(group.size(), length), group)
        if topo.pp_size > 1 and (to is None or to != near) and _has(topo.groups.pp, to):
            source = dist.get_global_rank(topo.groups.pp, sharded.stage)
            dist.broadcast(buffer, source, group=topo.groups.pp)


def _has(group: dist.ProcessGroup, rank: int | None) -> bool:
    return rank is None or rank in dist.get_process_group_ranks(group)


def _gather_at_once(segments: Tensor, group: dist.ProcessGroup) -> None:
    """All ranks' rows of ``segments``, in place."""
    untyped: Any = dist  # a deprecated name, the only one that torch 2.11 has
    untyped.all_gather_into_tensor(segments.flatten(), segments[group.rank()], group=group)


def _gather_in_turn(segments: Tensor, group: dist.ProcessGroup) -> None:
    """The same. gloo's all-gather needs a second buffer, and takes four times as long."""
    for rank, segment in enumerate(segments):
        dist.broadcast(segment, dist.get_global_rank(group, rank), group=group)
