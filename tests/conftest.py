"""Memory that nobody wrote shows: ``torch.empty`` gives NaN (integers: the largest value)."""

import pytest
import torch
from ranks import poison_empty


@pytest.fixture(autouse=True)
def _poisoned_empty():
    previous = torch.are_deterministic_algorithms_enabled()
    poison_empty()
    yield
    torch.use_deterministic_algorithms(previous)
