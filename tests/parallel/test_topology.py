"""Errors of a topology whose processes are not those of the plan; the allocator's setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext.parallel import topology
from pyrl_ext.parallel.launch import launched
from pyrl_ext.parallel.topology import allocator_setting
from pyrl_ext.plan import Plan, compile_plan
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("text", ["abc", "", "-1", "\u0664"])
def test_launched_names_a_variable_that_is_no_number(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ValueError, match=r"WORLD_SIZE=.*, expected a number"):
        launched("WORLD_SIZE", 1)


def test_start_says_how_to_start_the_right_number_of_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(RuntimeError, match=r"= 2 processes, .*has 3. .*-per-node 2, .*dp=3"),
        topology.start(tiny_plan("parallel.dp=2")),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_device_of_refuses_cuda_without_a_gpu():
    with pytest.raises(RuntimeError, match="device is cuda, but torch sees no GPU"):
        topology.device_of("cuda")


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
