"""Sizes, ranks and process groups of a run: as `Topology`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.groups import GroupMaker, adopt, disown, make_groups
from pyrl_ext.parallel.launch import launched
from pyrl_ext.parallel.shared_memory import host_key
from pyrl_ext.parallel.waiting import announced, say_nothing, say_on_stderr
from pyrl_ext.plan import Plan
from pyrl_ext.plan.groups import dynamic_cp_groups, groups_of
from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.plan.ranks import ranks_problem


@dataclass(frozen=True)
class RankCoords:
    """The place of a rank in one microbatch.

    Args:
        cp_size, cp_rank, cp_group: context-parallel ranks that share its rows (zigzag); the group
            is None for one rank.
        tp_size, tp_rank: tensor-parallel ranks that share the rows of a context-parallel rank.
    """

    cp_size: int = 1
    cp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None
    tp_size: int = 1
    tp_rank: int = 0


@dataclass(frozen=True)
class Topology:
    """The place of this process. Built by `start`, passed to whatever communicates.

    ``rank``, ``world_size``, ``hosts``, `world` and `is_main` are of the whole run; all else is of
    the module that this rank runs, on its ``grid``. Sizes and ranks are plain ints; ``groups`` is
    megatron-core's ``ProcessGroupCollection`` (``tp pp cp ep expt_tp dp dp_cp expt_dp ...``), which
    its functions take as an argument. ``cp_groups`` holds this rank's context-parallel group of
    each size that a microbatch may take; None for a group of one rank. ``hosts`` has the `host_key`
    of every rank. ``make_group`` is `GroupMaker.make`, for groups across modules. ``grids`` has
    those of all modules; ``colocated`` this rank's topology in each module that shares its ranks.
    """

    device: torch.device
    grid: Grid
    grids: Mapping[str, Grid]
    world_size: int
    rank: int
    dp_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    ep_size: int
    etp_size: int
    vpp_size: int | None
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    groups: Any
    cp_groups: Mapping[int, dist.ProcessGroup | None]
    hosts: tuple[int, ...]
    make_group: Callable[[str, Sequence[int]], dist.ProcessGroup]
    colocated: Mapping[str, Topology] = field(default_factory=dict[str, "Topology"])

    @property
    def module(self) -> str:
        """Name of the module that this rank runs; of several the language model."""
        return self.grid.name

    @property
    def llm(self) -> Grid:
        """The grid of the language model."""
        return self.grids["llm"]

    def of(self, name: str) -> Topology | None:
        """The place of this rank in the module ``name``; None: it does not run that one."""
        return self if name == self.module else self.colocated.get(name)

    @property
    def has_modules(self) -> bool:
        """True if the run has several modules, on this rank or on others."""
        return len(self.grids) > 1

    @property
    def first(self) -> int:
        """First rank of this rank's module."""
        return self.grid.first

    @property
    def grid_rank(self) -> int:
        """This rank in the grid of data- and context-parallel ranks, in which schedules count."""
        return self.dp_rank * self.cp_size + self.cp_rank

    def place(self, cp_size: int | None = None) -> RankCoords:
        """This rank's place in a microbatch of ``cp_size`` ranks; None: as the plan says."""
        size = self.cp_size if cp_size is None else cp_size
        return RankCoords(
            cp_size=size,
            cp_rank=self.grid_rank % size,
            cp_group=self.cp_groups[size],
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
        )

    @property
    def world(self) -> dist.ProcessGroup | None:
        """All ranks; None for a process alone."""
        return dist.group.WORLD if self.world_size > 1 else None

    @property
    def is_main(self) -> bool:
        """True if this is the one process that writes files and shows progress."""
        return self.rank == 0

    @property
    def computes_losses(self) -> bool:
        """True if this rank is on the last stage of the language model."""
        return self.module == "llm" and self.is_last_stage

    @property
    def loss_rank(self) -> int:
        """First rank of the last stage of the language model."""
        return self.llm.rank_of(pp=self.llm.parallel.pp - 1)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def last_stage(self) -> int:
        """Global rank of the last pipeline stage of this rank's pipeline."""
        return dist.get_global_rank(self.groups.pp, self.pp_size - 1)


def device_of(kind: str) -> torch.device:
    """``cpu``, or the GPU of this local rank."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "topology: device is cuda, but torch sees no GPU. Use device=cpu, or a machine with one"
        )
    return torch.device("cuda", launched("LOCAL_RANK", 0))


def _start_processes(device: torch.device, plan: Plan, timeout: timedelta) -> None:
    world_size = plan.world_size
    if problem := ranks_problem(plan, launched("WORLD_SIZE", 1)):
        raise RuntimeError(f"topology: {problem}")
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if world_size > 1:
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        what = f"all {world_size} ranks at {store}, the store of the rendezvous"
        advice = "Each node needs the same address, and the command of its ranks"
        say = say_nothing if launched("LOCAL_RANK", 0) else say_on_stderr
        with announced(what, timeout.total_seconds(), advice, say, signals_kill=True):
            dist.init_process_group(backend, timeout=timeout)
    else:  # alone: no port, no rendezvous
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


@contextmanager
def start(
    plan: Plan, timeout: timedelta = timedelta(minutes=30), connect: bool = True
) -> Generator[Topology]:
    """Join the other processes and make the plan's groups; destroy them when the block ends.

    Args:
        plan: its groups are made (`groups_of`).
        timeout: how long a collective may wait for a rank before it fails.
        connect: use every group once, so that all communicators are made here and in one order
            (`GroupMaker.connect`); without it NCCL makes each at its first use.

    Communicates: the rendezvous, over torchrun's environment when there is more than one process,
        and with the other members of each group.
    Raises: RuntimeError when the number of processes is not the plan's, or there is no such device;
        ValueError when torchrun's environment holds no numbers.
    """
    device = device_of(plan.device)
    _set_allocator(plan)
    if on_gpu(device):
        torch.get_device_module(device).set_device(device)
    ours = not dist.is_initialized()
    if ours:
        _start_processes(device, plan, timeout)
    else:
        gc.collect()  # a model of an earlier topology holds its groups in reference cycles
    hosts, number = _meet()
    maker = GroupMaker(number, timeout)
    try:
        maker.make_listed(groups_of(plan, dist.get_rank()))
        if connect:
            maker.connect(device)
        yield _topology(plan, device, hosts, maker)
        if not ours:
            dist.barrier()  # nobody closes a group that another still reads from
    finally:
        disown()
        maker.destroy()
        if ours:
            dist.destroy_process_group()


def _topology(
    plan: Plan, device: torch.device, hosts: tuple[int, ...], maker: GroupMaker
) -> Topology:
    rank = dist.get_rank()
    places = [
        _place_in(grid, plan, device, hosts, maker)
        for grid in plan.grids.values()
        if rank in grid.ranks
    ]
    first, *colocated = places
    adopt(first.groups, first.vpp_size, plan.model.fp8 is not None)
    return replace(first, colocated={topo.module: topo for topo in colocated})


def _place_in(
    grid: Grid, plan: Plan, device: torch.device, hosts: tuple[int, ...], maker: GroupMaker
) -> Topology:
    """This rank's place in one module."""
    rank = dist.get_rank()
    sizes = grid.parallel
    at = grid.place(rank)
    groups = make_groups(maker, grid)
    return Topology(
        device=device,
        grid=grid,
        grids=plan.grids,
        world_size=dist.get_world_size(),
        rank=rank,
        dp_size=sizes.dp,
        tp_size=sizes.tp,
        pp_size=sizes.pp,
        cp_size=sizes.cp,
        ep_size=sizes.ep,
        etp_size=sizes.etp_size,
        vpp_size=sizes.vpp,
        dp_rank=at.dp,
        tp_rank=at.tp,
        pp_rank=at.pp,
        cp_rank=at.cp,
        groups=groups,
        cp_groups=_cp_groups(grid, groups, maker),
        hosts=hosts,
        make_group=maker.make,
    )


def _cp_groups(grid: Grid, groups: Any, maker: GroupMaker) -> dict[int, dist.ProcessGroup | None]:
    """This rank's context-parallel group of each size that a microbatch may take; None of size
    1."""
    smallest = grid.parallel.cp
    found = {smallest: groups.cp if smallest > 1 else None}
    for size in dynamic_cp_groups(grid, dist.get_rank()):
        found[size] = maker.of(f"{grid.name} cp {size}")
    return found


_started = 0
"""Topologies that this process took part in."""


def _meet() -> tuple[tuple[int, ...], int]:
    """`host_key` of every rank, and a number that no earlier topology of these processes has.

    Communicates: 16 bytes of every rank, on the CPU.
    """
    global _started
    mine = torch.tensor([host_key(), _started])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    hosts, started = torch.stack(everyone).T.tolist()
    _started = max(started) + 1
    return tuple(hosts), _started


# The setting of torch's CUDA allocator ------------------------------------------------------------

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def allocator_setting(plan: Plan, environment: Mapping[str, str]) -> str | None:
    """The setting that a run changes; None: the user chose one, or the default stays.

    Microbatches differ in size, so segments of fixed sizes fragment. Segments that grow are virtual
    memory, which CUDA IPC cannot open in several versions of torch. So the default stays where the
    trainer's buckets go to the engine by IPC, and where this process holds a part of vLLM: its
    all-reduce shares the buffers of CUDA graphs by IPC.
    """
    if plan.device != "cuda" or any(name in environment for name in _ALLOCATOR_VARIABLES):
        return None
    holds_part = plan.transport == "inprocess" and plan.rollout.tp > 1
    return None if plan.transport == "ipc" or holds_part else _EXPANDABLE


def _set_allocator(plan: Plan) -> None:
    """Apply `allocator_setting`, to this process alone: an engine's process inherits variables."""
    setting = allocator_setting(plan, os.environ)
    if setting is not None:
        torch._C._accelerator_setAllocatorSettings(setting)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
