"""The order of files; and memory that nobody wrote shows: ``torch.empty`` gives NaN.

(Integers: the largest value.)
"""

import pytest
import torch

from tests.helpers.ranks import poison_empty

# the files that take longest
LONGEST = ("test_train.py", "test_parallel.py", "test_checkpoint.py", "test_head.py")


def pytest_collection_modifyitems(items):
    """Begin with the slowest: two workers take whole files, and neither is to wait at the end."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def _poisoned_empty():
    previous = torch.are_deterministic_algorithms_enabled()
    poison_empty()
    yield
    torch.use_deterministic_algorithms(previous)
