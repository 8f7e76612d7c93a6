"""The list of process groups: what its members agree on, for every rank of every shipped config."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.items import COMMUNICATOR_BYTES, CONTEXT_BYTES
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.groups import (
    Foreign,
    RankGroup,
    communicators,
    foreign,
    groups_of,
    neighbours,
)
from pyrl_ext.plan.phases import MEMORY_PHASES, START
from tests.helpers.configs import CONFIGS
from tests.helpers.tiny import tiny_plan

SHIPPED = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("examples/*.yaml")])
GLM47 = CONFIGS / "glm47.yaml"
END = ("end", ())  # comes after every group


@cache
def shipped(path: Path) -> tuple[tuple[RankGroup, ...], ...]:
    """By rank, its groups."""
    plan = compile_plan(path)
    return tuple(groups_of(plan, rank) for rank in range(plan.world_size))


def cycle_of(after: dict[tuple, set[tuple]]) -> list[tuple]:
    """Groups that come after each other in a circle; nothing if there is an order of all."""
    left = {group: set(later) for group, later in after.items()}
    while ready := [group for group, later in left.items() if not later]:
        for group in ready:
            del left[group]
        for later in left.values():
            later.difference_update(ready)
    return sorted(left)


def names_of(groups: tuple[RankGroup, ...]) -> list[tuple]:
    """The first role and the ranks of each, by which torch knows it."""
    return [(group.roles[0], group.ranks) for group in groups]


# every rank of every shipped config --------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_groups_of_are_the_same_on_all_their_members(path: Path):
    by_rank = shipped(path)
    for rank, groups in enumerate(by_rank):
        assert len({*names_of(groups)}) == len(groups)
        for group in groups:
            assert rank in group.ranks and list(group.ranks) == sorted({*group.ranks})
            of_others = [each for each in by_rank[group.ranks[0]] if each.roles == group.roles]
            (first,) = of_others
            assert (first.ranks, first.on_device) == (group.ranks, group.on_device)
            for pair in group.pairs:
                assert rank in pair and {*pair} <= {*group.ranks} and pair[0] < pair[1]
                other = next(g for g in by_rank[sum(pair) - rank] if g.roles == group.roles)
                assert pair in other.pairs


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_groups_of_come_in_one_order_on_all_ranks(path: Path):
    """Each rank makes a group when it has made those before it, and waits for the other members."""
    by_rank = shipped(path)
    after = defaultdict[tuple, set[tuple]](set)
    for groups in by_rank:
        names = names_of(groups)
        for earlier, later in pairwise([*names, END]):
            after[earlier].add(later)
    after[END] = set()
    assert cycle_of(after) == []
    counts = sorted({len(groups) for groups in by_rank})
    print(f"{path.stem}: {counts} groups a rank")


def test_cycle_of_finds_two_ranks_that_make_two_groups_in_opposite_orders():
    first = ("a", (0, 1))
    second = ("b", (0, 1))
    third = ("c", (0, 1))
    assert cycle_of({first: {second}, second: {third}, third: set()}) == []
    assert cycle_of({first: {second}, second: {first}, third: set()}) == [first, second]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_foreign_communicators_are_the_same_on_all_their_members(path: Path):
    plan = compile_plan(path)
    found = [foreign(plan, rank) for rank in range(plan.world_size)]
    for rank, theirs in enumerate(found):
        for each in theirs:
            assert rank in each.ranks
            assert all(each in found[other] for other in each.ranks)


# by hand -----------------------------------------------------------------------------------------


def test_groups_of_a_tower_on_shared_ranks_are_never_reduced_during_its_backward_pass():
    words = ("modules.vision.ranks=shared", "optimizer.overlap_grad_reduce=true")
    plan = compile_plan(CONFIGS / "tiny_vl.yaml", ["parallel.dp=2", "parallel.ep=2", *words])
    roles = [group.roles for group in groups_of(plan, 0) if len(group.ranks) > 1]
    assert ("llm dp_cp",) in roles
    assert not any(role[0].startswith("vision dp_cp") for role in roles)


def test_messages_round_a_ring_have_a_communicator_for_each_pair():
    ranks = (0, 2, 4, 6)
    assert neighbours(ranks, 0) == ((0, 2), (0, 6))
    assert neighbours(ranks, 4) == ((2, 4), (4, 6))
    assert neighbours((3,), 3) == ()


def test_groups_of_eight_ranks_are_one_group_for_all_its_roles():
    plan = compile_plan(GLM47)  # dp 8, ep 8, a distributed optimizer
    alone, everyone, engine = groups_of(plan, 3)
    assert engine == RankGroup((0, 1, 2, 3), ("engine",), on_device=False)  # of vLLM's tp 4
    assert (alone.ranks, alone.communicators) == ((3,), 0)
    assert everyone.ranks == tuple(range(8)) and everyone.communicators == 1
    assert {"llm dp_cp", "llm ep", "llm tp_ep", "llm intra_dist_opt"} < {*everyone.roles}
    assert communicators(plan, 3) == 1


def test_groups_of_keep_gradients_separate_if_they_are_reduced_during_a_backward_pass():
    layout = ("parallel.dp=2", "parallel.ep=2", "optimizer.distributed=true")
    together = tiny_plan(*layout)
    overlapped = tiny_plan(*layout, "optimizer.overlap_grad_reduce=true")
    assert communicators(together, 0) == 1
    assert [g.roles for g in groups_of(overlapped, 0) if g.ranks == (0, 1)][1] == ("llm dp_cp",)
    assert communicators(overlapped, 0) == 2


def test_groups_of_have_one_of_each_size_of_dynamic_cp():
    plan = tiny_plan("parallel.dp=6", "parallel.dynamic_cp=6", "batching.prompts=12")
    for rank, expected in ((0, [2, 4, 6]), (5, [2, 6])):  # 4 and 5 are in none of 4
        by_role = {role: group.ranks for group in groups_of(plan, rank) for role in group.roles}
        sizes = [len(ranks) for role, ranks in by_role.items() if role.startswith("llm cp ")]
        assert sorted(sizes) == expected


def test_groups_of_have_pairs_where_messages_are_not_in_batches():
    chunks = ("parallel.pp=2", "parallel.vpp=2")
    pipeline, world = groups_of(tiny_plan(*chunks), 0)[-2:]
    assert "llm pp" in pipeline.roles and world.roles == ("world",)
    assert pipeline.pairs == world.pairs == ((0, 1),)
    assert (pipeline.communicators, world.communicators) == (2, 1)
    longer = tiny_plan("parallel.pp=4", "parallel.pipeline_model_parallel_layout=Et|t|t|tL")
    assert not [g for g in groups_of(longer, 0) if "world" in g.roles]
    (pipeline,) = [g for g in groups_of(tiny_plan("parallel.pp=2"), 0) if "llm pp" in g.roles]
    assert pipeline.pairs == () and pipeline.communicators == 1


def test_groups_of_edges_are_two_a_depth():
    plan = compile_plan(CONFIGS / "qwen3_vl_30b.yaml")
    edges = [group for group in groups_of(plan, 0) if group.roles[0].startswith("vision 0")]
    assert [group.roles for group in edges] == [("vision 0 there",), ("vision 0 back",)]
    assert edges[0].ranks == edges[1].ranks == (*range(16), *range(32, 40))
    assert not [g for g in groups_of(plan, 16) if "vision 0 there" in g.roles]  # a later stage


def test_foreign_of_a_colocated_engine_are_vllms_two_of_tp_and_one_of_ep():
    assert foreign(compile_plan(GLM47), 6) == (
        Foreign("vllm tp", (4, 5, 6, 7)),
        Foreign("vllm tp PyNccl", (4, 5, 6, 7)),
        Foreign("vllm ep PyNccl", (4, 5, 6, 7)),
    )
    alone = compile_plan(GLM47, ["rollout.tp=1", "rollout.sleep=true", "hardware.gpu=null"])
    assert foreign(alone, 6) == ()
    elsewhere = compile_plan(GLM47, ["rollout.gpus=8"])  # two engines, of ranks 0 and 4
    assert [foreign(elsewhere, rank) for rank in (0, 1, 4)] == [
        (Foreign("sender", (0,)),),
        (),
        (Foreign("sender", (4,)),),
    ]


# counted -----------------------------------------------------------------------------------------


def held(plan: Plan, name: str) -> tuple[int, tuple[str, ...]]:
    (stage,) = stage_memory(plan)
    (item,) = [item for item in stage.items if item.name == name]
    return item.bytes, item.phases


def test_stage_memory_counts_the_groups_of_the_list_and_the_engines():
    plan = compile_plan(GLM47)
    always = (START, *MEMORY_PHASES)
    assert held(plan, "CUDA and NCCL") == (CONTEXT_BYTES + 4 * COMMUNICATOR_BYTES, always)
    suspends = compile_plan(GLM47, ["rollout.engine_options={enable_nccl_comm_suspend: true}"])
    assert held(suspends, "CUDA and NCCL") == (CONTEXT_BYTES + 2 * COMMUNICATOR_BYTES, always)
    awake = (START, "publish", "rollout")
    assert held(suspends, "NCCL of the engine") == (2 * COMMUNICATOR_BYTES, awake)
