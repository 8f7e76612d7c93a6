"""Initial weights of the tables."""

import pytest
import torch
import torch.nn.functional as F

from pyrl_ext.models.weight_table import RandomWeights
from pyrl_ext.plan.model.family import read_sizes
from tests.helpers.models import NEMOTRON, QWEN_NEXT

pytestmark = pytest.mark.multiprocess


def test_RandomWeights_starts_states_of_qwen3_next_as_transformers_does():
    table = read_sizes(QWEN_NEXT).weights(0)
    draw = RandomWeights(table, 0.02, seed=1)
    states = "model.layers.0.linear_attn."
    assert torch.equal(draw(f"{states}dt_bias"), torch.ones(8))
    assert torch.equal(draw(f"{states}norm.weight"), torch.ones(12))
    decays = draw(f"{states}A_log").exp()
    assert decays.min() >= 0.01 and decays.max() <= 16 and decays.std() > 1
    for name in ("layers.0.input_layernorm", "layers.3.self_attn.q_norm", "norm"):
        assert not draw(f"model.{name}.weight").any()


def test_RandomWeights_starts_states_of_nemotron_h_as_transformers_does():
    table = read_sizes(NEMOTRON).weights(0)
    draw = RandomWeights(table, 0.02, seed=1)
    states = "backbone.layers.0.mixer."
    for name in ("D", "norm.weight"):
        assert torch.equal(draw(states + name), torch.ones_like(draw(states + name)))
    assert torch.equal(draw("backbone.norm_f.weight"), torch.ones(64))
    steps = F.softplus(draw(f"{states}dt_bias"))
    assert steps.min() >= 0.000999 and steps.max() <= 0.1001 and steps.max() > 3 * steps.min()
    decays = draw(f"{states}A_log").exp()
    assert decays.min() >= 0.01 and decays.max() <= 16 and decays.std() > 1
    assert not draw(f"{states}conv1d.bias").any()
