"""Errors of a topology whose processes are not those of the plan."""

import pytest
import torch

from pyrl_ext.parallel import topology
from tests.helpers.tiny import tiny_plan


@pytest.mark.parametrize("text", ["abc", "", "-1", "\u0664"])
def test_launched_names_a_variable_that_is_no_number(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ValueError, match=r"WORLD_SIZE=.*, expected a number"):
        topology.launched("WORLD_SIZE", 1)


def test_start_says_how_to_start_the_right_number_of_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(RuntimeError, match=r"needs 2 processes .*has 3. .*--nproc-per-node 2"),
        topology.start(tiny_plan("parallel.dp=2")),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_device_of_refuses_cuda_without_a_gpu():
    with pytest.raises(RuntimeError, match="device is cuda, but torch sees no GPU"):
        topology.device_of("cuda")
