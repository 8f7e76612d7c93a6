"""The tensors of MTP layers that engines get, against the names of published checkpoints."""

from __future__ import annotations

import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.rollout.draft_layers import draft_shapes
from pyrl_ext.rollout.remote.identity import shapes_of
from tests.helpers.configs import CONFIGS, hf_of


@pytest.mark.parametrize(
    ("model", "prefix", "projection"),
    [
        ("glm47", "model.layers.47.", "eh_proj.weight"),
        ("qwen3_next_80b", "mtp.", "fc.weight"),
    ],
)
def test_draft_shapes_are_those_of_the_mtp_layer(model: str, prefix: str, projection: str):
    hf = hf_of(model) | {"num_nextn_predict_layers": 1}
    found = draft_shapes(hf)
    assert all(name.startswith(prefix) for name in found)
    assert draft_shapes(CONFIGS / model) == found
    hidden = hf["hidden_size"]
    assert found[prefix + projection] == (hidden, 2 * hidden)
    assert not any("embed_tokens" in name or "head.weight" in name for name in found)
    assert sum("experts." in name for name in found) > 3 * 64


def test_draft_shapes_of_a_model_without_mtp_layers_are_none():
    assert draft_shapes(hf_of("tiny")) == {}


def test_shapes_of_an_engine_that_drafts_have_the_mtp_layer():
    config = CONFIGS / "glm47.yaml"
    plain = shapes_of(compile_plan(config, ["model.mtp=true"]))
    drafting = shapes_of(compile_plan(config, ["model.mtp=true", "rollout.speculation=mtp"]))
    more = {name: tuple(drafting[name]) for name in drafting if name not in plain}
    assert plain.keys() < drafting.keys() and more == draft_shapes(hf_of("glm47"))
