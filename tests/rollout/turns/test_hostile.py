"""Environments that fail: none stops the run, none is trained on, each is counted and named."""

from __future__ import annotations

from typing import Any

import pytest

from pyrl_ext.data.workers import CallFailed, Pool
from pyrl_ext.plan.schema.turns import REASONS
from pyrl_ext.samples import Prompt
from tests.helpers.conversations import carrying, hold, reason
from tests.helpers.deadline import DEADLINE
from tests.helpers.environments import (
    ENDS_WORKER,
    GOOD,
    HOSTILE,
    FailsTwice,
    FailsTwiceAsync,
    Good,
    HangsAsync,
    Make,
    Spins,
    host,
)

KINDS: dict[str, Make] = {name: make for name, (make, _) in HOSTILE.items()} | GOOD


@pytest.fixture(scope="module")
def held() -> Any:
    """One rollout with every kind of environment at the same time, in one worker."""
    kinds = dict(enumerate(KINDS.values()))
    found, feed = hold(kinds, prompts=len(KINDS), size=1, timeout=6.0)
    by_kind = {kind: found[i, 0] for i, kind in enumerate(KINDS)}
    return by_kind, feed


@pytest.mark.parametrize("kind", HOSTILE)
def test_converse_drops_a_hostile_environment_with_its_reason(held: Any, kind: str):
    conversation = held[0][kind]
    assert conversation.samples is None
    assert conversation.dropped.reason == HOSTILE[kind][1], conversation.dropped
    number = [*KINDS].index(kind)
    assert f"(prompt {number}, trajectory 0" in str(conversation.dropped)
    assert "expected" in str(conversation.dropped)


@pytest.mark.parametrize("kind", GOOD)
def test_converse_keeps_good_environments_among_hostile_ones(held: Any, kind: str):
    conversation = held[0][kind]
    assert conversation.dropped is None
    assert [sample.reward for sample in conversation.samples] == [2.0]


def test_converse_counts_hostile_environments_by_reason(held: Any):
    _, feed = held
    reasons = [why for _, why in HOSTILE.values()]
    for why in REASONS:
        assert feed.counts[f"dropped/{why}"] == reasons.count(why)
    assert feed.counts["begun"] == len(KINDS)
    assert feed.counts["close_failed"] == 1
    # one line for each reason, and for the one that did not close
    noted = feed._config.noted
    assert len(noted) == len(set(reasons)) + 1
    assert "container is gone" in noted["close_failed"]


@pytest.mark.parametrize("kind", ENDS_WORKER)
def test_converse_replaces_a_worker_and_drops_the_trajectories_that_it_held(kind: str):
    make, why = ENDS_WORKER[kind]
    found, feed = hold({0: make, 1: HangsAsync}, prompts=2, size=1, timeout=4.0)
    assert reason(found[0, 0]) == why
    assert "test.step(prompt 0, trajectory 0, turn 0)" in str(found[0, 0].dropped)
    assert reason(found[1, 0]) == why
    assert feed.counts["close_failed"] == 0
    found, _ = hold(Good, prompts=1, size=1)
    assert found[0, 0].samples is not None


@pytest.mark.parametrize("kind", [FailsTwice, FailsTwiceAsync])
@pytest.mark.parametrize("retries", [1, 2])
def test_calls_are_made_again_as_often_as_retries_say(kind: type[FailsTwice], retries: int):
    found, feed = hold(kind, prompts=1, size=1, retries=retries)
    assert (found[0, 0].samples is not None) == (retries == 2)
    assert feed.counts["retries"] == retries


def test_a_worker_with_a_call_that_cannot_be_stopped_gets_no_new_environments():
    pool = Pool("turns.environment: 'test'", host)
    prompt = Prompt(0, (30, 40))
    stuck = pool.owner()
    other = pool.owner()
    try:
        pool.submit("start", [(carrying(prompt, Spins),)], DEADLINE, stuck)[0].result()
        with pytest.raises(CallFailed, match=r"no result after 0\.1 s"):
            pool.submit("step", [([1], "a")], 0.1, stuck)[0].result()
        worker = pool._of_owner[stuck]
        pool.submit("start", [(carrying(prompt, Good),)], DEADLINE, other)[0].result()
        assert pool._of_owner[other] is not worker
        pool.release(stuck)
        assert worker.process.wait(DEADLINE) != 0
    finally:
        pool.close()
