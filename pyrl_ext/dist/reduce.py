"""Sums and maxima over the ranks that compute losses, known to every rank."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from pyrl_ext.dist.topology import Topology


def sum_over_ranks(values: Tensor, topo: Topology) -> Tensor:
    """Sum of what the data- and context-parallel ranks of the last stage hold; in place.

    Communicates: an all-reduce there, and a broadcast to the other stages and modules.
    """
    return _reduce(values, topo, dist.ReduceOp.SUM)


def max_over_ranks(values: Tensor, topo: Topology) -> Tensor:
    """Maximum instead of the sum; see `sum_over_ranks`."""
    return _reduce(values, topo, dist.ReduceOp.MAX)


def _reduce(values: Tensor, topo: Topology, op: dist.ReduceOp.RedOpType) -> Tensor:
    here = values.to(topo.device)
    if topo.computes_losses:
        dist.all_reduce(here, op, group=topo.groups.dp_cp)
    if len(topo.llm.ranks) < topo.world_size:
        dist.broadcast(here, topo.loss_rank, group=topo.world)
    elif topo.pp_size > 1:
        dist.broadcast(here, topo.last_stage, group=topo.groups.pp)
    return here.to(values.device)
