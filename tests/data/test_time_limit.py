"""Time limits of calls, and the notices about calls that take long."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from pyrl_ext.data.time_limit import TimeLimit, TimeUp
from tests.helpers.deadline import DEADLINE

pytestmark = pytest.mark.multiprocess


def test_time_limit_names_the_call_that_is_waited_for():
    seen = threading.Event()
    lines: list[str] = []

    def notice(line: str) -> None:
        lines.append(line)
        if sum("prompt 7" in each for each in lines) == 2:
            seen.set()

    with TimeLimit(None, notice, notice_seconds=0.05) as limit:
        with limit.watched(lambda: "short"):
            pass
        with limit.watched(lambda: "reward of prompt 7"):
            assert seen.wait(DEADLINE)
    named = [line.startswith("waiting for reward of prompt 7, which has run") for line in lines]
    assert all(named[named.index(True) :])  # "short" before it where this process had to wait


def test_time_limit_counts_each_call_by_itself():
    with TimeLimit(30.0) as limit:
        for _ in range(100):
            with limit.watched(lambda: "call"):
                pass


def test_time_limit_interrupts_a_subprocess_and_repeats_for_a_call_that_goes_on():
    caught = 0
    with pytest.raises(TimeUp), TimeLimit(0.5) as limit, limit.watched(lambda: "call"):
        try:
            subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"], check=True)
        except BaseException:
            caught += 1
        time.sleep(3600)
    assert caught == 1


def test_time_limit_refuses_other_threads():
    errors: list[str] = []

    def enter() -> None:
        try:
            with TimeLimit(1.0):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter, name="scorer")
    thread.start()
    thread.join()
    assert errors == [
        "data.reward_timeout: 1.0 with rewards scored in the thread 'scorer', expected the main "
        "thread"
    ]
