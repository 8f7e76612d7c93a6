"""Traces of the steps that ``log.profile`` names, a file for each rank; and peak memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.atomic_write import replacing
from pyrl_ext.plan import Plan


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


@contextmanager
def profiled(plan: Plan, device: torch.device, step: int) -> Generator[None]:
    """Trace what this rank does in the ``with`` block, if ``log.profile`` names the step.

    Writes ``RUN/trace/step-<n>-rank-<r>.json.gz`` in Chrome's format, which Perfetto opens. The
    metadata has the nanosecond at which this rank left a barrier of all ranks, from which the
    difference of two hosts' clocks follows.

    Communicates: a barrier. Syncs: the device, at the end.
    """
    if step not in plan.log.profile:
        yield
        return
    of_gpu = [ProfilerActivity.CUDA] if on_gpu(device) else []
    with profile(activities=[ProfilerActivity.CPU, *of_gpu]) as profiler:
        dist.barrier()
        rank = dist.get_rank()
        known = {"step": step, "rank": rank, "ranks": dist.get_world_size()}
        profiler.add_metadata_json("pyrl", json.dumps(known | {"barrier": time.time_ns()}))
        yield
    name = f"step-{step:06d}-rank-{rank:05d}.json.gz"
    with replacing(Path(plan.run) / "trace" / name) as partial:
        packed = partial.with_suffix(".json.gz")  # what the profiler compresses
        profiler.export_chrome_trace(str(packed))
        packed.rename(partial)
