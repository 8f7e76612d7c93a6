"""The process groups of one module's grid, and megatron's global state that must name them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist

from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.suppress_warnings import hide_warnings
from pyrl_ext.plan.groups import WORLD, RankGroup
from pyrl_ext.plan.model.ranks import GROUPS, MORE_GROUPS, Grid

hide_warnings()  # whoever imports megatron-core imports this module before

# megatron-core 0.19.2 has other names for these: it divides data-parallel ranks further for ways of
# splitting weights and optimizers that are not used here
SAME_AS = {
    "intra_dp_cp": "dp_cp",
    "dp_cp_gtp_remat": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "expt_dp_gtp_remat": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}

# Globals of megatron.core.parallel_state -> the group that they must name
GLOBALS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",  # transformer/module.py:84: sharded_state_dict
    # utils.py:580: whether layers without a group take the one above (the queries of latent
    # attention that are not compressed: multi_latent_attention.py:510)
    "_DATA_PARALLEL_GROUP": "dp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",  # multi_token_prediction.py:635: which rank has MTP
}
# FP8 contexts want one more (fp8_utils.py:801); only delayed scaling, which no plan has, reduces
# over it
FP8_GLOBALS = {"_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp"}


class GroupMaker:
    """Makes process groups by their members alone, and destroys them all.

    A rank's cost so does not grow with the number of groups in the world. torch derives the name of
    such a group, under which the store keeps its addresses, from its ranks and from how many groups
    this process is in. Ranks need not be in equally many, and a name that comes twice leads to the
    addresses of a group that is gone: the ranks would wait for each other until the timeout. So
    here a group is named after the run's topology, its first role and its ranks, and is made once.

    Args:
        number: of this topology among those that the processes of this world build.
        timeout: of every collective in the groups.
    """

    def __init__(self, number: int, timeout: timedelta):
        self.number = number
        self.timeout = timeout
        self._made: dict[str, Any] = {}
        self._listed: dict[str, RankGroup] = {}

    def make_listed(self, groups: Sequence[RankGroup]) -> None:
        """Make the groups that the plan has for this rank (`groups_of`), in their order.

        Communicates: with the other members of each group.
        """
        for group in groups:
            self._listed |= dict.fromkeys(group.roles, group)
            self.of(group.roles[0])

    def of(self, role: str) -> Any:
        """The group of a role of the plan's list; None if this rank has no part in it."""
        group = self._listed.get(role)
        if group is None:
            return None
        if role == WORLD:
            return dist.group.WORLD
        return self._new(group.roles[0], group.ranks, ", ".join(group.roles))

    def make(self, role: str, ranks: Sequence[int]) -> Any:
        """The group of ``ranks`` for ``role``; None on a rank that is not among them.

        Communicates: if the plan's list does not have it, at the first call with the other members,
        who call it as well, in one order of roles.
        """
        if dist.get_rank() not in ranks:
            return None
        if role in self._listed:
            return self.of(role)
        return self._new(role, sorted(ranks), role)

    def connect(self, device: torch.device) -> None:
        """Let NCCL make the communicators of the plan's list, all in one order.

        Otherwise it makes each at its first use, where two ranks may come to two groups in opposite
        orders and wait for each other, and after an engine has measured the memory that is free.

        Communicates: an all-reduce of one number in each group, and one number to each of its
        pairs. Syncs: the device.
        """
        number = torch.zeros(1, device=device)
        for listed in dict.fromkeys(self._listed.values()):
            group = self.of(listed.roles[0])
            if listed.on_device:
                connect(group, device)
            for low, high in listed.pairs:
                if dist.get_rank() == low:
                    dist.send(number, high, group=group)
                else:
                    dist.recv(number, low, group=group)
        if on_gpu(device):
            torch.get_device_module(device).synchronize(device)

    def destroy(self) -> None:
        """Destroy the groups: each holds sockets and threads, three over gloo."""
        if dist.is_initialized():  # else user code destroyed them, which is reported elsewhere
            for group in self._made.values():
                dist.destroy_process_group(group)
        self._made.clear()

    def _new(self, role: str, ranks: Sequence[int], description: str) -> Any:
        name = f"pyrl-{self.number}-{role}-{'-'.join(map(str, ranks))}"
        if name not in self._made:
            with group_name(name):
                self._made[name] = dist.new_group(
                    list(ranks),
                    timeout=self.timeout,
                    use_local_synchronization=True,
                    group_desc=description,
                )
        return self._made[name]


def connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Make the communicator of a group; None, of which this rank is not a member: nothing.

    Communicates: an all-reduce of one number if the group has several ranks.
    """
    if group is not None and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


@contextmanager
def group_name(name: str) -> Generator[None]:
    """Give the process group made in this block a name; torch has no argument for it."""
    torch_names: Any = dist.distributed_c10d
    theirs = torch_names._process_group_name
    torch_names._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        torch_names._process_group_name = theirs


def compile_late(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``, from the first call on."""
    compiled = cache(lambda: torch.compile(function))
    return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


def import_megatron() -> None:
    """Import megatron-core, whose 41 ``torch.compile`` bring 2 s of compiler into every process.

    A run calls few of these functions, on a CPU none.
    """
    library: Any = torch
    compiler = torch.compile
    library.compile = compile_late
    try:
        importlib.import_module("megatron.core.jit")  # brings the layers with it
    finally:
        library.compile = compiler


def make_groups(maker: GroupMaker, grid: Grid) -> Any:
    """This rank's groups on ``grid`` as megatron's ``ProcessGroupCollection``; kinds of the same
    ranks have the same group."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    kinds = (*GROUPS, *MORE_GROUPS, "embd")
    groups = {kind: maker.of(f"{grid.name} {kind}") for kind in kinds}
    groups |= {other: groups[name] for other, name in SAME_AS.items()}
    return ProcessGroupCollection(**groups)


def adopt(groups: Any, vpp_size: int | None, fp8: bool) -> None:
    """Let megatron's global parallel state name the groups of this rank's module.

    ``initialize_model_parallel`` makes all groups of the world on every rank, and knows one layout
    for all ranks, so it is not called. megatron-core 0.19.2 reads few globals where it is given a
    collection of groups: those of `GLOBALS` and `FP8_GLOBALS`, the number of chunks
    (pipeline_parallel_layer_layout) and the buffer that sequence-parallel layers gather into
    (tensor_parallel/layers.py:570).

    Args:
        fp8: whether the module's layers run in FP8.
    """
    from megatron.core import parallel_state

    state: Any = parallel_state
    for name, kind in (GLOBALS | FP8_GLOBALS if fp8 else GLOBALS).items():
        if getattr(state, name) is not None:  # AttributeError: another megatron-core
            raise RuntimeError(
                f"topology: megatron's {name} is set, expected one topology at a time"
            )
        setattr(state, name, getattr(groups, kind))
    state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = vpp_size
    state._set_global_memory_buffer()


def disown() -> None:
    """Clear megatron's global parallel state."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
