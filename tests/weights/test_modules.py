"""The tensors of all modules on all ranks, against the Hugging Face folder that they were loaded
from."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrl_ext.dist import topology
from pyrl_ext.models.hf_folder import SafetensorsFolder
from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema.layout import Module, ModuleParallel
from pyrl_ext.trainer.policy import Policy
from tests.helpers.published import Held, in_given_memory
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QWEN3, tiny_plan
from tests.helpers.traffic import counted
from tests.helpers.vision import KIMI_VL, QWEN_VL, write_model


@dataclass(frozen=True)
class Layout:
    """Sizes of the encoder's grid and of the language model's, and what else is set."""

    vision: dict[str, int]
    llm: tuple[str, ...] = ()
    hf: str = "kimi"
    train: bool = True
    also: tuple[str, ...] = ()
    bucket: str = "20kB"

    def plan(self, folder: Path) -> Plan:
        keys = Module(
            train=self.train,
            patches_per_microbatch=1 << 20,
            parallel=ModuleParallel(**self.vision),
        )
        kind, at = {"kimi": KIMI_VL, "qwen": QWEN_VL}[self.hf]["model_type"], folder / self.hf
        given = f"model.family={kind}", f"model.config={at}/config.json", f"model.weights={at}"
        options = (
            "replay=off",
            "batching.tokens_per_microbatch=80",
            f"rollout.bucket_bytes={self.bucket}",
        )
        sizes = (f"parallel.{size}" for size in self.llm)
        plan = tiny_plan(*given, *options, *sizes, *self.also, config=QWEN3)
        return plan.model_copy(update={"modules": {"vision": keys}})


LAYOUTS = {
    2: {
        "1 + 1": Layout({}),
        "1 + 1, qwen": Layout({}, hf="qwen"),
        "1 + 1, frozen bf16": Layout({}, train=False, also=("model.dtype=bfloat16",)),
    },
    3: {
        "tp2 + 1": Layout({"tp": 2}),
        "dp2 + 1, one bucket": Layout({"dp": 2}, bucket="1GiB"),
        "pp2 + 1, qwen": Layout({"pp": 2}, hf="qwen"),
        "1 + pp2": Layout({}, ("pp=2", "num_layers_in_first_pipeline_stage=1")),
        "1 + tp2, qwen": Layout({}, ("tp=2", "etp=1"), hf="qwen"),
    },
}


def differing(named: Any, folder: Path, plan: Plan) -> list[str]:
    """Names whose tensors are not those of the folder, bit for bit; every name once."""
    read = SafetensorsFolder(folder, plan.sizes.hidden_size)
    left, wrong = set(read.names), list[str]()
    for name, tensor in named:
        want = read(name)[:].to(tensor.dtype)
        if name not in left or tensor.shape != want.shape or not torch.equal(tensor, want):
            wrong.append(name)
        left.discard(name)
    return wrong + sorted(left)


def checked(plan: Plan, folder: Path) -> dict[str, Any]:
    """How a publish went on this rank."""
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo, trainable=False)
        found: dict[str, Any] = {"whole": differing(policy.weights(), folder, plan)}
        found["in given memory"] = differing(in_given_memory(policy.weights()), folder, plan)
        names = {name for i, (name, _) in enumerate(policy.weights()) if i % 3 == 1}
        found["only"] = names ^ {name for name, _ in policy.weights(names)}
        buckets = [b for each in policy.tensors.buckets.values() for b in each]
        found["largest"] = max(b.scratch for b in buckets)
        with Held() as held:
            for _ in policy.weights():
                pass
        found["held"] = held.peak
        with counted() as traffic:
            for _ in policy.weights():
                pass
        calls = [call for call in traffic.calls if call.group.endswith("outward")]
        found["outward"] = {
            (name, mine): sum(
                call.bytes
                for call in calls
                if call.group == f"{name} outward" and (topo.rank in grid.ranks) == mine
            )
            for name, grid in plan.grids.items()
            for mine in (True, False)
        }
        found["bytes"] = {
            name: sum(b.scratch for b in each) for name, each in policy.tensors.buckets.items()
        }
        found["rank"], found["firsts"] = topo.rank, {n: g.first for n, g in plan.grids.items()}
        with pytest.raises(ValueError, match=r"1 names are unknown: \['lm_head.bias'\], expected"):
            policy.weights({"lm_head.bias", *names})
        return found


def on_ranks(group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = str(group.size())
    layouts = LAYOUTS[group.size()]
    return {n: checked(each.plan(folder), folder / each.hf) for n, each in layouts.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("modules")
    for name, hf in (("kimi", KIMI_VL), ("qwen", QWEN_VL)):
        write_model(folder / name, hf)
    return {size: run_ranks(on_ranks, size, folder) for size in LAYOUTS}


CASES = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]


@pytest.mark.parametrize(("size", "name"), CASES)
def test_whole_yields_the_tensors_of_all_modules_on_every_rank(ranks: Any, size: int, name: str):
    for found in ranks[size]:
        for kind in ("whole", "in given memory", "only"):
            assert not found[name][kind], kind


@pytest.mark.parametrize(("size", "name"), CASES)
def test_whole_sends_every_byte_once_to_each_rank_outside(ranks: Any, size: int, name: str):
    for each in ranks[size]:
        found = each[name]
        for module, first in found["firsts"].items():
            sent, got = (found["outward"][module, mine] for mine in (True, False))
            outside = module != ("llm" if found["rank"] < found["firsts"]["vision"] else "vision")
            assert got == (found["bytes"][module] if outside else 0)
            assert sent == (found["bytes"][module] if found["rank"] == first else 0)


@pytest.mark.parametrize(("size", "name"), CASES)
def test_whole_holds_less_than_two_buckets(ranks: Any, size: int, name: str):
    for each in ranks[size]:
        held, largest = each[name]["held"], each[name]["largest"]
        assert largest <= held < 2 * largest, (held / largest, math.log2(largest))
