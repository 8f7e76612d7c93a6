"""Every collective of a run, on tensors of types that NCCL has: gloo takes more of them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext.dist import topology
from pyrl_ext.dist.clock import Clock
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QUICK
from tests.helpers.traffic import counted
from tests.parity import compiled

# torch's ProcessGroupNCCL knows these (NCCLUtils.cpp, ncclDataType); no integers of 16 bits
NCCL_TYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
RUNS = {
    "experts of two bytes, dynamic cp": (
        "glm 384",
        *("parallel.dp=2", "parallel.ep=2", "parallel.dynamic_cp=2", "optimizer.distributed=true"),
        *("model.dtype=bfloat16", "objective.kl_coef=0.1"),
    ),
    "tp, kept sets, MTP": ("glm mtp kept", "parallel.tp=2", "objective.preset=gspo"),
    "vpp, MTP": ("glm mtp 2", "parallel.pp=2", "parallel.vpp=2", "model.recompute=full"),
}


def on_rank(group: Any, folder: Path) -> dict[str, set[torch.dtype]]:
    os.environ["WORLD_SIZE"] = "2"
    found: dict[str, set[torch.dtype]] = {}
    for name, (model, *overrides) in RUNS.items():
        plan, clock = compiled(model, folder, (*QUICK, *overrides)), Clock()
        with counted() as traffic, topology.start(plan) as topo:
            step = RolloutStep.build(plan, topo)
            step.publish(0, clock)
            rollout = step.take(0, clock)
            shard, old = step.score(step.batch_of(rollout, clock), rollout.index, clock, check=True)
            step.update(shard, clock)
            step.metrics(rollout.index, shard, old)
            step.policy.save(folder / name.replace(" ", "-"))
            step.evaluate(clock)
            step.close()
        found[name] = {dtype for call in traffic.calls for dtype in call.dtypes}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, set[torch.dtype]]]:
    return run_ranks(on_rank, 2, tmp_path_factory.mktemp("collectives"))


@pytest.mark.parametrize("name", RUNS)
def test_a_step_communicates_tensors_that_nccl_takes(ranks: list[Any], name: str):
    for rank in ranks:
        assert rank[name] <= NCCL_TYPES
        assert {torch.float32, torch.int64} < rank[name]  # and others: it did communicate
