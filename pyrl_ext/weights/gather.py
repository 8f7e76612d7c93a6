"""Weights from the trainer's ranks, whole on every rank, in buckets of a few collectives each.

A bucket is a run of the family's table that one pipeline stage holds. Its buffer is laid out so
that every rank of a group fills one segment: tensor-parallel ranks with their parts of what they
divide, expert ranks (expert- and expert-tensor-parallel together) with their experts. So one
collective a group completes it, one more takes it to the other stages, and only then is it cut into
checkpoint tensors. What lies where follows from the plan alone, alike on every rank: nothing is
asked for, and no tensor is kept between two calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.dist.topology import Topology
from pyrl_ext.megatron.config import DTYPES
from pyrl_ext.models.weight_table import Size, Weight, tensor_split, whole_of

ALIGNMENT = 16  # bytes, of every part: it is viewed in its dtype, and copied in wide words

# what a name starts with, of which one pipeline stage has all
_PLACE = re.compile(r"(decoder|mtp)\.layers\.\d+|decoder\.final_layernorm|embedding|output_layer")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of one parameter lie in its bucket's buffer.

    Args:
        row:   of the table.
        names: those of its checkpoint tensors that are asked for.
        dtype: of the parts.
        part:  shape of each.
        owner: expert-parallel rank that has it; None: all have.
        at:    where they start [bytes], by rank of the tensor-parallel group that divides it; none:
               the live parameter is whole on every rank.
    """

    row: Weight
    names: frozenset[str]
    dtype: torch.dtype
    part: Size
    owner: int | None
    at: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of one part."""
        return math.prod(self.part) * self.dtype.itemsize

    def view(self, buffer: Tensor, rank: int) -> Tensor:
        """The part of ``rank`` in the uint8 ``buffer``."""
        start = self.at[rank % len(self.at)]  # one place for all where it is not divided
        return buffer[start : start + self.bytes].view(self.dtype).view(self.part)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together.

    Args:
        stage:    pipeline stage that holds them.
        places:   in the order of the table.
        segments: name of a group -> (start of its first rank's segment, length of each) [bytes].
        bytes:    of the buffer.
    """

    stage: int
    places: tuple[Place, ...]
    segments: Mapping[str, tuple[int, int]]
    bytes: int


# planning: pure, and alike on every rank ---------------------------------------------------------


def plan_buckets(
    plan: Any,
    table: Sequence[Weight],
    dtype: torch.dtype | None = None,
    only: Set[str] | None = None,
) -> tuple[Bucket, ...]:
    """The buckets of ``table``, in its order, of at most ``rollout.bucket_bytes`` of tensors each.

    A layer's experts are never apart. They, or a tensor, are a bucket alone where they exceed it.

    Args:
        dtype: of all tensors; None: of the weights.
        only:  checkpoint names that are asked for; None: all.

    Raises: ValueError listing names that are not in the table.
    """
    every = {name for row in table for name in row.hf}
    wanted = every if only is None else only
    if unknown := sorted(wanted - every):
        raise ValueError(
            f"publish: {len(unknown)} names are unknown: {unknown[:6]}, expected some of the "
            f"model's {len(every)} checkpoint tensors"
        )
    rows = [row for row in table if not wanted.isdisjoint(row.hf)]
    types = [dtype or (torch.float32 if r.float32 else DTYPES[plan.model.dtype]) for r in rows]
    return tuple(
        _bucket(plan, stage, cut, wanted) for stage, cut in _cuts(plan, list(zip(rows, types)))
    )


Typed = tuple[Weight, torch.dtype]


def _cuts(plan: Any, rows: list[Typed]) -> Iterator[tuple[int, list[Typed]]]:
    """(stage, rows) of every bucket."""
    stages, limit = _stages(plan), plan.rollout.bucket_bytes
    at, cut, held = 0, [], 0
    # engines load the experts of a layer together
    for _, group in groupby(rows, lambda each: each[0].name.partition(".local_experts.")[0]):
        atom = list(group)
        place = _PLACE.match(atom[0][0].name)
        assert place is not None, atom[0][0].name
        stage = stages[place[0]]
        size = sum(math.prod(s) * dtype.itemsize for row, dtype in atom for s in row.shapes)
        if cut and (stage != at or held + size > limit):
            yield at, cut
            cut, held = [], 0
        at, cut, held = stage, cut + atom, held + size
    if cut:
        yield at, cut


def _stages(plan: Any) -> dict[str, int]:
    """What names start with -> the pipeline stage that they are published from."""
    layers, found = plan.sizes.num_hidden_layers, {}
    for stage, chunks in enumerate(plan.stages):
        for chunk in chunks:
            ids = *chunk.layers, *(layers + i for i in range(chunk.mtp))
            here = [f"decoder.layers.{i}" for i in ids]
            here += [f"mtp.layers.{i}" for i in range(chunk.mtp)]
            here += ["embedding"] * chunk.embedding + ["output_layer"] * chunk.loss
            # megatron puts it before what predicts further ahead, and else beside the loss
            is_last = layers - 1 in chunk.layers if plan.num_mtp_layers else chunk.loss
            here += ["decoder.final_layernorm"] * is_last
            found |= dict.fromkeys(here, stage)
    return found


def _bucket(plan: Any, stage: int, rows: list[Typed], wanted: Set[str]) -> Bucket:
    """The buffer's layout: of every group the segments of its ranks, one behind the other."""
    sizes = plan.parallel
    ranks = {"alone": 1, "tp": sizes.tp, "tp_ep": sizes.ep * sizes.etp_size}
    filled = {group: [0] * size for group, size in ranks.items()}  # bytes of each rank's segment
    slots = []
    for row, dtype in rows:
        owner, split = None, sizes.tp
        if row.expert is not None:
            owner, split = row.expert // (plan.sizes.num_experts // sizes.ep), sizes.etp_size
        place = Place(row, frozenset(row.hf) & wanted, dtype, row.part(split), owner, ())
        group, first = ("tp", 0) if owner is None else ("tp_ep", owner * split)
        if ranks[group] == 1 or row.shard == "same":
            group, first, split = "alone", 0, 1
        slots.append((place, group, first, split, filled[group][first]))
        for rank in range(first, first + split):
            filled[group][rank] += -(-place.bytes // ALIGNMENT) * ALIGNMENT
    if sizes.pp == 1:
        filled["alone"] = [0]  # every rank has those
    segments, end = {}, 0
    for group, size in ranks.items():
        segments[group] = end, max(filled[group])
        end += size * max(filled[group])
    places = []
    for place, group, first, split, offset in slots:
        start, length = segments[group]
        at = tuple(start + (first + i) * length + offset for i in range(split))
        places.append(replace(place, at=at if length else ()))
    del segments["alone"]
    return Bucket(stage, tuple(places), segments, end)


# gathering ---------------------------------------------------------------------------------------


@torch.no_grad()
def gather_buckets(
    buckets: Sequence[Bucket], live: Mapping[str, Tensor], topo: Topology
) -> Iterator[tuple[str, Tensor]]:
    """Every checkpoint tensor asked for, (HF name, value), whole on every rank, in their order.

    A tensor is the live parameter where every rank has it whole, and else memory of its own, for
    engines keep some until they have all that they fuse with them, whichever buckets those are in.
    The one buffer, of the largest bucket, is let go with the iterator.

    A rank that raises in between leaves the others waiting for its part of the next bucket: in a
    run they end within seconds and name it (`dist.heartbeat`), elsewhere when its process ends or
    the time of the process group is up.

    Args:
        live: this rank's tensors by megatron name (`models.weights.live`), as planned.

    Communicates: per bucket an all-gather over the tensor-parallel and one over the expert-parallel
    group, of what they divide; a broadcast of it all to the other stages.
    Raises: ValueError, before any of that, naming a live tensor that is missing or not as planned.
    """
    _check(buckets, live, topo)
    size = max((bucket.bytes for bucket in buckets), default=0)
    buffer = torch.empty(size, dtype=torch.uint8, device=topo.device)
    for bucket in buckets:
        _fill(bucket, live, buffer[: bucket.bytes], topo)
        for place in bucket.places:
            parts = [place.view(buffer, rank) for rank in range(len(place.at))]
            if len(parts) == 1:  # more are copied when they are put together
                parts = [parts[0].clone()]
            whole = whole_of(place.row, parts or [live[place.row.name].detach()])
            for name, tensor in zip(place.row.hf, whole, strict=True):
                if name in place.names:
                    yield name, tensor


def _mine(bucket: Bucket, topo: Topology) -> Iterator[Place]:
    """What this rank holds of a bucket."""
    if bucket.stage == topo.pp_rank:
        expert_rank = topo.groups.ep.rank()
        yield from (p for p in bucket.places if p.owner in (None, expert_rank))


def _check(buckets: Sequence[Bucket], live: Mapping[str, Tensor], topo: Topology) -> None:
    for bucket in buckets:
        for place in _mine(bucket, topo):
            tensor = live.get(place.row.name)
            if tensor is None or (tensor.shape, tensor.dtype) != (place.part, place.dtype):
                found = "missing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
                raise ValueError(
                    f"publish: {place.row.name} is {found} on rank {topo.rank}, expected "
                    f"{list(place.part)} {place.dtype}, the plan's part of {place.row.hf}"
                )


def _fill(bucket: Bucket, live: Mapping[str, Tensor], buffer: Tensor, topo: Topology) -> None:
    """The bucket's buffer, complete on every rank."""
    if bucket.stage == topo.pp_rank:
        for place in _mine(bucket, topo):
            if place.at:
                _, rank, _ = tensor_split(place.row, topo)
                place.view(buffer, rank).copy_(live[place.row.name])
        for name, (start, length) in bucket.segments.items():
            group = getattr(topo.groups, name)
            if length and group.size() > 1:
                gather = _gather_at_once if buffer.is_cuda else _gather_in_turn
                gather(buffer[start:][: length * group.size()].view(group.size(), length), group)
    if topo.pp_size > 1:
        source = dist.get_global_rank(topo.groups.pp, bucket.stage)
        dist.broadcast(buffer, source, group=topo.groups.pp)


def _gather_at_once(segments: Tensor, group: Any) -> None:
    """All ranks' rows of ``segments``, in place."""
    dist.all_gather_into_tensor(segments.flatten(), segments[group.rank()], group=group)


def _gather_in_turn(segments: Tensor, group: Any) -> None:
    """The same. gloo's all-gather needs a second buffer, and takes four times as long."""
    for rank, segment in enumerate(segments):
        dist.broadcast(segment, dist.get_global_rank(group, rank), group=group)
