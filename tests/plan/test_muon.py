"""Plans with Muon: the package that it needs, its work, and advice on memory."""

import sys
from typing import Any

import pytest

from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.fits import fits
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.muon import muon_flops
from pyrl_ext.plan.schema import Hardware
from tests.helpers.plan_pages import glm47, time_of
from tests.helpers.tiny import tiny_plan

MUON = ("optimizer.name=muon", "optimizer.distributed=false")


def test_plan_names_the_package_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    assert not tiny_plan(*MUON).unsupported
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    assert tiny_plan(*MUON).unsupported == (
        "optimizer.name: muon, but emerging_optimizers, which megatron-core takes it from, is not "
        "installed, expected it. Run: pip install 'pyrl-ext[muon]'",
    )
    assert not tiny_plan().unsupported


def five_iterations(rows: int, columns: int) -> int:
    """Two products of the short side's square with the matrix, and one of two such squares."""
    short, long = sorted((rows, columns))
    return 5 * 2 * (2 * short * short * long + short**3)


def test_step_time_counts_the_iterations_of_every_matrix():
    """GLM-4.7-Flash on 8 ranks, with 8 of 64 experts on each."""
    plan = glm47("batching.minibatches=1", *MUON)
    sizes: Any = plan.sizes
    hidden = sizes.hidden_size
    heads = sizes.num_attention_heads
    keys = sizes.qk_nope_head_dim
    rotated = sizes.qk_rope_head_dim
    values = sizes.v_head_dim
    attention = [
        (sizes.q_lora_rank, hidden),
        (heads * (keys + rotated), sizes.q_lora_rank),
        (sizes.kv_lora_rank + rotated, hidden),
        (heads * (keys + values), sizes.kv_lora_rank),
        (hidden, heads * values),
    ]
    wide = sizes.intermediate_size
    narrow = sizes.moe_intermediate_size
    expert = [(2 * narrow, hidden), (hidden, narrow)]
    sparse = [*attention, (64, hidden), *expert * 9]  # a router, 8 experts and the shared one
    dense = [*attention, (2 * wide, hidden), (hidden, wide)]
    every = [*dense, *sparse * (sizes.num_hidden_layers - 1)]
    costs = {cost.name: cost for cost in time_of(plan).costs if cost.phase == "update"}
    wanted = sum(five_iterations(*shape) for shape in every)
    assert costs["orthogonal updates"].amount == pytest.approx(wanted)
    without = glm47("batching.minibatches=1", "optimizer.distributed=false")
    others = {cost.name: cost for cost in time_of(without).costs if cost.phase == "update"}
    assert "orthogonal updates" not in others
    more = costs["optimizer"].amount - others["optimizer"].amount
    assert more == pytest.approx(20 * sum(rows * columns for rows, columns in every))


def test_fits_does_not_advise_what_muon_refuses():
    small = {"hardware": Hardware(gpu="H100")}
    options = ("rollout.gpus=8", "parallel.ep=2", "optimizer.distributed=false")
    adamw = fits(glm47(*options).model_copy(update=small))
    muon = fits(glm47(*options, "optimizer.name=muon").model_copy(update=small))
    assert adamw and "optimizer.distributed: true" in adamw
    assert muon and "optimizer.distributed" not in muon


def test_forecast_of_frozen_matrices_has_no_update():
    """Their state is no part of the optimizer's, and nothing is made orthogonal for them."""
    every = tiny_plan(*MUON)
    experts = tiny_plan(*MUON, "model.freeze=['*.mlp.experts.*']")
    adamw = tiny_plan("optimizer.distributed=false", "model.freeze=['*.mlp.experts.*']")
    assert 0 < muon_flops(experts, 0) < muon_flops(every, 0)
    assert 0 < optimizer_bytes(experts) < min(optimizer_bytes(every), optimizer_bytes(adamw))


def optimizer_bytes(plan: Plan) -> float:
    (stage,) = stage_memory(plan)
    (item,) = [item for item in stage.items if item.name == "optimizer"]
    return item.bytes
