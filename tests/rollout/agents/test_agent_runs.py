"""Whole runs with agents: what the official client trains is what an environment trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyrl_ext import train
from pyrl_ext.data.recordings import load_samples
from pyrl_ext.samples import Sample
from tests.helpers.guess_calls import write_config
from tests.helpers.rows import numbers

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STEPS = 8


def samples(folder: Path) -> list[list[Sample]]:
    """The recorded samples, step by step."""
    return [load_samples(path) for path in sorted(folder.glob("*.safetensors"))]


def test_an_agent_with_tools_trains_what_an_environment_trains(tmp_path: Path):
    agent = {"agent": "tests.helpers.guess_calls:agent"}
    environment = {"environment": "tests.helpers.guess_calls:Calls", "max_observation_tokens": 8}
    assert train.main([str(write_config(tmp_path, "agent", STEPS, **agent))]) == 0
    assert train.main([str(write_config(tmp_path, "environment", STEPS, **environment))]) == 0
    measured = ("turns/environment_seconds", "turns/waited_seconds")
    rows = numbers(tmp_path / "agent", *measured)
    assert rows == numbers(tmp_path / "environment", *measured)  # loss and grad_norm, too
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert max(rewards[-2:]) > 2 * rewards[0]
    ours = samples(tmp_path / "agent-samples")
    theirs = samples(tmp_path / "environment-samples")
    assert len(ours) == len(theirs) == STEPS
    for own, other in zip(ours, theirs, strict=True):
        assert len(own) == len(other) > 100
        for left, right in zip(own, other, strict=True):
            assert (left.prompt_id, left.index, left.spans) == (
                right.prompt_id, right.index, right.spans,
            )  # fmt: skip
            for name in ("tokens", "rollout_logprobs", "loss_mask", "routes", "route_mask"):
                assert torch.equal(getattr(left, name), getattr(right, name)), name
