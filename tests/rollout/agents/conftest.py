"""Tests that are coroutine functions, each in a loop of its own."""

from tests.rollout.remote.conftest import pytest_pyfunc_call as pytest_pyfunc_call
