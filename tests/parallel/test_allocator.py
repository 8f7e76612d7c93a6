"""Which runs let torch's CUDA allocator grow its segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.parallel.allocator import allocator_setting
from pyrl_ext.plan import Plan, compile_plan

CONFIGS = Path(__file__).parents[2] / "configs"
GROWS = "expandable_segments:True"


def plan_of(device: str = "cuda", **rollout: Any) -> Plan:
    plan = compile_plan(CONFIGS / "tiny.yaml", ())
    changed = plan.rollout.model_copy(update=rollout)
    return plan.model_copy(update={"device": device, "rollout": changed})


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({}, GROWS),
        ({"engine": "vllm"}, GROWS),
        ({"engine": "vllm", "tp": 2}, None),  # its all-reduce shares buffers by IPC
        ({"engine": "vllm", "tp": 2, "gpus": 2}, GROWS),  # in a process of an engine
        ({"engine": "vllm", "transport": "ipc"}, None),
        ({"engine": "vllm", "tp": 2, "servers": ("http://host:1",)}, GROWS),
    ],
)
def test_allocator_setting_is_made_where_no_memory_is_shared_by_ipc(
    rollout: dict[str, Any], expected: str | None
):
    assert allocator_setting(plan_of(**rollout), {}) == expected
    assert allocator_setting(plan_of("cpu", **rollout), {}) is None


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["", "max_split_size_mb:512"])
def test_allocator_setting_leaves_that_of_the_user(name: str, value: str):
    assert allocator_setting(plan_of(), {name: value}) is None
