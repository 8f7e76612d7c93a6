"""Engines and sampling from a plan."""

from __future__ import annotations

import pytest

from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.rollout.build import _devices, sampling_of
from tests.helpers.tiny import tiny_plan


def test_sampling_of_has_random_streams_of_its_own_in_every_step():
    plan = tiny_plan("seed=5")
    source = build_source(plan)
    seeds = [sampling_of(plan, source, step).seed for step in range(4)]
    assert seeds == [5_000_015 + step for step in range(4)]
    assert sampling_of(tiny_plan("seed=6"), source, 0).seed not in seeds


def test_devices_of_engines_with_their_own_gpus_follow_the_trainers(
    monkeypatch: pytest.MonkeyPatch,
):
    vllm = ("device=cuda", "rollout.engine=vllm", "rollout.sleep=false")
    plan = tiny_plan(*vllm, "parallel.dp=4", "rollout.gpus=4", "rollout.tp=2")
    assert plan.transport == "broadcast" and plan.engine_of_rank == (0, None, 1, None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,7,6,5,4")
    assert _devices(plan, 1) == {"CUDA_VISIBLE_DEVICES": "5,4"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,7,6")
    with pytest.raises(RuntimeError, match="4, expected 8 GPUs on this machine"):
        _devices(plan, 1)
    shared = tiny_plan(*vllm, "parallel.dp=4", "rollout.transport=ipc")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert _devices(shared, 3) == {"CUDA_VISIBLE_DEVICES": "3"}
