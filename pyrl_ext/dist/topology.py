"""Sizes, ranks and process groups of a run: the only file that reads megatron's parallel state."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from pyrl_ext.dist.shared_memory import host_key
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.cp_sizes import cp_group, cp_sizes
from pyrl_ext.plan.model.ranks import Grid

# said once per import of megatron-core; the plan's backend decides, not what happens to be there
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (are|is) not installed")
warnings.filterwarnings("ignore", message=".*without the NVRx async checkpointing.*")
warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA runtime"


@dataclass(frozen=True)
class Place:
    """The place of a rank in one microbatch.

    Args:
        cp_size, cp_rank, cp_group: context-parallel ranks that share its rows (zigzag); the group
            is None for one rank.
        tp_size, tp_rank: tensor-parallel ranks that share the rows of a context-parallel rank.
    """

    cp_size: int = 1
    cp_rank: int = 0
    cp_group: Any = None
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
    of every rank.
    """

    device: torch.device
    grid: Grid
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
    cp_groups: Mapping[int, Any]
    hosts: tuple[int, ...]

    @property
    def module(self) -> str:
        """Name of the module that this rank runs."""
        return self.grid.name

    @property
    def first(self) -> int:
        """First rank of this rank's module."""
        return self.grid.first

    @property
    def grid_rank(self) -> int:
        """This rank in the grid of data- and context-parallel ranks, in which schedules count."""
        return self.dp_rank * self.cp_size + self.cp_rank

    def place(self, cp_size: int | None = None) -> Place:
        """This rank's place in a microbatch that ``cp_size`` ranks share; None: as the plan says.

        Raises: ValueError for a size without process groups.
        """
        size = self.cp_size if cp_size is None else cp_size
        if size not in self.cp_groups:
            raise ValueError(
                f"Topology.place: cp_size is {size}, expected one of {sorted(self.cp_groups)} "
                "(parallel.cp to parallel.dynamic_cp), the sizes of this rank's process groups"
            )
        return Place(
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
        """Whether this is the one process that writes files and shows progress."""
        return self.rank == 0

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


def launched(name: str, default: int) -> int:
    """The integer that torchrun put into the environment variable ``name``, or ``default``."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"topology: {name}={text!r}, expected a number. Unset it, or use torchrun")
    return int(text)


def _start_processes(device: torch.device, world_size: int, timeout: timedelta) -> None:
    processes = launched("WORLD_SIZE", 1)
    if processes != world_size:
        raise RuntimeError(
            f"topology: the plan needs {world_size} processes (dp*tp*pp*cp), this run has "
            f"{processes}. Start it with: torchrun --nproc-per-node {world_size} -m pyrl_ext.train"
        )
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if world_size > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:  # alone: no port, no rendezvous
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


@contextmanager
def start(plan: Plan, timeout: timedelta = timedelta(minutes=30)) -> Iterator[Topology]:
    """Join the other processes and build megatron's groups; destroy them when the block ends.

    Args:
        plan: ``plan.device``, ``plan.parallel`` and ``plan.world_size`` are read.
        timeout: how long a collective may wait for a rank before it fails.

    Communicates: the rendezvous, over torchrun's environment when there is more than one process.
    Raises: RuntimeError when the number of processes is not the plan's, or there is no such device;
        ValueError when torchrun's environment holds no numbers.
    """
    device = device_of(plan.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        _start_processes(device, plan.world_size, timeout)
    else:
        gc.collect()  # a model of an earlier topology holds its groups in reference cycles
    try:
        yield _groups(plan, device)
        if not ours:
            dist.barrier()  # nobody closes a group that another still reads from
    finally:
        _leave_groups()
        if ours:
            _group_of.cache_clear()
            dist.destroy_process_group()


def _leave_groups() -> None:
    """Destroy megatron's groups, which megatron forgets but leaves open.

    Each holds sockets and threads (three, over gloo), so a process that builds several topologies
    would run out of them.
    """
    from megatron.core import parallel_state

    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():  # user code destroyed them; what it broke is reported elsewhere
        return
    for group in {group for group in groups if group is not None}:
        dist.destroy_process_group(group)


def _embedding_ranks(plan: Plan, pp_ranks: list[int]) -> list[int]:
    """Ranks of a pipeline that hold the same embedding, whose gradients are summed.

    The first stage, the stage with MTP layers, and the last if its output is tied. (megatron's
    default is the first and the last: it would add the gradients of an embedding and an output.)
    """
    tied = plan.sizes.tie_word_embeddings
    holders = (any(s.embedding or s.mtp or (s.loss and tied) for s in c) for c in plan.stages)
    return [rank for rank, holds in zip(pp_ranks, holders, strict=True) if holds]


def _groups(plan: Plan, device: torch.device) -> Topology:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    sizes = plan.parallel
    embedding_ranks: Any = partial(_embedding_ranks, plan)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        get_embedding_ranks=embedding_ranks,
        create_gloo_process_groups=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Topology(
        device=device,
        grid=plan.grids["llm"],
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        dp_size=groups.dp.size(),
        tp_size=groups.tp.size(),
        pp_size=groups.pp.size(),
        cp_size=groups.cp.size(),
        ep_size=groups.ep.size(),
        etp_size=groups.expt_tp.size(),
        vpp_size=sizes.vpp,
        dp_rank=groups.dp.rank(),
        tp_rank=groups.tp.rank(),
        pp_rank=groups.pp.rank(),
        cp_rank=groups.cp.rank(),
        groups=groups,
        cp_groups=_cp_groups(plan, groups),
        hosts=_hosts(),
    )


def _cp_groups(plan: Plan, groups: Any) -> dict[int, Any]:
    """This rank's context-parallel group of each of the `cp_sizes` that a microbatch may take.

    A group of c ranks holds neighbours in the grid of data- and context-parallel ranks, from a
    multiple of c on. Ranks behind the last multiple are in no group of c; they make one of
    themselves that nothing uses, since torch counts groups (see `_group_of`).
    """
    smallest, grid = groups.cp.size(), dist.get_process_group_ranks(groups.dp_cp)
    found, rank = {smallest: groups.cp if smallest > 1 else None}, grid.index(dist.get_rank())
    for size in cp_sizes(len(grid), smallest, plan.parallel.dynamic_cp or smallest)[1:]:
        members = cp_group(rank, len(grid), size)
        group = _group_of(tuple(grid[i] for i in members), size)
        if len(members) == size:
            found[size] = group
    return found


def _hosts() -> tuple[int, ...]:
    """`host_key` of every rank. Communicates: 8 bytes of every rank, on the CPU."""
    mine = torch.tensor([host_key()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return tuple(int(each) for each in everyone)


@cache
def _group_of(ranks: tuple[int, ...], _size: int) -> Any:
    """The group of ``ranks``, created by them alone: a rank's cost does not grow with the world.

    It lives as long as the process. torch names such a group by its ranks and by the number of
    groups that the process has: ranks with different numbers of groups wait for each other forever.
    So every rank makes as many, in the same order. The store keeps the addresses under a name; a
    second group of that name would connect to them and hang.

    Args:
        _size: tells groups of the same ranks apart.
    """
    return dist.new_group(ranks, use_local_synchronization=True)
