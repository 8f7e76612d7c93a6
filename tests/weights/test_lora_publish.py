"""Engines get merged weights of a LoRA policy, or factors; publish/move_seen says how much of its
move they see, and an engine that leaves adapters out is found."""

from __future__ import annotations

import math
import os
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.rollout.adapters import adapters_of, is_factor
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.tensor_names import layer_of
from pyrl_ext.samples import Prompt, Sampling
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.trainer.step import RolloutStep, score_canaries
from pyrl_ext.weights.check import engine_tensor_names
from pyrl_ext.weights.modules import ModuleTensors
from tests.helpers.lora import draw_b
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QUICK, tiny_plan
from tests.parity import compiled

pytestmark = pytest.mark.multiprocess

LORA = ("replay=off", "lora.rank=8", "lora.alpha=16", "model.dtype=bfloat16")
LAYOUTS = {
    "tp2 ep2 etp1": ("parallel.tp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=1"),
    "pp2 ep2": ("parallel.pp=2", "parallel.dp=2", "parallel.ep=2"),
}
STD = 1e-4  # of B: a part of the move is lost in bfloat16


class Sent(NamedTuple):
    """The tensors that a rank sent.

    Args:
        wrong: names of merged tensors that are not W + scale B A, rounded
        seen: `publish/move_seen`
        names: of the tensors in an update, merged and as factors
    """

    wrong: list[str]
    seen: float
    names: tuple[set[str], set[str]]


def whole(plan: Any, topo: Any, only_changing: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The published tensors of a policy with B drawn, and the metric of its move."""
    policy = Policy.build(plan, topo)
    draw_b(policy.llm, STD)
    tensors = policy.tensors
    only = tensors.changing if only_changing else None
    move = tensors.move_seen(torch.bfloat16)
    found = {n: t.clone() for n, t in tensors.published(policy.live(), only, move)}
    assert set(found) == (set(tensors.engine_names) if only is None else only)
    return found, {} if move is None else move.metrics()


def sent(group: Any, *layout: str) -> Sent:
    os.environ["WORLD_SIZE"] = str(1 if group is None else group.size())
    with topology.start(tiny_plan(*LORA, *layout)) as topo:
        plans = [tiny_plan(*LORA, *layout, f"lora.publish={way}") for way in ("merge", "adapter")]
        merged, metrics = whole(plans[0], topo, True)
        given, none = whole(plans[1], topo, False)
    assert plans[0].lora is not None and not none
    weights = {n: t for n, t in given.items() if not is_factor(n)}
    wrong = list[str]()
    sums = torch.zeros(2, dtype=torch.float64)
    for module, (_, scale, names) in adapters_of(plans[0].lora, weights).items():
        name, (a, b) = f"{module}.weight", (given[name].double() for name in names)
        weight = weights[name].double()
        delta = scale * b @ a
        seen = (weight + delta).to(torch.bfloat16).double() - weight
        sums += torch.stack([(seen * delta).sum(), delta.square().sum()])
        # float32 sums of another order may round to the other neighbour
        apart = (merged[name].double() - weight - seen).abs() > 1e-6
        wrong += [name] if apart.double().mean() > 1e-3 else []
    seen = metrics["publish/move_seen"]
    assert seen == pytest.approx(float(sums[0] / sums[1]), rel=1e-3)
    return Sent(wrong, seen, (set(merged), {n for n in given if is_factor(n)}))


def sent_on_ranks(group: Any) -> list[Sent]:
    return [sent(group, *layout) for layout in LAYOUTS.values()]


def test_published_is_the_policy_under_every_layout():
    alone = sent(None)
    assert not alone.wrong and 0.3 < alone.seen < 0.8
    for rank in run_ranks(sent_on_ranks, 4):
        for each in rank:
            assert not each.wrong and each.names == alone.names
            assert each.seen == pytest.approx(alone.seen, rel=1e-3)


def test_changing_names_whole_layers_for_vllm_and_factors_for_adapters():
    def changing(*overrides: str) -> tuple[set[str], list[str]]:
        plan = tiny_plan("lora.rank=8", "lora.alpha=16", *overrides)
        tensors = ModuleTensors(plan, None, {})  # type: ignore[arg-type]
        assert tensors.changing is not None
        return set(tensors.changing), tensors.engine_names

    merged, names = changing("lora.publish=merge", "lora.targets=[q_a_proj]", "lora.experts=none")
    assert merged == {n for n in names if n.endswith("q_a_proj.weight")} and len(merged) == 4
    layers, _ = changing("rollout.engine=vllm", "lora.publish=merge")
    assert layers == {n for n in names if layer_of(n) is not None}
    factors, more = changing("lora.publish=adapter")
    assert factors == {n for n in more if is_factor(n)} == set(more) - set(names)
    assert ModuleTensors(tiny_plan(), None, {}).changing is None  # type: ignore[arg-type]
    assert engine_tensor_names(["model.layers.9.x.lora_A.weight"], 4) == []


def test_changing_leaves_out_frozen_weights_and_for_vllm_whole_frozen_layers():
    patterns = "model.freeze=[model.embed_tokens.weight, model.layers.1.*, '*.mlp.gate.weight']"

    def unchanged(*overrides: str) -> tuple[set[str], list[str]]:
        tensors = ModuleTensors(tiny_plan(patterns, *overrides), None, {})  # type: ignore[arg-type]
        assert tensors.changing is not None
        return set(tensors.engine_names) - tensors.changing, tensors.engine_names

    hf, names = unchanged()
    whole = {"model.embed_tokens.weight", *(n for n in names if layer_of(n) == 1)}
    assert hf == whole | {f"model.layers.{i}.mlp.gate.weight" for i in (2, 3)}
    vllm, _ = unchanged("rollout.engine=vllm")
    assert vllm == whole


def test_an_engine_gets_what_is_not_frozen_and_scores_as_the_trainer():
    plan = tiny_plan(*QUICK, "model.freeze=[model.embed_tokens.weight, model.layers.1.*]")
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        sent = list[float]()
        for number in range(2):
            sent.append(step.sync_weights(number, clock)["publish/tensor_bytes"])
            rollout = step.take(number, clock)
            shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock, check=True)
            step.update(shard, clock)
        tensors = step.policy.tensors
    rows = tensors.tables["llm"]
    kept = [row for row in rows if row.megatron_name in plan.frozen]
    numbers = sum(math.prod(shape) for row in kept for shape in row.shapes)
    assert sent[0] - sent[1] == 4 * numbers > 0


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("publish", ["merge", "adapter"])
def test_an_engine_scores_as_the_trainer_with_adapters_of_mixtrals_experts(
    tmp_path, publish, experts
):
    """Whose linears are w1, w3 and w2 in the checkpoint, and other names in transformers."""
    lora = "lora.rank=4", "lora.alpha=8", f"lora.publish={publish}", f"lora.experts={experts}"
    plan = compiled("mixtral", tmp_path, (*lora, *QUICK))
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        draw_b(step.policy.llm)
        changing = step.policy.tensors.changing or ()
        assert any(".experts.0.w2." in name for name in changing)
        for number in range(2):
            step.sync_weights(number, clock)
            rollout = step.take(number, clock)
            shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock, check=True)
            assert step.update(shard, clock)["grad_norm"] > 0


def leave_out(engine: HFEngine) -> None:
    """From now on the engine holds adapters and does not apply them, as vLLM does in places."""
    for module in engine.model.modules():
        if hasattr(module, "lora_A"):
            module._forward_hooks.clear()
        if hasattr(module, "adapters"):
            module.forward = type(module).forward.__get__(module)


def test_an_engine_that_leaves_adapters_out_is_found():
    plan = tiny_plan(*QUICK, "lora.rank=8", "lora.alpha=16", "lora.publish=adapter")
    clock = Clock()
    asked = [Prompt(0, tuple(range(3, 43)))], Sampling(4, seed=3)
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        engine: Any = step.engine
        draw_b(step.policy.llm)

        def trained_batch(number: int) -> dict[str, float]:
            metrics = step.sync_weights(number, clock)
            rollout = step.take(number, clock)
            step.score(step.batch_of(rollout, clock), rollout.index, clock, check=True)
            return metrics

        first = trained_batch(0)
        second = trained_batch(1)
        assert first["publish/checked"] == len(step.policy.tensors.engine_names)
        assert second["publish/checked"] == len(step.policy.tensors.changing or ())
        assert second["publish/tensor_bytes"] < first["publish/tensor_bytes"] / 3
        (good,) = engine.generate(*asked)
        leave_out(engine)
        (other,) = engine.generate(*asked)
        canaries = [replace(sample, reward=0.0) for sample in (good, other)]
        (right, _), (wrong, _) = score_canaries(step.policy, canaries)
        assert right < 1e-5 and wrong > 1e-2
        with pytest.raises(RuntimeError, match=r"max_mismatch: .* Every tensor in the engine is"):
            trained_batch(2)
