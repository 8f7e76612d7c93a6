"""LoRA adapters in the embedded engine: what it computes is W + scale B A, to the last factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyrl_ext.models.lora_table import adapter_table
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.hf.engine import HFEngine
from tests.helpers.adapters import factors_of, logits, merged, random_tensors
from tests.helpers.engines import GLM, QWEN
from tests.helpers.models import TRAINED

pytestmark = pytest.mark.multiprocess

KINDS = ("per_expert", "shared_outer", "none")
TOKENS = torch.arange(3, 63).view(2, 30)


@pytest.mark.parametrize("experts", KINDS)
@pytest.mark.parametrize("hf", [GLM, QWEN, TRAINED["nemotron_h"]], ids=["glm", "qwen", "nemotron"])
def test_adapters_are_the_merged_weights(hf: dict[str, Any], experts: str):
    lora = Lora.model_validate({"rank": 4, "expert_rank": 2, "alpha": 6, "experts": experts})
    engine = HFEngine(hf, lora=lora)
    plain = HFEngine(hf)
    given = random_tensors(engine, 0)
    engine.load_weights(given.items(), 0)
    plain.load_weights(merged(given, lora).items(), 0)
    adapted = logits(plain, TOKENS)
    torch.testing.assert_close(logits(engine, TOKENS), adapted, rtol=0, atol=5e-5)
    weights = {name: given[name] for name in plain.shapes()}
    plain.load_weights(weights.items(), 1)
    base = logits(plain, TOKENS)
    assert (adapted - base).abs().max() > 0.5
    zero = {n: x * 0 if ".lora_B." in n else x for n, x in factors_of(given).items()}
    engine.load_weights(zero.items(), 1, only=zero.keys())
    # B = 0 is the base; an expert's product with its rows alone rounds otherwise with AVX-512
    bound = 0.0 if experts == "none" else 2e-6
    torch.testing.assert_close(logits(engine, TOKENS), base, rtol=0, atol=bound)
    assert engine.checksums(list(weights)) == plain.checksums(list(weights))


@pytest.mark.parametrize("hf", TRAINED.values(), ids=list(TRAINED))
def test_adapters_have_the_names_and_shapes_of_the_trainers_table(hf: dict[str, Any]):
    sizes = read_sizes(hf)
    weights = sizes.weights(0)
    for experts in KINDS:
        lora = Lora.model_validate({"rank": 4, "expert_rank": 2, "alpha": 6, "experts": experts})
        rows = adapter_table(weights, lora)
        ours = {n: s for row in rows for n, s in zip(row.hf_names, row.shapes, strict=True)}
        held = Destinations.from_config(hf, lora)
        assert {n: tuple(held.shape(n)) for n in held.parts if ".lora_" in n} == ours


def test_adapters_of_a_router_are_refused():
    lora = Lora(rank=4, alpha=8, targets=["gate"])
    with pytest.raises(
        ValueError, match=r"gate with lora\.publish adapter, expected other targets"
    ):
        HFEngine(GLM, lora=lora)
