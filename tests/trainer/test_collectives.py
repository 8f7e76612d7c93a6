"""Every collective of a run: its types are those that NCCL has, since gloo takes more of them, and
its groups those of the plan's list."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.plan.groups import groups_of
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers.nccl_rules.tensors import MOVED
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QUICK
from tests.helpers.traffic import counted
from tests.parity import compiled

pytestmark = pytest.mark.multiprocess

WORLD = "default_pg"  # torch's description of the group of all ranks
RUNS = {
    "experts of two bytes, dynamic cp": (
        "glm 384",
        "parallel.dp=2",
        "parallel.ep=2",
        "parallel.dynamic_cp=2",
        "optimizer.distributed=true",
        "model.dtype=bfloat16",
        "objective.kl_coef=0.1",
    ),
    "tp, kept sets, MTP": ("glm mtp kept", "parallel.tp=2", "objective.preset=gspo"),
    "vpp, MTP": ("glm mtp 2", "parallel.pp=2", "parallel.vpp=2", "model.recompute=full"),
}


# On four ranks groups of the same kind have other ranks, so that each has to be used.
RUNS_OF_FOUR = {
    "dp, pp, ep": (
        "glm",
        "parallel.dp=2",
        "parallel.pp=2",
        "parallel.ep=2",
        "optimizer.distributed=true",
    ),
    "tp, pp": ("glm", "parallel.tp=2", "parallel.pp=2"),
    "dp, cp, ep": ("glm", "parallel.dp=2", "parallel.cp=2", "parallel.ep=2"),
}

# What communicates in the group of all ranks of the run, with tensors on the host alone: gloo
# carries them, and NCCL never makes a communicator for the group.
HOST_NUMBERS = {
    "_meet",
    "Delivery.read_on_host",
    "TransferStats.metrics",
    "Policy._sums",
    "Replay.agreement",
    "gather_objects",
    "write_digests",
    "_problems",
    # of megatron-core: objects
    "_get_param_groups",
    "_validate_common_state_dict",
    "determine_global_metadata",
    "save_state_dict_async_plan",
    "save_state_dict_async_finalize",
}


class Found(NamedTuple):
    """Findings of one run, on one rank."""

    dtypes: set[torch.dtype]
    world: set[str]
    """Functions that communicated in the group of all ranks."""
    used: set[str]
    """Descriptions of the other groups of several ranks that something communicated in."""
    listed: set[str]
    """Those of the plan's list that carry tensors on the device."""
    pairs: bool
    """True if the list has pairs of ranks that send to each other in the group of all ranks."""


def on_rank(group: Any, folder: Path, runs: dict[str, tuple[str, ...]]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for name, (model, *overrides) in runs.items():
        plan = compiled(model, folder, (*QUICK, *overrides))
        clock = Clock()
        # not those that make the communicators, in which every group is used
        with counted() as traffic, topology.start(plan, connect=False) as topo:
            step = RolloutStep.build(plan, topo)
            step.sync_weights(0, clock)
            rollout = step.take(0, clock)
            shard, old = step.score(step.batch_of(rollout, clock), rollout.index, clock, check=True)
            step.update(shard, clock)
            step.metrics(rollout.index, shard, old)
            step.policy.save(folder / name.replace(" ", "-"))
            step.evaluate(clock)
            step.close()
        calls = [call for call in traffic.calls if call.ranks > 1]
        groups = [g for g in groups_of(plan, topo.rank) if len(g.ranks) > 1]
        found[name] = Found(
            {dtype for call in traffic.calls for dtype in call.dtypes},
            {call.caller for call in calls if call.group == WORLD},
            {call.group for call in calls if call.group != WORLD},
            {", ".join(group.roles) for group in groups if group.on_device},
            any(group.roles == ("world",) for group in groups),
        )
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_ranks(on_rank, 2, tmp_path_factory.mktemp("collectives"), RUNS)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_ranks(on_rank, 4, tmp_path_factory.mktemp("four"), RUNS_OF_FOUR)


@pytest.mark.parametrize("name", RUNS)
def test_a_step_communicates_tensors_that_nccl_takes(ranks: list[Any], name: str):
    for rank in ranks:
        dtypes = rank[name].dtypes
        assert dtypes <= MOVED
        assert {torch.float32, torch.int64} < dtypes  # and others: it did communicate


@pytest.mark.parametrize("name", RUNS)
def test_a_step_communicates_in_the_groups_of_the_list(ranks: list[Any], name: str):
    for rank in ranks:
        assert rank[name].used == rank[name].listed


@pytest.mark.parametrize("name", RUNS_OF_FOUR)
def test_a_step_of_four_ranks_uses_each_group_of_the_list(four_ranks: list[Any], name: str):
    for rank in four_ranks:
        assert len(rank[name].listed) > 2
        assert rank[name].used == rank[name].listed


@pytest.mark.parametrize("name", RUNS)
def test_a_step_sends_numbers_of_the_host_alone_to_the_whole_world(ranks: list[Any], name: str):
    for rank in ranks:
        world = rank[name].world
        assert {"_meet", "Replay.agreement"} < world <= HOST_NUMBERS | {"_p2p_ops"}
    # of a pair one rank sends in the group of the pipeline, and the other in that of all ranks
    sends = [rank[name].pairs and "_p2p_ops" in rank[name].world for rank in ranks]
    assert any(sends) == ranks[0][name].pairs
