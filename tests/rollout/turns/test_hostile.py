"""Environments that fail: none stops the run, none is trained on, each is counted and named."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from pyrl_ext.plan.schema.turns import REASONS
from pyrl_ext.rollout.turns.env_executor import Call
from tests.helpers.conversations import hold, reason
from tests.helpers.environments import (
    HOSTILE,
    ClosesBadly,
    Good,
    GoodAsync,
    HugeInfo,
)

# a changed setting is taken for a change of the call that ends next: these run alone
ALONE = [kind for kind, why in HOSTILE.items() if why == "settings"]
TOGETHER = [kind for kind in HOSTILE if kind not in ALONE]
KINDS: list[type[Good]] = [*TOGETHER, Good, GoodAsync, ClosesBadly, HugeInfo]


@pytest.fixture(scope="module")
def held() -> Any:
    """One rollout with every kind of environment at the same time."""
    before = signal.getsignal(signal.SIGINT)
    notes: list[str] = []
    kinds = dict(enumerate(KINDS))
    found, feed = hold(kinds, prompts=len(KINDS), size=1, timeout=3.0, notes=notes)
    assert signal.getsignal(signal.SIGINT) == before
    by_kind = {kind: found[i, 0] for i, kind in enumerate(KINDS)}
    return by_kind, feed, notes


@pytest.mark.parametrize("kind", TOGETHER, ids=lambda kind: kind.__name__)
def test_converse_drops_a_hostile_environment_with_its_reason(held: Any, kind: type[Good]):
    conversation = held[0][kind]
    assert conversation.samples is None
    assert conversation.dropped.reason == HOSTILE[kind], conversation.dropped
    number = KINDS.index(kind)
    assert f"(prompt {number}, trajectory 0" in str(conversation.dropped)
    assert "expected" in str(conversation.dropped)


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_converse_drops_what_changes_a_setting_and_sets_it_back(kind: type[Good]):
    before = dict(os.environ), os.getcwd()
    found, feed = hold({0: kind}, prompts=1, size=1, timeout=2.0)
    assert (dict(os.environ), os.getcwd()) == before
    assert reason(found[0, 0]) == "settings"
    assert "(prompt 0, trajectory 0" in str(found[0, 0].dropped)
    assert feed.counts["dropped/settings"] == 1


@pytest.mark.parametrize("kind", [Good, GoodAsync, ClosesBadly, HugeInfo])
def test_converse_keeps_good_environments_among_hostile_ones(held: Any, kind: type[Good]):
    conversation = held[0][kind]
    assert conversation.dropped is None
    assert [sample.reward for sample in conversation.samples] == [2.0]


def test_converse_counts_hostile_environments_by_reason(held: Any):
    _, feed, notes = held
    reasons = [HOSTILE[kind] for kind in TOGETHER]
    for why in REASONS:
        assert feed.counts[f"dropped/{why}"] == reasons.count(why)
    assert feed.counts["begun"] == len(KINDS)
    assert feed.counts["close_failed"] == 1
    # one line for each reason, and for the one that did not close
    assert len(notes) == len(set(reasons)) + 1
    assert any("container is gone" in note for note in notes)


class BlocksLong(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        time.sleep(4)


class Waits(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        await asyncio.sleep(1)
        return super().step(tokens, text)


def test_calls_lose_what_shares_a_loop_that_is_blocked_for_good_and_go_on_in_another():
    kinds = {0: BlocksLong, 1: Waits, 2: Good}
    found, feed = hold(kinds, prompts=3, size=1, timeout=1.2)
    assert reason(found[0, 0]) == reason(found[1, 0]) == "blocked"
    assert "test.step(prompt 0, trajectory 0, turn 0) blocks" in str(found[1, 0].dropped)
    assert found[2, 0].samples is not None
    assert feed.counts["dropped/blocked"] == 2


class FailsTwice(Good):
    """Its first calls fail."""

    failures = 0

    def step(self, tokens: list[int], text: str) -> Any:
        FailsTwice.failures += 1
        if FailsTwice.failures <= 2:
            raise ConnectionError("try again")
        return super().step(tokens, text)


class FailsTwiceAsync(FailsTwice):
    async def step(self, tokens: list[int], text: str) -> Any:
        return FailsTwice.step(self, tokens, text)


@pytest.mark.parametrize("kind", [FailsTwice, FailsTwiceAsync])
@pytest.mark.parametrize("retries", [1, 2])
def test_calls_are_made_again_as_often_as_retries_say(kind: type[FailsTwice], retries: int):
    FailsTwice.failures = 0
    found, feed = hold(kind, prompts=1, size=1, retries=retries)
    assert (found[0, 0].samples is not None) == (retries == 2)
    assert feed.counts["retries"] == retries


def test_Call_has_a_beginning_before_its_thread_starts():
    """The watcher may see it at once; from 0 it would be as old as the machine is up, and late."""
    before = time.monotonic()
    assert before <= Call("key", "reset", str, (), 0).began <= time.monotonic()
