"""Rows of the factors of adapters: names, shapes, cuts, and first values."""

import math

import pytest
import torch

from pyrl_ext.models.lora_table import RandomFactors, adapter_rows, adapter_table
from pyrl_ext.models.shards import shard_of, whole_of
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.plan.schema.lora import Lora
from tests.helpers.tiny import QWEN3, tiny_plan


def lora(**changes) -> Lora:
    return Lora.model_validate({"rank": 4, "alpha": 8} | changes)


def table_of(plan) -> list[Weight]:
    return plan.sizes.weights(plan.num_mtp_layers)


def rows_of(rows: list[Weight], *names: str) -> list[tuple]:
    return [
        (r.megatron_name, r.hf_names, r.shard, r.shapes) for r in rows if r.hf_names[0] in names
    ]


def test_adapter_rows_has_an_A_and_a_B_for_each_linear():
    q, k, v = (f"l.self_attn.{name}_proj.weight" for name in "qkv")
    row = Weight.grouped(q, k, v, "attention.linear_qkv.weight", (4, 2), 8, 32)
    a, b = adapter_rows(row, lora())
    assert a.megatron_name == "attention.linear_qkv.lora_A" and a.shard == "same"
    assert a.hf_names == tuple(f"l.self_attn.{name}_proj.lora_A.weight" for name in "qkv")
    assert a.shapes == ((4, 32),) * 3 and a.shard_shape(2) == (12, 32)
    assert b.megatron_name == "attention.linear_qkv.lora_B" and b.shard == "grouped"
    assert b.shapes == ((32, 4), (16, 4), (16, 4)) and b.shard_shape(2) == (32, 4)
    down = Weight.columns("l.down_proj.weight", "fc2.weight", 32, 64, expert=5)
    a, b = adapter_rows(down, lora(expert_rank=2))
    assert (a.shard, a.shapes, a.expert) == ("columns", ((2, 64),), 5)
    assert (b.shard, b.shapes, b.expert) == ("same", ((32, 2),), 5)


def test_adapter_rows_leaves_out_what_is_no_target():
    q, k, v = (f"l.self_attn.{name}_proj.weight" for name in "qkv")
    row = Weight.grouped(q, k, v, "attention.linear_qkv.weight", (4, 2), 8, 32)
    _, b = adapter_rows(row, lora(targets=["v_proj", "q_proj"]))
    assert (b.shard, b.shapes) == ("grouped", ((32, 4), (16, 4)))
    _, b = adapter_rows(row, lora(targets=["k_proj"]))
    assert (b.shard, b.hf_names) == ("rows", ("l.self_attn.k_proj.lora_B.weight",))
    bias = Weight.grouped(q[:-6] + "bias", "k_proj.bias", "v_proj.bias", "qkv.bias", (4, 2), 8)
    router = Weight.same("l.mlp.gate.weight", "l.mlp.router.weight", 8, 32)
    assert adapter_rows(bias, lora()) == adapter_rows(router, lora()) == []
    assert len(adapter_rows(router, lora(targets=["gate"]))) == 2


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer", "none"])
def test_adapter_table_counts_factors_of_experts(experts):
    """Shared by the experts of a layer: A of gate and up, B of down."""
    plan = tiny_plan(config=QWEN3)
    sizes = plan.sizes
    table = table_of(plan)
    rows = adapter_table(
        table, lora(experts=experts, targets=["gate_proj", "up_proj", "down_proj"])
    )
    names = [name for row in rows for name in row.hf_names if ".experts." in name]
    layers = len(sizes.router_layers)
    n = sizes.num_experts
    each = {"per_expert": 6 * n, "shared_outer": 3 * n + 3, "none": 0}[experts]
    assert len(names) == len(set(names)) == layers * each
    whole = [row for row in rows if ".experts." in row.hf_names[0] and row.expert is None]
    assert len(whole) == (2 * layers if experts == "shared_outer" else 0)
    if whole:
        first = f"model.layers.{sizes.router_layers[0]}.mlp.experts."
        assert whole[0].hf_names == (
            f"{first}gate_proj.lora_A.weight",
            f"{first}up_proj.lora_A.weight",
        )
        assert whole[0].megatron_name.endswith(".mlp.experts.linear_fc1.lora_A")


SOME = ["q_proj", "v_proj", "up_proj", "in_proj_ba", "in_proj"]


@pytest.mark.parametrize("targets", ["all", SOME], ids=["all", "some"])
@pytest.mark.parametrize("config", ["tiny", "tiny_qwen3", "tiny_qwen3_next", "tiny_nemotron"])
@pytest.mark.parametrize("size", [1, 2])
def test_shard_of_factors_goes_back_to_whole_factors(config, targets, size):
    plan = tiny_plan(config=QWEN3.with_name(f"{config}.yaml"))
    for row in adapter_table(table_of(plan), lora(targets=targets)):
        tensors = [torch.randn(shape) for shape in row.shapes]
        shards = [shard_of(row, tensors, size, rank) for rank in range(size)]
        assert all(shard.shape == row.shard_shape(size) for shard in shards)
        for got, want in zip(whole_of(row, shards), tensors, strict=True):
            assert torch.equal(got, want), row


def test_RandomFactors_draws_A_as_torch_does_for_a_linear_and_B_zero():
    rows = adapter_table(table_of(tiny_plan(config=QWEN3)), lora(rank=64))
    draw = RandomFactors(rows, seed=3)
    a = next(row for row in rows if row.megatron_name.endswith("linear_qkv.lora_A"))
    q, k, _ = (draw(name) for name in a.hf_names)
    like = torch.empty_like(q)
    torch.nn.init.kaiming_uniform_(like, a=math.sqrt(5))  # the form in which PEFT says it
    assert not torch.equal(q, k) and torch.equal(q, draw(a.hf_names[0]))
    assert not torch.equal(q, RandomFactors(rows, seed=4)(a.hf_names[0]))
    assert float(q.abs().max()) <= 1 / math.sqrt(q.shape[1])
    torch.testing.assert_close(q.std(), like.std(), rtol=0.05, atol=0)
    assert not draw(a.hf_names[0].replace("lora_A", "lora_B")).any()
