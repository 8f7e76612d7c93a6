"""Memory that nobody wrote shows: ``torch.empty`` gives NaN (integers: the largest value)."""

import pytest
import torch
from ranks import poison_empty


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
    """One worker runs the whole of a module that sets up something once for its tests."""
    sharing = {item.path for item in items if "module" in _scopes(item)}
    for item in items:
        if item.path in sharing:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _scopes(item):
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return {fixture.scope for found in fixtures for fixture in found}


@pytest.fixture(autouse=True)
def _poisoned_empty():
    previous = torch.are_deterministic_algorithms_enabled()
    poison_empty()
    yield
    torch.use_deterministic_algorithms(previous)
