"""A wait says what it waits for, and a stop signal ends it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from pyrl_ext.parallel import waiting
from pyrl_ext.parallel.collective_errors import agreeing
from pyrl_ext.parallel.waiting import NotYet, Stopped, Wait, announced, stop_waits, wait_for
from tests.helpers.deadline import DEADLINE
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits look often, and are never quiet."""
    monkeypatch.setattr(waiting, "QUIET_S", 0.0)
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGTERM ends waits."""
    before = signal.signal(signal.SIGTERM, lambda number, _: stop_waits(number) and None)
    yield
    signal.signal(signal.SIGTERM, before)


def never() -> None:
    raise NotYet("http://a: connection refused")


@pytest.mark.usefixtures("quick")
def test_wait_for_says_what_why_how_long_and_what_to_do():
    lines: list[str] = []
    asked: list[None] = []

    def look() -> str:
        asked.append(None)
        if len(asked) < 9:
            raise NotYet("http://a: connection refused")
        return "found"

    assert wait_for("one engine", look, 3600.0, "Start it", lines.append) == "found"
    begin = "waiting for one engine: http://a: connection refused; 0 s so far, at most 3600 s, "
    assert lines[0].startswith(begin + "until ") and lines[0].endswith(". Start it")
    assert not Wait.active


def test_wait_for_is_quiet_at_first_unless_the_reason_has_to_be_said():
    lines: list[str] = []
    reasons = iter([("refused", False), ("another program", True), ("another program", True)])

    def look() -> None:
        for reason, at_once in reasons:
            raise NotYet(reason, at_once)

    wait_for("it", look, say=lines.append)
    assert len(lines) == 1 and "another program" in lines[0] and "without a limit" in lines[0]


def test_wait_says_its_line_again_when_it_is_twice_as_old():
    lines: list[str] = []
    wait = Wait("it", say=lines.append)
    for age in (4, 6, 8, 11.9, 12.1, 20, 25):
        wait.began = time.monotonic() - age
        wait.goes_on("refused")
    assert [line.split("; ")[1].split(" so")[0] for line in lines] == ["6 s", "12 s", "25 s"]


def test_wait_for_ends_at_its_limit():
    message = "waited 0 s for it, expected no longer: http://a: connection refused. Start it"
    with pytest.raises(RuntimeError, match=message):
        wait_for("it", never, 0.0, "Start it")


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("kind", ["ours", "a library's"])
def test_a_signal_stops_a_wait_of_the_main_thread(kind: str):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Stopped, match="SIGTERM while waiting for it"):
        if kind == "ours":
            wait_for("it", never, DEADLINE)
        with announced("it"):
            threading.Event().wait(DEADLINE)
    assert not Wait.active


@pytest.mark.usefixtures("handled")
def test_a_signal_stops_a_wait_of_another_thread():
    ends: list[str] = []

    def waits() -> None:
        with pytest.raises(Stopped) as caught:
            wait_for("it", never, DEADLINE)
        ends.append(str(caught.value))

    thread = threading.Thread(target=waits)
    thread.start()
    while not Wait.active:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    thread.join(DEADLINE)
    assert ends == ["SIGTERM while waiting for it"]


def test_a_signal_without_a_wait_stops_nothing():
    assert stop_waits(signal.SIGTERM) is False


@pytest.mark.usefixtures("quick")
def test_announced_says_its_line_while_a_library_waits():
    lines: list[str] = []
    said = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        said.set()

    with announced("the hub", advice="Look there", say=say):
        assert said.wait(DEADLINE)
    assert lines[0] == "waiting for the hub; 0 s so far, without a limit. Look there"


def test_announced_lets_signals_kill_and_restores_their_handlers():
    before = [signal.getsignal(number) for number in waiting.STOPS]
    with announced("the hub", signals_kill=True):
        assert [signal.getsignal(number) for number in waiting.STOPS] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(number) for number in waiting.STOPS] == before


def one_waits(group) -> str:
    """Rank 0 waits and gets a signal; rank 1 is in the collective of `agreeing`."""
    signal.signal(signal.SIGTERM, lambda number, _: stop_waits(number) and None)
    try:
        with agreeing("test", "things", group):
            if group.rank() == 0:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                wait_for("it", never, DEADLINE)
    except Stopped as stop:
        return str(stop)
    return "not stopped"


def test_a_stop_of_one_rank_stops_those_that_wait_for_it():
    assert run_ranks(one_waits, 2) == ["SIGTERM while waiting for it"] * 2
