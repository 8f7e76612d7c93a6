"""All hosts of a run, seen from every rank: how they differ, what they share, how fast they talk.

Called on every rank that torchrun started. Nothing of the model is built.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyrl_ext.ops.on_gpu import on_gpu
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.hardware import gpu_of, group_rate
from pyrl_ext.plan.forecast.parts import reached
from pyrl_ext.plan.model.ranks import GROUPS
from pyrl_ext.tools.doctor.facts import Facts, nearest

TIMEOUT = timedelta(minutes=2)
ROUNDS = 5
BYTES = {"cpu": 2**20, "cuda": 2**26}  # of a rank's part of a timed collective
SLOW = 0.5  # of the rate that the plan assumes


@dataclass(frozen=True)
class Timing:
    """An all-reduce in all groups of one kind at once.

    Args:
        group: its name in the plan.
        size: of each group [ranks].
        across: whether one of them spans hosts.
        seconds: the median of `ROUNDS` on the slowest rank.
        rate: what a rank sends [byte/s].
        assumed: the plan's [byte/s]; None: it names no GPU.
    """

    group: str
    size: int
    across: bool
    seconds: float
    rate: float
    assumed: float | None

    @property
    def problem(self) -> str | None:
        """That the rate is far below the plan's."""
        if self.assumed is None or self.rate >= SLOW * self.assumed:
            return None
        return (
            f"{self.group}: {self.rate / 1e9:.3g} GB/s in groups of {self.size}, expected at least "
            f"{SLOW:.0%} of the plan's {self.assumed / 1e9:.3g} GB/s. See the links above, and "
            "NCCL_DEBUG=INFO for the way it took"
        )


@dataclass(frozen=True)
class Hosts:
    """The findings of all ranks together.

    Args:
        ranks: host -> its ranks.
        problems: what differs, is not shared or is slow, a sentence each.
        timings: of collectives, in the order of `GROUPS`.
    """

    ranks: Mapping[str, tuple[int, ...]]
    problems: tuple[str, ...]
    timings: tuple[Timing, ...]


def compare_hosts(plan: Plan, facts: Facts, problems: Sequence[str]) -> Hosts:
    """Every rank calls it with what was found on its host; all return the same.

    Communicates: facts, over all ranks; collectives of `BYTES` in every group of the plan.
    Raises: RuntimeError where a collective takes longer than `TIMEOUT`.
    """
    with topology.start(plan, TIMEOUT) as topo:
        config = sha256(plan.model_dump_json(exclude={"source", "notes"}).encode()).hexdigest()
        everyone: list[Any] = [None] * topo.world_size
        dist.all_gather_object(everyone, (facts | {"plan": config[:12]}, problems))
        of_hosts: dict[str, list[int]] = defaultdict(list)
        for rank, key in enumerate(topo.hosts):
            of_hosts[f"{everyone[rank][0]['host']} ({key:08x})"].append(rank)
        found = [*differences({host: everyone[own[0]][0] for host, own in of_hosts.items()})]
        for host, own in of_hosts.items():
            found += [f"{host}: {each}" for each in dict.fromkeys(everyone[own[0]][1])]
        found += _shares_run_folder(plan, topo)
        timings = tuple(_timings(plan, topo))
        found += [each.problem for each in timings if each.problem]
        ranks = {host: tuple(own) for host, own in of_hosts.items()}
        return Hosts(ranks, tuple(found), timings)


def differences(hosts: Mapping[str, Facts]) -> Iterator[str]:
    """Yields a sentence for each fact that has to be equal on all hosts and is not."""
    for name, values in _compared(hosts).items():
        found: dict[str, list[str]] = defaultdict(list)
        for host, value in values.items():
            found[value].append(host)
        if len(found) > 1:
            each = "; ".join(f"{value} on {', '.join(own)}" for value, own in found.items())
            yield f"{name}: {each}, expected the same on all hosts"


def _compared(hosts: Mapping[str, Facts]) -> dict[str, dict[str, str]]:
    """Name -> host -> value in words."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for host, facts in hosts.items():
        for package, version in facts["packages"].items():
            found[package][host] = version or "missing"
        gpus = [gpu["name"] for gpu in facts["gpus"]]
        found["GPUs"][host] = (
            ", ".join(f"{gpus.count(x)} x {x}" for x in dict.fromkeys(gpus)) or "none"
        )
        found["driver"][host] = facts["driver"] or "none"
        found["CUDA of torch"][host] = facts["torch"].get("cuda") or "none"
        found["Python"][host] = facts["python"]
        found["kernels"][host] = facts["extension"].get("error", "built")
        found["plan"][host] = facts["plan"]
    return found


def _shares_run_folder(plan: Plan, topo: Topology) -> list[str]:
    """Hosts that do not see where the run folder is what the first rank wrote there."""
    folder, name = nearest(Path(plan.run)), [f".doctor-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(name, src=0)
    if topo.is_main and os.access(folder, os.W_OK):
        (folder / name[0]).touch()
    dist.barrier()
    sees: list[Any] = [None] * topo.world_size
    dist.all_gather_object(sees, (os.uname().nodename, (folder / name[0]).exists()))
    if topo.is_main:
        (folder / name[0]).unlink(missing_ok=True)
    blind = sorted({host for host, there in sees if not there})
    where = f"run folder {plan.run}"
    return [
        f"{where}: {host} does not see what rank 0 writes in {folder}, expected a file system that "
        "all hosts share. Change run"
        for host in blind
    ]


def _timings(plan: Plan, topo: Topology) -> Iterator[Timing]:
    """One of each kind of group with more than one rank; ranks of other modules take no part."""
    for name in GROUPS:
        group = getattr(topo.groups, name)
        ranks = dist.get_process_group_ranks(group)
        sizes = torch.tensor([len(ranks)])
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        if sizes.item() == 1:
            continue
        seconds = _slowest(_all_reduce(group, topo.device) if len(ranks) > 1 else 0.0)
        across = len({topo.hosts[rank] for rank in ranks}) > 1
        sent = 2 * (len(ranks) - 1) / len(ranks) * BYTES[topo.device.type]
        yield Timing(name, len(ranks), across, seconds, sent / seconds, _assumed(plan, ranks))


def _all_reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of an all-reduce: the median of `ROUNDS` after one that connects the ranks."""
    part, times = torch.zeros(BYTES[device.type], dtype=torch.uint8, device=device), list[float]()
    for _ in range(1 + ROUNDS):
        dist.barrier(group)
        begin = time.perf_counter()
        dist.all_reduce(part, group=group)
        if on_gpu(device):
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _slowest(seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _assumed(plan: Plan, ranks: Sequence[int]) -> float | None:
    gpu = gpu_of(plan)
    if gpu is None:
        return None
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    rate = group_rate(gpu, plan.hardware.gpus_per_node, len(ranks), stride)
    return reached("ring", rate, "byte")[0]
