"""Groups made by their members alone, and the globals of megatron that must name them."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

from pyrl_ext.parallel import topology
from pyrl_ext.parallel.groups import GLOBALS, GroupMaker, compile_late
from pyrl_ext.plan.groups import groups_of
from pyrl_ext.trainer.policy import Policy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_plan
from tests.helpers.traffic import counted, sockets

pytestmark = pytest.mark.multiprocess

PLANS = (
    ("parallel.tp=2", "parallel.pp=2"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.dynamic_cp=2", "parallel.ep=2"),
    ("parallel.tp=2", "parallel.pp=2"),  # the same ranks again, for the same roles
    ("parallel.dp=4", "parallel.dynamic_cp=4"),
)


TIMEOUT = timedelta(minutes=17)
# megatron's other names of groups: it splits data-parallel ranks in ways that are not used here
OTHERS = {
    "dp_cp": ("intra_dp_cp", "dp_cp_gtp_remat"),
    "expt_dp": ("intra_expt_dp", "expt_dp_gtp_remat"),
    "tp_ep_pp": ("tp_ep_pp_with_egtp_remat",),
}


def summed(topo: topology.Topology) -> dict[str, tuple[list[int], float]]:
    """Name of each group -> (its ranks, the sum of them as it adds up)."""
    groups = vars(topo.groups) | {f"cp {size}": g for size, g in topo.cp_groups.items()}
    found = {}
    for name, group in groups.items():
        if group is not None:
            mine = torch.tensor(float(topo.rank))
            dist.all_reduce(mine, group=group)
            found[name] = dist.get_process_group_ranks(group), float(mine)
    return found


def build_topology(number: int, *overrides: str) -> Any:
    with counted() as traffic, topology.start(tiny_plan(*overrides), TIMEOUT) as topo:
        in_edge = topo.make_group("edge", [0, 3]) is not None if number % 2 else False
        later = topo.make_group("all", range(4))
        dist.all_reduce(torch.ones(1), group=later)
        held = [*vars(topo.groups).values(), *topo.cp_groups.values()]
        different = len({id(group) for group in held if group is not None})
        mine = topo.grid.groups_of(topo.rank)
        for name, kind in (("TENSOR_MODEL", "tp"), ("DATA", "dp"), ("PIPELINE_MODEL", "pp")):
            assert getattr(parallel_state, f"_{name}_PARALLEL_GROUP") is getattr(topo.groups, kind)
        for kind, others in OTHERS.items():
            same = getattr(topo.groups, kind)
            assert all(getattr(topo.groups, other) is same for other in others)
        assert later._get_backend(topo.device).options._timeout == TIMEOUT
        listed = groups_of(tiny_plan(*overrides), topo.rank)
        return mine, listed, summed(topo), traffic.new_groups, different, in_edge


def build_topologies(world: dist.ProcessGroup) -> list[Any]:
    """Several in one process, and a group of some of the ranks, so that not all are in equally
    many when they make the next."""
    os.environ["WORLD_SIZE"] = str(world.size())
    before = sockets()
    results = []
    named = dist.distributed_c10d._process_group_name
    for number, overrides in enumerate(PLANS):
        results.append(build_topology(number, *overrides))
        gc.collect()
        assert sockets() == before, "groups of earlier topologies are open"
        assert dist.distributed_c10d._process_group_name is named
    return results


def test_start_makes_each_ranks_groups_alone_and_destroys_them():
    for rank, results in enumerate(run_ranks(build_topologies, 4)):
        for mine, listed, found, made, different, in_edge in results:
            for name, ranks in mine.items():
                assert found[name] == (list(ranks), sum(ranks)), (rank, name)
            assert not in_edge or rank in (0, 3)
            # the embedding is not tied to the output: first stages alone hold it
            assert ("embd" in found) == (rank == mine["pp"][0])
            assert different == len(listed) == len({group.ranks for group in listed})
            sizes = [len(group.ranks) for group in listed]
            edges = [2] * in_edge + [4]
            assert made == [*sizes, *edges]


def connect_groups(world: dist.ProcessGroup) -> list[tuple[str, str, int]]:
    """Name, group and ranks of each collective that connects the groups of a plan with stages of
    several chunks, whose neighbours send to each other without batches."""
    os.environ["WORLD_SIZE"] = str(world.size())
    plan = tiny_plan("parallel.pp=2", "parallel.vpp=2", "parallel.dp=2")
    with counted() as traffic, topology.start(plan, connect=True):
        return [(call.name, call.group, call.ranks) for call in traffic.calls if call.group]


def test_start_uses_every_group_of_several_ranks_once_in_the_order_of_the_list():
    plan = tiny_plan("parallel.pp=2", "parallel.vpp=2", "parallel.dp=2")
    for rank, calls in enumerate(run_ranks(connect_groups, 4)):
        listed = [g for g in groups_of(plan, rank) if g.on_device and len(g.ranks) > 1]
        used = [call for call in calls if call[0] == "allreduce"]
        assert used == [("allreduce", ", ".join(g.roles), len(g.ranks)) for g in listed]
        (pipeline,) = [g for g in listed if "llm pp" in g.roles]
        assert pipeline.pairs == (pipeline.ranks,)
        sends = [call[1] for call in calls if call[0] == "send"]
        both = [", ".join(pipeline.roles), "default_pg"]  # one group a direction
        assert sends == (both if rank == pipeline.ranks[0] else [])


def build_without(world: dist.ProcessGroup, config: Path, plain: Path) -> dict[str, str]:
    """The error without each global that `adopt` sets, by its name."""
    os.environ["WORLD_SIZE"] = str(world.size())
    errors: dict[str, str] = {}

    def attempt(name: str, *overrides: str) -> None:
        plan = tiny_plan(*overrides)
        with topology.start(plan) as topo:
            kept = getattr(parallel_state, name)
            assert kept is not None, name
            setattr(parallel_state, name, None)
            try:
                use(Policy.build(plan, topo))
            except (AssertionError, RuntimeError) as error:
                errors[name] = str(error)
            setattr(parallel_state, name, kept)

    def use(policy: Policy) -> None:
        topo = policy.topo
        for model in policy.llm.models:
            model.sharded_state_dict(metadata={"dp_cp_group": topo.groups.dp_cp})  # type: ignore
        if topo.tp_size > 1:
            rows = torch.ones(2, 1, 4, requires_grad=True)
            weight = torch.ones(6, 4)
            linear_with_grad_accumulation_and_async_allreduce(
                rows, weight, None, False, False, True, tp_group=topo.groups.tp
            )

    attempt("_TENSOR_MODEL_PARALLEL_GROUP", "parallel.tp=2")
    attempt(
        "_PIPELINE_MODEL_PARALLEL_GROUP",
        f"model.config={config}",
        "model.mtp=true",
        "parallel.pp=2",
    )
    attempt("_GLOBAL_MEMORY_BUFFER", "parallel.tp=2")
    interleaved = ("parallel.pp=2", "parallel.vpp=2")
    layout = "parallel.pipeline_model_parallel_layout=Et|t|t|tL"
    attempt("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", *interleaved, layout)
    # queries that are not compressed ask it whether there are groups
    attempt("_DATA_PARALLEL_GROUP", f"model.config={plain}", "parallel.tp=2")
    return errors


def test_adopt_sets_what_megatron_reads_and_no_more(tmp_path: Path):
    """Each of these is set, and a build, forward or checkpoint fails without it. An upgrade of
    megatron-core that reads one no longer fails here: then the line goes."""
    set_by_adopt = {
        *GLOBALS,
        "_GLOBAL_MEMORY_BUFFER",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    }
    hf = tiny_plan().hf | {"num_nextn_predict_layers": 1}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf))
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(tiny_plan().hf | {"q_lora_rank": None}))
    for errors in run_ranks(build_without, 2, config, plain):
        assert errors.keys() == set_by_adopt, errors


def test_start_refuses_a_second_topology_beside_the_first():
    with (
        topology.start(tiny_plan()),
        pytest.raises(RuntimeError, match="_TENSOR_MODEL_PARALLEL_GROUP is set"),
        topology.start(tiny_plan()),
    ):
        pass


def test_GroupMaker_makes_none_for_a_rank_outside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert GroupMaker(1, timedelta(seconds=1)).make("edge", (0, 1)) is None


# compilation -------------------------------------------------------------------------------------


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_compile_late_compiles_once_and_when_it_is_called():
    compiler = torch.compile
    calls = []

    def counted(function: Any) -> Any:
        calls.append(function)
        return compiler(function, backend="eager")

    late = compile_late(double)
    with patch.object(torch, "compile", counted):
        assert inspect.unwrap(late) is double and not calls
        for number in (1.0, 2.0):
            assert torch.equal(late(torch.tensor(number)), torch.tensor(2 * number))
    assert calls == [double]


def compilers(_group: dist.ProcessGroup) -> tuple[bool, ...]:
    """In a process that imported the package first, then megatron-core."""
    from megatron.core import jit
    from megatron.core.transformer.moe.router import TopKRouter

    decorated: Any = TopKRouter._apply_expert_bias
    return (
        jit.jit_fuser is compile_late,
        inspect.unwrap(decorated).__module__ == TopKRouter.__module__,
        inspect.unwrap(decorated) is not decorated,
        torch.compile.__module__ == "torch",
        "torch._inductor.compile_fx" not in sys.modules,
    )


def test_import_megatron_brings_no_compiler_with_it():
    assert run_ranks(compilers, 1) == [(True,) * 5]


def test_imports_of_a_run_say_nothing():
    """megatron-core warns as it is imported, of packages that no plan of this machine needs."""
    command = [sys.executable, "-c", "import pyrl_ext.train.loop"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
