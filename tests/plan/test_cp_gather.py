"""Latents or heads gathered under context parallelism: the choice, and both priced by hand."""

from __future__ import annotations

import pytest

from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.activations import layer
from pyrl_ext.plan.forecast.compute_time import ChunkWork, Work, chunk_parts
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.families.blocks import GroupedQuery
from pyrl_ext.plan.model.hardware import GPUS
from pyrl_ext.plan.model.latent_gather import Exchanged
from pyrl_ext.plan.model.layer_kinds import SPARSE
from tests.helpers.configs import CONFIGS

FITS = "hardware.memory=10000000000000", "rollout.tp=1", "hardware.gpu=H100"
PASSES: tuple[Work, ...] = ("forward", "backward")
UP = 2 * 512 * 20 * (192 + 256)  # FLOPs of a row's projection to keys and values


def glm47(*overrides: str) -> Plan:
    return compile_plan(CONFIGS / "glm47.yaml", [*FITS, *overrides])


def gather_parts(plan: Plan, cp: int, work: Work, layers: int) -> list[ChunkWork]:
    """Work of the first `layers` layers that `cp` ranks have because they share a sequence."""
    chunk = ModelChunk(False, tuple(range(layers)), 0, False)
    parts = chunk_parts(plan, GPUS["H100"], chunk, cp, work)
    return [part for part in parts if part.name in ("latents", "context parallel")]


@pytest.mark.parametrize(("recompute", "gathers", "projected"), [("none", 2, 3), ("full", 3, 4)])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_gather_parts_of_latents(recompute: str, gathers: int, projected: int, cp: int):
    plan = glm47(f"parallel.dp={8 // cp}", f"parallel.cp={cp}", f"model.recompute={recompute}")
    gpu = GPUS["H100"]
    others = (cp - 1) / cp
    parts = [part for work in PASSES for part in gather_parts(plan, cp, work, 1)]
    seconds = sum(part.row / part.rate for part in parts)
    sent = gathers * 2 * others / (0.75 * gpu.link)
    up = projected * others * UP / (0.6 * gpu.flops["bfloat16"])
    assert seconds == pytest.approx(sent * (512 + 64) + up)


def test_gather_parts_of_heads():
    plan = compile_plan(CONFIGS / "tiny_qwen3.yaml", ["parallel.cp=2", "hardware.gpu=H100"])
    sizes = plan.sizes
    assert isinstance(sizes, GroupedQuery)
    parts = [part for work in PASSES for part in gather_parts(plan, 2, work, 3)]
    elements = 2 * sizes.query_groups * sizes.head_width
    item = {"float32": 4, "bfloat16": 2}[plan.model.dtype]
    assert {part.name for part in parts} == {"context parallel"}
    assert sum(part.row for part in parts) == pytest.approx(2 * 3 * item * elements / 2)


def test_gathers_latents_where_they_are_fewer_numbers():
    layout = "parallel.dp=4", "parallel.cp=2"
    for plan in (glm47(*layout), glm47(*layout, "model.dtype=float32")):
        assert plan.exchanged_elements == Exchanged(latents=576, heads=10240)
        assert plan.gathers_latents
    half = glm47("parallel.dp=2", "parallel.cp=2", "parallel.tp=2", "parallel.etp=1")
    assert half.exchanged_elements == (288, 5120) and half.gathers_latents
    tiny = compile_plan(CONFIGS / "tiny.yaml", ["parallel.cp=2"])
    assert tiny.exchanged_elements == (48, 4 * 64) and tiny.gathers_latents
    assert any("gathers latents, 48 numbers a token" in note for note in tiny.notes)
    assert not Exchanged(latents=65, heads=64).gathers_latents
    assert "not latents (65)" in str(Exchanged(latents=65, heads=64))


def test_gathers_latents_only_with_latents_and_context_parallelism():
    qwen = compile_plan(CONFIGS / "tiny_qwen3.yaml", ["parallel.cp=2"])
    for plan in (glm47(), qwen):
        assert plan.exchanged_elements is None and not plan.gathers_latents
        assert not any("latents" in note for note in plan.notes)


def test_gather_parts_recompute_the_projection_with_core_attention():
    """Selective recomputation runs it for the rows of all ranks, its own among them."""
    plan = glm47("parallel.dp=4", "parallel.cp=2", "model.recompute=selective")
    parts = gather_parts(plan, 2, "backward", 3)
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
