"""The order of files, the fast part of the suite, and ``torch.empty`` that gives NaN.

(Integers: the largest value.)
"""

import gc
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.ranks import poison_empty

# a busy machine draws examples slowly, and no test fails by the clock
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# a shell starts what it runs in the background without Ctrl-C, which tests send to themselves
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# the files that take longest
LONGEST = ("test_train.py", "test_checkpoint.py", "test_logprob_head.py", "test_policy.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest: two workers take whole files, and neither is to wait at the end."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """Exempt what was imported from garbage collection, a second of each full one."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    previous = torch.are_deterministic_algorithms_enabled()
    poison_empty()
    yield
    torch.use_deterministic_algorithms(previous)
