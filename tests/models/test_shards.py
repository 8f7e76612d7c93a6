"""Shards of checkpoint tensors: the rows of each rank, and back."""

import pytest
import torch

from pyrl_ext.models.hf_folder import SafetensorsFolder
from pyrl_ext.models.shards import shard_of, whole_of
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.model.weight import Weight
from tests.helpers.models import NEMOTRON, QWEN35, QWEN_NEXT, write_model

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STATES = {"qwen3_next": QWEN_NEXT, "qwen3_5_moe": QWEN35, "nemotron_h": NEMOTRON}


def numbered(*lengths: int) -> list[torch.Tensor]:
    """One column each, numbered on."""
    return [*torch.arange(sum(lengths))[:, None].split([*lengths])]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shard_of_interleaves_query_groups(size):
    """Rows q0 q1 k0 v0 | q2 q3 k1 v1 ... as megatron's linear_qkv has them, over any split."""
    weight = Weight.grouped("q", "k", "v", "qkv", (8, 4), 3, 1)
    q, k, v = (
        torch.arange(heads * 3)[:, None] + base for heads, base in ((8, 0), (4, 100), (4, 200))
    )
    shards = [shard_of(weight, [q, k, v], size, rank) for rank in range(size)]
    assert all(shard.shape == weight.shard_shape(size) for shard in shards)
    first = [*range(6), 100, 101, 102, 200, 201, 202]
    assert torch.cat(shards)[:12, 0].tolist() == first
    back = whole_of(weight, shards)
    assert all(torch.equal(got, want) for got, want in zip(back, (q, k, v), strict=True))


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


@pytest.mark.parametrize("hf", STATES.values(), ids=list(STATES))
def test_weights_are_the_tensors_of_transformers_under_every_split(tmp_path, hf):
    write_model(tmp_path, hf)
    sizes = read_sizes(hf)
    table = sizes.weights(0)
    folder = SafetensorsFolder(tmp_path)
    folder.check(table, sizes.ignored(0))
    for row in table:
        tensors = [folder(name)[:] for name in row.hf_names]
        assert tuple(tuple(tensor.shape) for tensor in tensors) == row.shapes
        for size in (1, 2) if hf is NEMOTRON else (1, 2, 4):
            shards = [shard_of(row, tensors, size, rank) for rank in range(size)]
            assert all(shard.shape == row.shard_shape(size) for shard in shards), row
            assert all(map(torch.equal, whole_of(row, shards), tensors)), row
