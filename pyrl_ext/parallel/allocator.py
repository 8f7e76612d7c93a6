"""The setting of torch's CUDA allocator: segments that grow, where no memory is shared by IPC."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from pyrl_ext.plan import Plan

_USERS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def allocator_setting(plan: Plan, environment: Mapping[str, str]) -> str | None:
    """The setting that a run changes; None: the user chose one, or the default stays.

    Microbatches differ in size, so segments of fixed sizes fragment. Segments that grow are virtual
    memory, which CUDA IPC cannot open in several versions of torch. So the default stays where the
    trainer's buckets go to the engine by IPC, and where this process holds a part of vLLM: its
    all-reduce shares the buffers of CUDA graphs by IPC.
    """
    if plan.device != "cuda" or any(name in environment for name in _USERS):
        return None
    holds_part = plan.transport == "inprocess" and plan.rollout.tp > 1
    return None if plan.transport == "ipc" or holds_part else _EXPANDABLE


def set_allocator(plan: Plan) -> None:
    """Apply `allocator_setting`, to this process alone: an engine's process inherits variables."""
    setting = allocator_setting(plan, os.environ)
    if setting is not None:
        torch._C._accelerator_setAllocatorSettings(setting)  # pyright: ignore[reportAttributeAccessIssue]
