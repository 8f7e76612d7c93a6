"""Builds the engine of a rank where engines run apart, from the plan."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pyrl_ext.parallel.buckets import KeptBuckets
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.engine import ServersEngine
from pyrl_ext.rollout.remote.model import Model
from pyrl_ext.rollout.remote.weight_sync import Publisher


def build_servers_engine(
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    beside: dist.ProcessGroup | None = None,
) -> ServersEngine:
    """The servers of the plan, as the engine of one of the ranks of ``group``; None: the only one.

    Args:
        beside: a second group of the same ranks, for publishes beside the trainer

    Raises: ValueError, OSError where the plan's keys cannot be read.
    """
    rollout = plan.rollout
    model = Model.of(plan)
    keys = Keys.read(rollout.keys)
    silence = rollout.request_timeout
    return ServersEngine(
        [Server(address, keys, silence) for address in plan.addresses],
        model,
        Publisher(plan, device),
        max_num_seqs=plan.max_num_seqs,
        min_servers=rollout.min_servers,
        patience=rollout.publish_timeout,
        group=group,
        keep=KeptBuckets(rollout.bucket_bytes, device) if plan.rollout.publishes_beside else None,
        thread_group=beside,
    )
