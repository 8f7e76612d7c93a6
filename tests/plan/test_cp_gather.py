"""Latents or heads gathered under context parallelism: both priced by hand, and the choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.activations import layer
from pyrl_ext.plan.forecast.cp_gather import Choice, choose_gather, gather_parts, gathers_latents
from pyrl_ext.plan.forecast.hardware import GPUS
from pyrl_ext.plan.model.layer_kinds import SPARSE

CONFIGS = Path(__file__).parents[2] / "configs"
FITS = "hardware.memory=10000000000000", "rollout.tp=1", "hardware.gpu=H100"
UP = 2 * 512 * 20 * (192 + 256)  # FLOPs of a row's projection to keys and values


def glm47(*overrides: str) -> Plan:
    return compile_plan(CONFIGS / "glm47.yaml", [*FITS, *overrides])


def chosen(plan: Plan) -> Choice:
    choice = choose_gather(plan)
    assert choice is not None and gathers_latents(plan) == (choice.way == "latents")
    return choice


@pytest.mark.parametrize(("recompute", "gathers", "projected"), [("none", 2, 3), ("full", 3, 4)])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_choose_gather_prices_both_ways(recompute: str, gathers: int, projected: int, cp: int):
    plan = glm47(f"parallel.dp={8 // cp}", f"parallel.cp={cp}", f"model.recompute={recompute}")
    gpu, others, choice = GPUS["H100"], (cp - 1) / cp, chosen(plan)
    sent = gathers * 2 * others / (0.75 * gpu.link)
    up = projected * others * UP / (0.6 * gpu.flops["bfloat16"])
    assert choice.seconds is not None
    assert choice.seconds["heads"] == pytest.approx(sent * 20 * (256 + 256))
    assert choice.seconds["latents"] == pytest.approx(sent * (512 + 64) + up)


def test_choose_gather_takes_the_faster_way():
    """In bfloat16 latents, within a node too; in fp32, where products are slow, heads."""
    layout = "parallel.dp=4", "parallel.cp=2"
    assert chosen(glm47(*layout)).numbers == {"latents": 576, "heads": 10240}
    half = chosen(glm47("parallel.dp=2", "parallel.cp=2", "parallel.tp=2", "parallel.etp=1"))
    assert half.numbers == {"latents": 288, "heads": 5120} and half.way == "latents"
    exact = glm47(*layout, "model.dtype=float32")
    assert chosen(exact).way == "heads"
    assert "not latents (576)" in " ".join(exact.notes)
    nodes = "hardware.gpus_per_node=1", "parallel.ep=1"
    assert chosen(glm47(*layout, "model.dtype=float32", *nodes)).way == "latents"


def test_choose_gather_without_a_gpu_takes_the_fewer_numbers():
    plan = compile_plan(CONFIGS / "tiny.yaml", ["parallel.cp=2"])
    assert chosen(plan) == ("latents", {"latents": 48, "heads": 4 * 64}, None)
    assert any("48 numbers a token" in note for note in plan.notes)


def test_choose_gather_is_for_latents_and_context_parallelism():
    qwen = compile_plan(CONFIGS / "tiny_qwen3.yaml", ["parallel.cp=2"])
    for plan in (glm47(), qwen):
        assert choose_gather(plan) is None and not gathers_latents(plan)
        assert not any("latents" in note for note in plan.notes)


def test_gather_parts_recompute_the_projection_with_core_attention():
    """Selective recomputation runs it for the rows of all ranks, its own among them."""
    plan = glm47("parallel.dp=4", "parallel.cp=2", "model.recompute=selective")
    parts = gather_parts(plan, GPUS["H100"], 2, "backward", 3)
    amounts = {part.name: part.row for part in parts}
    assert amounts["latents"] == pytest.approx(3 * UP * (2 / 2 + 1))
    assert amounts["context parallel"] == pytest.approx(3 * 2 * 2 * 576 / 2)


def test_activations_of_gathered_latents():
    """The rows of every rank are kept; with core attention recomputed, this rank's alone."""
    plans = [glm47(f"parallel.dp={8 // cp}", f"parallel.cp={cp}") for cp in (1, 2)]
    one, two = (layer(plan, SPARSE) for plan in plans)
    assert one.projections - two.projections == 2 * 512  # they belong to core attention now
    keys_and_values = 2 * 20 * 512
    assert two.core - one.core == pytest.approx(1.5 * keys_and_values + 2 * 2 * 512)
    assert one.core_inputs - two.core_inputs == keys_and_values - 2 * 576
