"""A whole batch that one process holds, cut for any place in a grid without other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.delivery import Delivery
from pyrl_ext.pack.exchange import RowExchange, columns_of
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.pack.rank_rows import RankRole
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.schedule import Group, Schedule


def batch_of(seqlens: Sequence[int], kind: type[Any] = Batch, **fields: Any) -> Any:
    """A batch of samples with so many rows each, of ``kind``.

    Fields that are not given: tokens, log-probs and advantages are 0, all tokens are in the loss,
    there are no routes; with routes, all rows have one.
    """
    rows = sum(seqlens)
    defaults = {
        "tokens": torch.zeros(rows, dtype=torch.int64),
        "targets": torch.zeros(rows, dtype=torch.int64),
        "loss_mask": torch.ones(rows, dtype=torch.bool),
        "rollout_logprobs": torch.zeros(rows),
        "advantages": torch.zeros(rows),
        "routes": None,
        "layer_ids": (),
        "route_mask": torch.full((rows,), "routes" in fields),
    }
    return kind(seqlens=tuple(seqlens), **defaults | fields)


def positions_of(batch: Batch) -> torch.Tensor:
    """[T] position of each row in its sample."""
    return torch.cat([torch.arange(n) for n in batch.seqlens])


def loss_tokens(batch: Batch, depth: int) -> np.ndarray:
    """[S] loss tokens that a row ``depth`` before them in the same sample can predict."""
    counted = batch.loss_mask & (positions_of(batch) >= depth)
    return np.array([int(part.sum()) for part in counted.split(list(batch.seqlens))])


def kept_ids(batch: Batch) -> np.ndarray:
    """[S] int32, ids in the kept sets of each sample."""
    if batch.kept is None:
        return np.zeros(len(batch.seqlens), np.int32)
    parts = batch.kept.counts.clamp(min=0).split(list(batch.seqlens))
    return np.array([int(part.sum()) for part in parts], np.int32)


def index_of(batch: Batch, owner: int = 0, depths: int = 0) -> BatchIndex:
    """The index of a batch that rank ``owner`` holds; every sample is a group."""
    samples = len(batch.seqlens)
    zeros = np.zeros(samples, np.int32)
    unrouted = (~batch.route_mask).split(list(batch.seqlens))
    return BatchIndex(
        owners=np.full(samples, owner, np.int32),
        groups=np.arange(samples),
        places=np.arange(samples, dtype=np.int32),
        turns=zeros,
        seqlens=np.array(batch.seqlens, np.int32),
        sampled=np.array(batch.seqlens, np.int32),
        truncated=zeros > 0,
        rewards=zeros.astype(float),
        versions=zeros,
        unrouted=np.array([int(part.sum()) for part in unrouted]),
        masked=zeros,
        passes=zeros,
        kept=kept_ids(batch),
        loss_tokens=np.stack([loss_tokens(batch, d) for d in range(1 + depths)], 1),
        layer_ids=() if batch.routes is None else batch.layer_ids,
        topk=0 if batch.routes is None else batch.routes.shape[-1],
    )


def shard_at(
    batch: Batch, ids: Sequence[int], place: RankCoords, depths: int = 0, tile_rows: int = 1
) -> BatchShard:
    """Samples ``ids`` as one microbatch, as the rank at ``place`` holds it."""
    group = Group(0, place.cp_size, tuple(ids))
    schedule = Schedule(place.cp_size, ((group,),))
    index = index_of(batch, depths=depths)
    role = RankRole(
        place.cp_rank, place.tp_rank, place.tp_size, layers=index.layer_ids, tile_rows=tile_rows
    )
    wide = batch.routes is not None and batch.routes.dtype == torch.uint16
    experts = 1 << 16 if wide else 1 << 8  # the ids that their type holds
    aged = batch.versions is not None
    exchange = RowExchange(index, schedule, [role], experts, aged=aged)
    rows, needs = exchange.of(0)
    delivery = Delivery(0, needs)
    delivery.take(0, columns_of(batch, depths))
    counts = tuple(index.loss_tokens[list(ids)].sum(0).tolist())
    lengths = exchange.lengths
    columns = delivery.columns
    return BatchShard(schedule, (1,), lengths, role, rows, columns, index.layer_ids, (counts,))


def microbatch(
    batch: Batch, ids: Sequence[int], place: RankCoords, depths: int = 0, tile_rows: int = 1
) -> Microbatch:
    """Samples ``ids`` as the rank at ``place`` computes them."""
    return Microbatch.of(shard_at(batch, ids, place, depths, tile_rows), 0, place, depths)
