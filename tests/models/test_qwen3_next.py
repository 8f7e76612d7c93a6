"""Qwen3-Next and Qwen3.5: tensors under every split, and the trainer's model of every layout."""

import pytest
import torch

from pyrl_ext.models.hf_folder import SafetensorsFolder
from pyrl_ext.models.shards import shard_of, whole_of
from pyrl_ext.models.weight_table import RandomWeights
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.model.weight import Weight
from tests.helpers.models import QWEN35, QWEN_NEXT, check_layouts, write_model

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def numbered(*lengths: int) -> list[torch.Tensor]:
    """One column each, numbered on."""
    return [*torch.arange(sum(lengths))[:, None].split([*lengths])]


@pytest.mark.parametrize("size", [1, 2])
def test_shard_of_puts_section_after_section(size):
    """Group by group [a a | b], [c] in the checkpoint; all a, all b, all c of a rank's groups."""
    weight = Weight.sectioned("in", {"ab": (2, 1), "c": (1,)}, 2, 1)
    tensors = numbered(6, 2)
    shards = [shard_of(weight, tensors, size, rank) for rank in range(size)]
    rows = {1: [[0, 1, 3, 4, 2, 5, 6, 7]], 2: [[0, 1, 2, 6], [3, 4, 5, 7]]}[size]
    assert [shard[:, 0].tolist() for shard in shards] == rows
    assert all(shard.shape == weight.shard_shape(size) for shard in shards)
    assert all(map(torch.equal, whole_of(weight, shards), tensors))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shard_of_puts_gates_behind_the_queries_of_their_group(size):
    """q0 g0 q1 g1 | q2 g2 q3 g3 -> q0 q1 g0 g1 k0 v0 | q2 q3 g2 g3 k1 v1."""
    weight = Weight.grouped("q", "k", "v", "qkv", (4, 2), 1, 1, gates=True)
    tensors = numbered(8, 2, 2)
    shards = [shard_of(weight, tensors, size, rank) for rank in range(size)]
    rows = torch.cat(shards)[:, 0].tolist()
    assert rows == [0, 2, 1, 3, 8, 10, 4, 6, 5, 7, 9, 11]
    assert all(map(torch.equal, whole_of(weight, shards), tensors))


@pytest.mark.parametrize("hf", [QWEN_NEXT, QWEN35], ids=["qwen3_next", "qwen3_5_moe"])
def test_weights_are_the_tensors_of_transformers_under_every_split(tmp_path, hf):
    write_model(tmp_path, hf)
    sizes = read_sizes(hf)
    table = sizes.weights(0)
    folder = SafetensorsFolder(tmp_path)
    folder.check(table, sizes.ignored(0))
    for row in table:
        tensors = [folder(name)[:] for name in row.hf_names]
        assert tuple(tuple(tensor.shape) for tensor in tensors) == row.shapes
        for size in (1, 2, 4):
            shards = [shard_of(row, tensors, size, rank) for rank in range(size)]
            assert all(shard.shape == row.shard_shape(size) for shard in shards), row
            assert all(map(torch.equal, whole_of(row, shards), tensors)), row


def test_RandomWeights_starts_states_as_transformers_does():
    table = read_sizes(QWEN_NEXT).weights(0)
    draw = RandomWeights(table, 0.02, seed=1)
    states = "model.layers.0.linear_attn."
    assert torch.equal(draw(f"{states}dt_bias"), torch.ones(8))
    assert torch.equal(draw(f"{states}norm.weight"), torch.ones(12))
    decays = draw(f"{states}A_log").exp()
    assert decays.min() >= 0.01 and decays.max() <= 16 and decays.std() > 1
    for name in ("layers.0.input_layernorm", "layers.3.self_attn.q_norm", "norm"):
        assert not draw(f"model.{name}.weight").any()


LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "cp2": ("parallel.cp=2", "model.recompute=full"),
    "pp2": ("parallel.pp=2", "parallel.pipeline_model_parallel_layout=Et|t|t|tL", "parallel.vpp=2"),
    "dp2 ep2 dynamic": ("parallel.dp=2", "parallel.ep=2", "parallel.dynamic_cp=2"),
}


def test_Policy_of_every_layout_equals_one_process(tmp_path):
    layouts = {name: ("qwen3_next", *overrides) for name, overrides in LAYOUTS.items()}
    layouts |= {f"{name}, 3.5": ("qwen3_5_moe", *LAYOUTS[name]) for name in ("tp2", "cp2")}
    models = {"qwen3_next": QWEN_NEXT, "qwen3_5_moe": QWEN35}
    # gated norms enlarge rounding: one process differs from transformers by 3.2e-5
    check_layouts(tmp_path, models, layouts, atol=1e-4)
