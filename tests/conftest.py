"""The order of files, the fast part of the suite, and ``torch.empty`` that gives NaN.

(Integers: the largest value.)
"""

import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest
import torch

from tests.helpers.ranks import poison_empty

# the files that take longest
LONGEST = ("test_train.py", "test_checkpoint.py", "test_head.py", "test_policy.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="skip what starts a process or builds a model"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest: two workers take whole files, and neither is to wait at the end."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True, scope="session")
def _fast(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--fast`` a test is skipped when it starts a process or builds a model."""
    if not request.config.getoption("--fast"):
        yield
        return

    def slow(*_given: Any, **_named: Any) -> NoReturn:
        pytest.skip("--fast: starts a process or builds a model")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", slow)
        patch.setattr(BaseProcess, "start", slow)
        patch.setattr(torch.nn.Module, "__init__", slow)
        yield


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    previous = torch.are_deterministic_algorithms_enabled()
    poison_empty()
    yield
    torch.use_deterministic_algorithms(previous)
