"""The order of files, the fast part of the suite, and ``torch.empty`` that gives NaN.

(Integers: the largest value.)
"""

import gc
import os
import signal
import time
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

# when no slow test begins any more, so that a slow machine ends in time [seconds since 1970]
SLOW_UNTIL = float(os.environ.get("PYRL_SLOW_UNTIL", "inf"))

# the files that take longest
LONGEST = ("test_train.py", "test_checkpoint.py", "test_logprob_head.py", "test_policy.py")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start no worker of pytest-xdist again that a test ended after `faulthandler_timeout`.

    It would begin with the same test, and hang in it until CI ends.
    """
    if hasattr(config.option, "maxworkerrestart"):
        config.option.maxworkerrestart = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest: two workers take whole files, and neither is to wait at the end."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests after `SLOW_UNTIL`."""
    if item.get_closest_marker("slow") and time.time() > SLOW_UNTIL:
        pytest.skip("NOT RUN, the time for slow tests was over")


def pytest_collection_finish() -> None:
    """Exempt what was imported from garbage collection, a second of each full one."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    previous = torch.are_deterministic_algorithms_enabled()
    poison_empty()
    yield
    torch.use_deterministic_algorithms(previous)
