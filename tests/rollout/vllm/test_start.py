"""vLLM's process groups among those of the trainer's ranks, and its configs; needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING

from pyrl_ext.rollout.vllm import cpu
from pyrl_ext.rollout.vllm.start import unwritten, world_of
from tests.helpers.configs import hf_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

ENGINES = [0, 1]  # of three ranks; the last one has no engine


def test_expand_writes_the_value_of_a_request_to_each_of_its_drafted_tokens():
    """Sampling divides the logits of greedy requests, whose temperature is 0, by 1."""
    written = torch.full((4,), float("nan"))
    cpu._expand(written, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([1, 1, 4]), 0, 1)
    assert written.tolist() == [0.5, 2.0, 2.0, 2.0]
    cpu._expand(written, torch.tensor([0.0, 2.0]), torch.tensor([3, 4], dtype=torch.int32), 0, 1)
    assert written.tolist() == [1.0, 1.0, 1.0, 2.0]


def test_unwritten_has_what_the_config_of_transformers_lacks():
    """MiniMax-M2's published config has what vLLM reads, that of transformers' class does not."""
    published = hf_of("minimax_m2")
    assert unwritten(published) == {}
    written = CONFIG_MAPPING["minimax_m2"]().to_dict()
    written["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    needed = ("use_routing_bias", "scoring_func", "rotary_dim")
    assert unwritten(written) == {name: published[name] for name in needed}


def sum_over(group: Any) -> float:
    mine = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(mine, group=group)
    return float(mine)


def groups_of_engines(world: dist.ProcessGroup) -> list[float]:
    """The sum over each group that vLLM would make twice, for two engines one after the other.

    Before, the first rank is in one group more than the others, as ranks of the first stage of a
    pipeline and those of groups of dynamic context parallelism are.
    """
    if world.rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    found: list[float] = []
    if world.rank() not in ENGINES:
        return found
    for _ in range(2):
        with world_of(len(ENGINES)):
            assert dist.get_world_size() == len(ENGINES)
            together = [dist.new_group(ENGINES, backend="gloo") for _ in range(2)]
            alone = [dist.new_group([rank], backend="gloo") for rank in ENGINES]
        found += [sum_over(group) for group in together]
        found.append(sum_over(alone[world.rank()]))
        assert alone[1 - world.rank()] is None
        assert dist.get_world_size() == world.size()
    return found


def test_world_of_makes_groups_of_ranks_that_are_in_unequally_many():
    both = 3.0
    first, second, encoder = run_ranks(groups_of_engines, 3)
    assert first == [both, both, 1.0] * 2
    assert second == [both, both, 2.0] * 2
    assert encoder == []
