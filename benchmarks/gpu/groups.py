"""Every process group of several layouts: seconds of its first collective, memory that it takes.

``torchrun --nproc-per-node 2 -m benchmarks.gpu.groups [--device cpu]``

A row for each group of the first rank: milliseconds of the first and of a later all-reduce, and the
device memory that all of it took, next to the plan's assumption for a communicator. Then neighbours
send `SWAPPED` bytes to each other in one batch, as an edge between modules does: more than NCCL
buffers, so that it would hang if a send had to end before a receive begins.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.rows import note, noting
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import Topology, device_of, launched
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.items import COMMUNICATOR_BYTES
from pyrl_ext.plan.groups import groups_of

CONFIGS = Path(__file__).parents[2] / "configs"
SWAPPED = 64 << 20  # bytes each way
LAYOUTS = {
    2: ("tiny dp=2 ep=2", "tiny tp=2", "tiny pp=2", "tiny dp=2 dynamic_cp=2", "tiny_vl dp=2"),
    4: ("tiny tp=2 pp=2", "tiny dp=4 ep=2 dynamic_cp=4", "tiny_vl pp=2 tower=2"),
    8: (
        "tiny tp=2 pp=2 cp=2 ep=2 etp=1",
        "tiny dp=4 pp=2 ep=4 dynamic_cp=4",
        "tiny_vl tp=2 dp=2 ep=2 tower=4",
    ),
}


def plan_of(layout: str, device: str) -> Plan:
    """The plan of a layout such as ``tiny_vl tp=2 tower=2``.

    A layout names a config and sizes of ``parallel``; ``tower`` is the number of separate ranks of
    the vision tower.
    """
    config, *sizes = layout.split()
    overrides = [f"device={device}"]
    for size in sizes:
        name, _, value = size.partition("=")
        if name == "tower":
            overrides += ["modules.vision.ranks=own", f"modules.vision.parallel.dp={value}"]
        else:
            overrides.append(f"parallel.{size}")
    return compile_plan(CONFIGS / f"{config}.yaml", overrides)


def communicators_of(plan: Plan, topo: Topology) -> dict[str, dist.ProcessGroup]:
    """Groups of this rank that have a communicator of NCCL, in the order of the plan's list."""
    found = dict[str, dist.ProcessGroup]()
    for listed in groups_of(plan, topo.rank):
        if listed.on_device and len(listed.ranks) > 1:
            found[", ".join(listed.roles)] = topo.make_group(listed.roles[0], listed.ranks)
    return found


def timed(group: dist.ProcessGroup, device: torch.device) -> float:
    """Milliseconds of an all-reduce of one number. Syncs."""
    begun = time.perf_counter()
    number = torch.ones(1, device=device)
    dist.all_reduce(number, group=group)
    if number.item() != group.size():
        raise RuntimeError(f"all-reduce gave {number.item()}, expected {group.size()}")
    return 1e3 * (time.perf_counter() - begun)


def free_memory(device: torch.device) -> int:
    """Free bytes of the device; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def swap(group: dist.ProcessGroup, device: torch.device) -> float:
    """Milliseconds in which each member and its neighbour send `SWAPPED` bytes to each other.

    The members are taken in pairs; one that is left over communicates nothing. Syncs.
    """
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    other = place ^ 1
    if other >= len(ranks):
        return 0.0
    sent = torch.full((SWAPPED,), place, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    begun = time.perf_counter()
    operations = [
        dist.P2POp(dist.isend, sent, ranks[other], group),
        dist.P2POp(dist.irecv, received, ranks[other], group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if not bool((received == other).all()):
        raise RuntimeError(f"rank {ranks[place]} received other bytes than rank {other} sent")
    return 1e3 * (time.perf_counter() - begun)


def measure(layout: str, plan: Plan, topo: Topology) -> None:
    """Rows of a layout, written by its first rank."""
    rows = list[tuple[str, dict[str, Any]]]()
    for name, group in communicators_of(plan, topo).items():
        before = free_memory(topo.device)
        first = timed(group, topo.device)
        numbers: dict[str, Any] = {"ranks": group.size(), "first_ms": first}
        numbers["later_ms"] = timed(group, topo.device)
        numbers["swap_ms"] = swap(group, topo.device)
        taken = before - free_memory(topo.device)
        numbers["taken_MiB"] = taken / 2**20  # torch keeps those of the messages, 2 x SWAPPED
        numbers["planned_MiB"] = COMMUNICATOR_BYTES / 2**20
        rows.append((name, numbers))
    if topo.is_main:
        for name, numbers in rows:
            note(f"{layout}: {name}", **numbers)
        note(f"{layout}: communicators of rank 0", number=len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args()
    device = device_of(given.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if given.device == "cpu" else "cpu:gloo,cuda:nccl")
    for layout in LAYOUTS[launched("WORLD_SIZE", 1)]:
        with noting(layout):
            plan = plan_of(layout, given.device)
            with topology.start(plan, connect=False) as topo:  # this measures each first use
                measure(layout, plan, topo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
