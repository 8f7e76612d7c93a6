"""The most memory that a rank held, which the page of a run draws beside the plan's estimate."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist

from pyrl_ext.ops.on_gpu import on_gpu


def peak_memory(device: torch.device) -> dict[str, float]:
    """``memory/peak`` of the rank that held most; the same on every rank.

    On a GPU the peak begins anew; on a CPU it is the process's since it started.

    Communicates: one number over the world, between hosts.
    """
    peak = torch.tensor(float(_peak(device)), dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {"memory/peak": peak.item()}


def _peak(device: torch.device) -> int:
    if on_gpu(device):
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    # not getrusage: a process begins there with the peak of the one that started it
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
