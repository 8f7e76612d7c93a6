"""Tests that are coroutine functions, each in a loop of its own."""

import asyncio
import inspect

import pytest

from tests.helpers.deadline import DEADLINE


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function; pytest would refuse it."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.function(**given), DEADLINE))
    return True
