"""The learning rate of each step; what ranks hold while the optimizer's state is saved or read."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from pyrl_ext.megatron import checkpoint, optimizer
from pyrl_ext.megatron.optimizer import load_state, sharded_state, state_tensors
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.measured_step import Live
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess


class Cost(NamedTuple):
    """Bytes of the optimizer on a rank, and while it is saved and read."""

    mine: int
    """Bytes of the optimizer's state that the rank steps."""
    peak: dict[str, int]
    """Most bytes at a time while saving, by who gathers: the first rank, or every rank."""
    reading: tuple[int, int]
    """Most bytes at a time while it is read, and bytes read from files."""


def gathers_everywhere(part: Any, models: dict) -> Any:
    """megatron's default, which was ours."""
    return part.sharded_param_state_fully_reshardable(models, False, {})


def bytes_read() -> int:
    """By this process, since it started."""
    return int(Path("/proc/self/io").read_text().split()[1])


def reading(policy: Policy, folder: Path) -> tuple[int, int]:
    """Most bytes at a time while the optimizer's state is read, and bytes read from files."""
    [part], models = [policy.llm.saved], checkpoint._models(policy.llm.saved)
    before = bytes_read()
    with Live() as live:
        load_state(part.optimizer, models, folder, 1)
    return live.peak, bytes_read() - before


def in_another_layout(folder: Path) -> Cost:
    """Ranks with half of each dense weight, and with half of the experts."""
    plan = tiny_plan("parallel.tp=2", "parallel.ep=2", "parallel.etp=1", "model.dtype=bfloat16")
    with passes.built(plan) as policy:
        costs = reading(policy, folder)
        return Cost(sum(t.nbytes for t in state_tensors(policy.llm.optimizer)), {}, costs)


def on_rank(group: Any, folder: Path) -> tuple[Cost, Cost]:
    return in_one_layout(folder), in_another_layout(folder / "first")


def in_one_layout(folder: Path) -> Cost:
    plan = tiny_plan("parallel.dp=2", "optimizer.distributed=true", "model.dtype=bfloat16")
    ours = optimizer._gathered
    peak = dict[str, int]()
    with passes.built(plan) as policy:
        model: Any = policy.llm.models[0]
        held = policy.llm.optimizer
        models = {0: model.sharded_state_dict(metadata={"dp_cp_group": policy.topo.groups.dp_cp})}
        sharded_state(held, models)  # makes the moments
        tensors = [t for t in state_tensors(held) if t.dim()]  # not the counts of steps
        for tensor in tensors:
            tensor.normal_()
        for name, how in (("first", ours), ("every", gathers_everywhere)):
            with patch.object(optimizer, "_gathered", how):
                with Live() as live:
                    state = sharded_state(held, models)
                peak[name] = live.peak
                assert bool(state["params"][0]) == (name == "every" or policy.topo.rank == 0)
                del state
                policy.save(folder / name)
        before = [t.clone() for t in tensors]
        for name in ("first", "every"):  # the second is as earlier versions wrote them
            for tensor in tensors:
                tensor.zero_()
            policy.load(folder / name)
            assert all(map(torch.equal, tensors, before)), name
        for tensor in tensors:
            tensor.zero_()
        cost = Cost(sum(t.nbytes for t in tensors), peak, reading(policy, folder / "first"))
        assert all(map(torch.equal, tensors, before))
        return cost


@pytest.fixture(scope="module")
def costs(tmp_path_factory) -> list[tuple[Cost, Cost]]:
    return run_ranks(on_rank, 2, tmp_path_factory.mktemp("optimizer"))


def test_sharded_state_is_gathered_on_the_first_rank_alone(costs):
    (first, _), (second, _) = costs
    whole = first.mine + second.mine
    print({n: [rank.peak[n] / whole for rank in (first, second)] for n in first.peak})
    for rank in (first, second):
        assert rank.peak["every"] > whole  # on a GPU a third of it there at the same time
    # on a busy machine gloo's threads drop what was gathered late
    assert whole < first.peak["first"] <= 1.5 * first.peak["every"]
    assert second.peak["first"] < 0.5 * second.peak["every"]  # what it sends


def test_load_state_reads_what_the_rank_steps_alone(costs):
    """And the heads of the saved tensors, of which a small model has many for its bytes."""
    whole = sum(same.mine for same, _ in costs)
    for same, other in costs:
        peak, read = same.reading
        assert peak < 0.04 * whole and same.mine < read < 1.5 * same.mine
        peak, read = other.reading
        moments = 2 / 3 * other.mine  # the state was there in the other layout
        assert moments < peak < moments + 0.04 * whole and other.mine < read < 1.8 * other.mine
