"""The tensors of all modules on all ranks, against the Hugging Face folder that they were loaded
from."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from pyrl_ext.models.hf_folder import SafetensorsFolder
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.plan.schema import Parallel
from pyrl_ext.plan.schema.layout import Module, ModuleParallel
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.tools import export
from pyrl_ext.weights.check import full_check, sync_weights
from pyrl_ext.weights.modules import senders_of
from tests.helpers import passes
from tests.helpers.engines import Disturbed
from tests.helpers.measured_step import Live
from tests.helpers.published import in_given_memory
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QWEN3, tiny_plan
from tests.helpers.traffic import counted
from tests.helpers.vision import KIMI_VL, QWEN_VL, write_model

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PROCESSOR = f"model.tokenizer={QWEN3.with_name('tiny_vl')}"
WRONG = "vision_tower.encoder.blocks.3.wqkv.weight"


@given(
    st.sampled_from([(1, 4), (2, 2), (4, 1), (4, 2), (2, 3)]),
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.data(),
)
def test_senders_of_shares_buckets_evenly_and_within_their_stages(
    layout: tuple[int, int], sizes: list[int], data: st.DataObject
):
    pp, dp = layout
    grid = Grid("llm", 0, Parallel(pp=pp, dp=dp))
    senders = data.draw(st.integers(1, pp * dp))
    stages = sorted(data.draw(st.integers(0, pp - 1)) for _ in sizes)
    to = senders_of(grid, senders, list(zip(stages, sizes, strict=True)))
    ranks = {i * pp * dp // senders for i in range(senders)}
    assert set(to) <= ranks and len(ranks) == senders
    at = {rank: grid.place(rank).pp for rank in ranks}
    assert all(at[rank] == stage for rank, stage in zip(to, stages) if stage in at.values())
    for stage in range(pp):
        near = [rank for rank in ranks if at[rank] == stage]
        load = [
            sum(s for s, r, n in zip(sizes, to, stages) if (r, n) == (rank, stage)) for rank in near
        ]
        assert max(load, default=0) - min(load, default=0) <= max(sizes)
    if not set(range(pp)) & set(stages) & set(at.values()):
        load = [sum(s for s, r in zip(sizes, to) if r == rank) for rank in ranks]
        assert max(load) - min(load) <= max(sizes)


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
        kind = {"kimi": KIMI_VL, "qwen": QWEN_VL}[self.hf]["model_type"]
        at = folder / self.hf
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
    left = set(read.names)
    wrong = list[str]()
    for name, tensor in named:
        want = read(name)[:].to(tensor.dtype)
        if name not in left or tensor.shape != want.shape or not torch.equal(tensor, want):
            wrong.append(name)
        left.discard(name)
    return wrong + sorted(left)


def checked(plan: Plan, folder: Path) -> dict[str, Any]:
    """Result of a weight sync on this rank."""
    with passes.built(plan, trainable=False) as policy:
        found: dict[str, Any] = {"whole": differing(policy.weights(), folder, plan)}
        found["in given memory"] = differing(in_given_memory(policy.weights()), folder, plan)
        names = {name for i, (name, _) in enumerate(policy.weights()) if i % 3 == 1}
        found["only"] = names ^ {name for name, _ in policy.weights(names)}
        buckets = [b for each in policy.tensors.buckets.values() for b in each]
        found["largest"] = max(b.scratch for b in buckets)
        with Live() as held:
            for _ in policy.weights():
                pass
        found["held"] = held.peak
        with counted() as traffic:
            for _ in policy.weights():
                pass
        calls = [call for call in traffic.calls if "outward" in call.group]
        found["outward"] = sum(call.bytes for call in calls)
        found["bytes"] = {
            name: sum(b.scratch for b in each) for name, each in policy.tensors.buckets.items()
        }
        found["rank"] = policy.topo.rank
        found["firsts"] = {n: g.first for n, g in plan.grids.items()}
        with pytest.raises(ValueError, match=r"1 names are unknown: \['lm_head.bias'\], expected"):
            policy.weights({"lm_head.bias", *names})
        return found


def with_engine(plan: Plan) -> dict[str, Any]:
    """The findings of checks in an engine on every rank, whose tensor is another on rank 1."""
    with passes.built(plan, trainable=False) as policy:
        engine = HFEngine(plan.hf)
        names = policy.tensors.engine_names
        dtype = torch.float32
        found = dict[str, Any]()
        found["checked"] = sync_weights(engine, policy.weights(), names, 0, dtype=dtype)
        found["names"] = len(names)
        check = partial(full_check, engine, policy.weights, names, 0, dtype=dtype)
        found["right"] = check()
        if policy.topo.rank:
            at = engine._destinations.parts[WRONG][0]  # in the engine, not in the tensor sent
            at[(0,) * at.dim()] += 1e-4
        found["wrong"] = check()
        disturbed: Any = Disturbed(engine, flipped) if policy.topo.rank else engine
        try:
            sync_weights(disturbed, policy.weights(), names, 1, dtype=dtype)
        except RuntimeError as error:
            found["error"] = str(error)
        return found


def flipped(named: Any) -> Any:
    """One bit of a number of the tower."""
    for name, tensor in named:
        if name == WRONG:
            tensor = tensor.clone()
            tensor.view(torch.int32).view(-1)[3] ^= 1
        yield name, tensor


def written(plan: Plan, folder: Path, source: Path) -> dict[str, Any]:
    """Differences in the folder of a checkpoint, and in the one that the command makes of it."""
    with passes.built(plan) as policy:
        policy.save(folder / "checkpoints/step-0")
    code = export.main([str(folder), str(folder / "out"), "modules.vision.ranks=own"])
    if policy.topo.rank:
        return {}
    found: dict[str, Any] = {"code": code}
    for kind, at in (("saved", folder / "checkpoints/step-0/hf"), ("exported", folder / "out")):
        read = SafetensorsFolder(at, plan.sizes.hidden_size)
        found[kind] = differing(((n, read(n)[:]) for n in read.names), source, plan)
        ours, theirs = (
            AutoModelForImageTextToText.from_pretrained(each, dtype=torch.float32).state_dict()
            for each in (at, source)
        )
        assert ours.keys() == theirs.keys()
        found[f"{kind} loaded"] = [n for n in theirs if not torch.equal(ours[n], theirs[n])]
        found[f"{kind} files"] = sorted(each.name for each in at.iterdir())
    return found


def on_ranks(group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    layouts = LAYOUTS[group.size()]
    found: dict[str, Any] = {
        n: checked(each.plan(folder), folder / each.hf) for n, each in layouts.items()
    }
    if group.size() == 2:
        found["engine"] = with_engine(LAYOUTS[2]["1 + 1"].plan(folder))
        for name in ("1 + 1", "1 + 1, qwen"):
            layout = replace(layouts[name], also=("checkpoint.hf=true", PROCESSOR))
            at = folder / f"run-{layout.hf}"
            found[f"{name} written"] = written(layout.plan(folder), at, folder / layout.hf)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("modules")
    for name, hf in (("kimi", KIMI_VL), ("qwen", QWEN_VL)):
        write_model(folder / name, hf)
    found = {size: run_ranks(on_ranks, size, folder) for size in LAYOUTS}
    return found | {1: run_ranks(exported_alone, 1, folder)}


def exported_alone(group: dist.ProcessGroup, folder: Path) -> dict[str, list[str]]:
    """The files that differ from those of `written`, or are there once."""
    os.environ["WORLD_SIZE"], found = "1", {}
    for name in ("kimi", "qwen"):
        run = folder / f"run-{name}"
        alone = folder / f"alone-{name}"
        assert export.main([str(run), str(alone)]) == 0
        files = [{f.name: f.read_bytes() for f in at.iterdir()} for at in (alone, run / "out")]
        found[name] = [n for n in files[0] | files[1] if files[0].get(n) != files[1].get(n)]
    return found


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
        here = "llm" if found["rank"] < found["firsts"]["vision"] else "vision"
        firsts = [module for module, first in found["firsts"].items() if first == found["rank"]]
        others = [module for module in found["firsts"] if module != here]
        assert found["outward"] == sum(found["bytes"][module] for module in [*firsts, *others])


def test_engine_names_cover_all_modules_and_a_wrong_tensor_of_a_tower_is_named(ranks: Any):
    right, wrong = (each["engine"] for each in ranks[2])
    for found in (right, wrong):
        assert found["checked"]["publish/checked"] == found["names"] and not found["right"]
    assert not right["wrong"] and "error" not in right
    assert list(wrong["wrong"]) == [WRONG] and "has digest" in wrong["wrong"][WRONG]
    assert f"1 of {wrong['names']} tensors differ" in wrong["error"] and WRONG in wrong["error"]


@pytest.mark.parametrize("name", ["1 + 1", "1 + 1, qwen"])
def test_checkpoint_and_export_write_a_folder_of_all_modules(ranks: Any, name: str):
    found, other = (each[f"{name} written"] for each in ranks[2])
    assert found["code"] == 0 and not other
    for kind in ("saved", "exported", "saved loaded", "exported loaded"):
        assert not found[kind], kind
    want = {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"}
    assert want <= {*found["exported files"]} and want <= {*found["saved files"]}


@pytest.mark.parametrize("name", ["kimi", "qwen"])
def test_export_takes_one_process_whatever_ranks_the_encoder_had(ranks: Any, name: str):
    assert ranks[1][0][name] == []
