"""The learning rate of each step; what ranks hold while the optimizer's state is saved."""

import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from pyrl_ext.dist import topology
from pyrl_ext.megatron import optimizer
from pyrl_ext.megatron.optimizer import sharded_state, state_tensors, warmed_up
from pyrl_ext.tools.measure import Live
from pyrl_ext.trainer.policy import Policy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_plan


@pytest.mark.parametrize(
    ("warmup_steps", "expected"),
    [
        (0, [0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (1, [0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (2, [0.4, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (4, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
    ],
)
def test_warmed_up_rises_from_a_part_of_lr_to_all_of_it(warmup_steps, expected):
    lrs = [warmed_up(0.8, warmup_steps, step) for step in range(6)]
    assert lrs == pytest.approx(expected, rel=1e-12)


class Saving(NamedTuple):
    """Bytes of the optimizer on a rank, and while it is saved."""

    mine: int
    """Bytes of the optimizer's state that the rank steps."""
    peak: dict[str, int]
    """Most bytes at a time, by who gathers: the first rank, or every rank."""


def gathers_everywhere(part: Any, models: dict, loading: bool) -> Any:
    """megatron's default, which was ours."""
    return part.sharded_param_state_fully_reshardable(models, loading, {})


def on_rank(group: Any, folder: Path) -> Saving:
    os.environ["WORLD_SIZE"] = "2"
    plan = tiny_plan("parallel.dp=2", "optimizer.distributed=true", "model.dtype=bfloat16")
    ours, peak = optimizer._sharded_distributed, dict[str, int]()
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        model: Any = policy.llm.models[0]
        held = policy.llm.optimizer
        models = {0: model.sharded_state_dict(metadata={"dp_cp_group": topo.groups.dp_cp})}
        sharded_state(held, models)  # makes the moments
        tensors = [t for t in state_tensors(held) if t.dim()]  # not the counts of steps
        for tensor in tensors:
            tensor.normal_()
        for name, how in (("first", ours), ("every", gathers_everywhere)):
            with patch.object(optimizer, "_sharded_distributed", how):
                with Live() as live:
                    state = sharded_state(held, models)
                peak[name] = live.peak
                assert bool(state["params"][0]) == (name == "every" or topo.rank == 0)
                del state
                policy.save(folder / name)
        before = [t.clone() for t in tensors]
        for name in ("first", "every"):  # the second is as earlier versions wrote them
            for tensor in tensors:
                tensor.zero_()
            policy.load(folder / name)
            assert all(map(torch.equal, tensors, before)), name
        return Saving(sum(t.nbytes for t in tensors), peak)


def test_sharded_state_is_gathered_on_the_first_rank_alone(tmp_path: Path):
    first, second = run_ranks(on_rank, 2, tmp_path)
    whole = first.mine + second.mine
    print({n: [rank.peak[n] / whole for rank in (first, second)] for n in first.peak})
    for rank in (first, second):
        assert rank.peak["every"] > whole  # on a GPU a third of it there at the same time
    assert whole < first.peak["first"] <= first.peak["every"]
    assert second.peak["first"] < 1.2 * second.mine  # what it sends
