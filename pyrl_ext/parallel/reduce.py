"""Sums and maxima over the ranks that compute losses, known to every rank, on the device that the
numbers are on.

Over all ranks of the run numbers go between hosts, by gloo: the group of the whole world has no
communicator of NCCL.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from pyrl_ext.parallel.topology import Topology


def sum_over_ranks(values: Tensor, topo: Topology) -> Tensor:
    """Sum of what the data- and context-parallel ranks of the last stage hold; in place.

    Communicates: an all-reduce there, and a broadcast to the other stages, or to all ranks if not
    all run the language model. Syncs: in the second case, reads the numbers.
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
        here = here.cpu()
        dist.broadcast(here, topo.loss_rank, group=topo.world)
    elif topo.pp_size > 1:
        dist.broadcast(here, topo.last_stage, group=topo.groups.pp)
    return here.to(values.device)
