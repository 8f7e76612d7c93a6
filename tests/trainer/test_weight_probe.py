"""The trainer's forward over canaries: the engine's numbers if it has its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.samples import Prompt, Sample, Sampling
from pyrl_ext.trainer.step import score_canaries
from tests.helpers import passes
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess

PROMPT = Prompt(0, tuple(range(3, 43)))
SAMPLING = Sampling(4, seed=3)


def generated(named: dict[str, Tensor], config: Any) -> Sample:
    engine = HFEngine(config)
    engine.load_weights(named.items(), 1)
    return engine.generate([PROMPT], SAMPLING)[0]


def scores(group: Any, *overrides: str) -> list[tuple[float, dict[int, float]]]:
    """A sample with the weights, one with noise of 1e-4 on them, one with routes of others."""
    plan = tiny_plan(*overrides)
    with passes.built(plan) as policy:
        named = {name: tensor.clone() for name, tensor in policy.weights()}
        samples: list[Sample] = []
        if policy.topo.rank == 0:
            g = torch.Generator().manual_seed(0)
            noise = {n: torch.randn(w.shape, generator=g) for n, w in named.items()}
            good = generated(named, plan.hf)
            noisy, other = (
                generated({n: w + size * noise[n] for n, w in named.items()}, plan.hf)
                for size in (1e-4, 1e-2)
            )
            samples = [good, noisy, replace(good, routes=other.routes)]
            samples = [replace(sample, reward=0.0) for sample in samples]
        return [(gap, dict(apart)) for gap, apart in score_canaries(policy, samples)]


@pytest.mark.parametrize("layout", ["dp", "pp"])
def test_score_canaries_sees_other_weights_and_other_routes(layout: str):
    ranks = run_ranks(scores, 2, f"parallel.{layout}=2")
    for good, noisy, stale in ranks:
        assert good[0] < 1e-6 and noisy[0] > 1e-4
        assert good[1] == dict.fromkeys((1, 2, 3), 0.0)
        assert min(stale[1]) == 1 and stale[1][1] > 0.01
