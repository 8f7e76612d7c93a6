"""The most memory that a rank held."""

import psutil
import pytest
import torch

from pyrl_ext.parallel import topology
from pyrl_ext.train.profile import peak_memory
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess


def test_peak_memory_is_at_least_what_is_held_now():
    with topology.start(tiny_plan()) as topo:
        held = torch.ones(1 << 24)
        now = psutil.Process().memory_info().rss
        peak = peak_memory(topo.device)["memory/peak"]
        del held
    assert 0.99 * now <= peak < psutil.virtual_memory().total  # the kernel counts in batches
    assert now > 4 << 24
