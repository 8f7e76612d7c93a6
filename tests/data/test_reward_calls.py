"""Calls of rewards in several workers: at the same time, again, and without a result."""

from __future__ import annotations

import os
import re
import resource
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext.data import workers
from pyrl_ext.data.rewards import Scorer, WorkerReward
from pyrl_ext.samples import Prompt, Sample
from tests.helpers.deadline import DEADLINE

JUDGES = "tests.helpers.judges"
LIMIT = 10.0  # of calls that return at once [s]


def sample(prompt: int) -> Sample:
    places = torch.arange(3)
    never = torch.zeros(3, dtype=torch.bool)
    mask = places >= 1
    return Sample(
        prompt, 0, torch.tensor([5, 6, 7]), 1, mask, -mask.float(), None, (), never, 0, "length"
    )


def scored(
    reward: WorkerReward, answers: Sequence[Any]
) -> tuple[dict[int, float], dict[str, float]]:
    """Prompt -> reward, of one response to each, and the counts."""
    prompts = [Prompt(number, (5,), answer) for number, answer in enumerate(answers)]
    counts: defaultdict[str, float] = defaultdict(float)
    samples = [sample(prompt.id) for prompt in prompts]
    found = Scorer(prompts, reward, str, ())(samples)(counts)
    assert counts["responses"] == len(answers)
    return {each.prompt_id: each.reward for each in found}, counts


def judge(**limits: Any) -> Any:
    return closing(WorkerReward(f"{JUDGES}:judge", **limits))


@pytest.mark.parametrize("concurrency", [4, 8])
def test_coroutines_of_a_worker_run_at_the_same_time(concurrency: int):
    """Each one waits for three others: with fewer at once, none would end."""
    with judge(concurrency=concurrency) as reward:
        found, counts = scored(reward, ["meet"] * 16)
    assert len(found) == counts["reward_results"] == 16
    assert 4 <= max(found.values()) <= concurrency


def test_rewards_are_in_the_order_of_samples_whichever_call_ends_first():
    with judge(concurrency=6) as reward:
        found, _ = scored(reward, ["end after the next"] * 6)
    assert [*found.items()] == [(number, number) for number in range(6)]


def test_coroutines_run_one_after_the_other_at_concurrency_1():
    with judge(concurrency=1) as reward:
        found, _ = scored(reward, ["process", "linger", "process"])
    assert found[1] == 1 and found[0] == found[2]


def test_a_late_coroutine_is_cancelled_and_its_worker_goes_on():
    with judge(concurrency=8, timeout=LIMIT, drops=True) as reward:
        before, _ = scored(reward, ["process"])
        found, counts = scored(reward, ["wait", "process", "wait", "process"])
        after, _ = scored(reward, ["process"])
    assert [*found] == [1, 3] and counts["dropped/timeout"] == 2
    assert before[0] == found[1] == found[3] == after[0]


def test_a_coroutine_that_blocks_its_worker_fails_alone(monkeypatch: pytest.MonkeyPatch):
    """The worker is replaced, and all other calls that it had are made again."""
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.1)
    with judge(concurrency=3, timeout=LIMIT, drops=True) as reward:
        before, _ = scored(reward, ["process"])
        found, counts = scored(reward, ["linger", "block", "linger", "linger", "linger"])
        after, _ = scored(reward, ["process"])
    assert found == {0: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert counts["dropped/timeout"] == 1 and counts["reward_retries"] == 0
    assert before != after


def test_a_single_coroutine_that_blocks_its_worker_is_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.1)
    with judge(concurrency=3, timeout=LIMIT, drops=True) as reward:
        found, counts = scored(reward, ["block"])
        after, _ = scored(reward, ["linger"])
    assert found == {} and counts["dropped/timeout"] == 1
    assert after == {0: 1.0}


def test_a_coroutine_that_ends_its_worker_fails_alone(capfd: pytest.CaptureFixture[str]):
    with judge(concurrency=3, drops=True) as reward:
        found, counts = scored(reward, ["linger", "die", "linger", "die", "linger"])
        again, _ = scored(reward, ["linger", "die"])
    assert found == {0: 1.0, 2: 1.0, 4: 1.0} and again == {0: 1.0}
    assert counts["dropped/lost"] == 2
    lines = re.findall(
        r"reward .*judge\(prompt 1, .*; the response is dropped", capfd.readouterr().err
    )
    assert len(lines) == 1 and "its worker process ended with exit code 3" in lines[0]


def test_calls_are_spread_over_several_workers(tmp_path: Path):
    """Each one waits for three processes."""
    with closing(WorkerReward(f"{JUDGES}:meets", workers=3)) as reward:
        found, _ = scored(reward, [(3, str(tmp_path))] * 6)
    assert len({*found.values()}) == 3


@pytest.mark.parametrize(("retries", "left"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
def test_a_call_that_raises_is_made_again(retries: int, left: list[int]):
    name = f"{JUDGES}:fails_for_a_while"
    with closing(WorkerReward(name, retries=retries, drops=True)) as reward:
        found, counts = scored(reward, [0, 1, 2])
    assert found == {number: number + 1 for number in left}
    assert counts["dropped/error"] == 3 - len(left)
    assert counts["reward_retries"] == min(1, retries) + retries


def test_a_call_that_ended_its_worker_is_made_again(tmp_path: Path):
    with closing(WorkerReward(f"{JUDGES}:dies_once", retries=1)) as reward:
        found, counts = scored(reward, [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path)])
    assert found == {0: 1.0, 1: 1.0, 2: 1.0}
    assert counts["reward_retries"] == 2


def test_a_failure_that_is_not_tolerated_names_the_line_of_the_user():
    name = f"{JUDGES}:fails_for_a_while"
    message = (
        r"fails_for_a_while\(prompt 1, .*\): raised ConnectionError: no judge "
        r"\(.*/judges\.py:\d+\), expected a number"
    )
    reward = WorkerReward(name, retries=1)
    with closing(reward), pytest.raises(RuntimeError, match=message):
        scored(reward, [1, 2])


def test_the_next_group_raises_what_an_earlier_call_failed_with():
    prompts = [Prompt(0, (5,), 1)]
    with closing(WorkerReward(f"{JUDGES}:fails_for_a_while")) as reward:
        scorer = Scorer(prompts, reward, str, ())
        scorer([sample(0)])
        _, call = scorer._running[0]
        assert isinstance(call.done.exception(DEADLINE), workers.CallFailed)
        with pytest.raises(RuntimeError, match="raised ConnectionError"):
            scorer([sample(0)])


@pytest.mark.parametrize(("end", "code"), [("die", 3), ("hang up", -9)])
def test_calls_fail_if_no_other_worker_can_start(
    end: str, code: int, capfd: pytest.CaptureFixture[str]
):
    """Nor can the pool look for the processes that a worker started."""
    with judge(concurrency=3, drops=True) as reward:
        before, _ = scored(reward, ["linger"])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            found, counts = scored(reward, ["wait", end])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        after, _ = scored(reward, ["linger"])
    assert found == {} and counts["dropped/lost"] == 2
    lost = f"code {code}; another did not start: OSError: [Errno 24] Too many open files, expected"
    assert lost in capfd.readouterr().err
    assert before == after == {0: 1.0}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_calls_fail_if_the_thread_of_the_pool_ends(monkeypatch: pytest.MonkeyPatch):
    """An error that nobody foresaw is no hang: neither of calls that run nor of later ones."""

    def broken(pool: workers.Pool, worker: Any) -> None:
        raise ArithmeticError("not foreseen")

    with judge(drops=True) as reward:
        scored(reward, ["linger"])
        monkeypatch.setattr(workers.Pool, "_receive_all", broken)
        for _ in range(2):
            found, counts = scored(reward, ["linger", "wait"])
            assert found == {} and counts["dropped/lost"] == 2


LOADS = """
import os, time
with open(__file__ + ".loads", "a") as file:
    file.write("x")
    file.flush()
    number = os.path.getsize(file.name)
if number in {numbers}:
    {action}
def fn(prompt, text, tokens):
    if prompt.answer == "die":
        os._exit(3)
    return 1.0
"""


def loads(folder: Path, numbers: tuple[int, ...], action: str) -> None:
    """Write a module whose loads with these numbers act; the pool's first one is number 1."""
    (folder / "loads.py").write_text(LOADS.format(numbers=set(numbers), action=action))


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (
            "raise ImportError('no judge')",
            "its worker process did not load: data.reward: 'loads:fn': {path}:8: module loads "
            "raised ImportError: no judge, expected a module that imports",
        ),
        ("os._exit(4)", "its worker process ended with exit code 4 as it was loaded"),
    ],
)
def test_calls_of_a_worker_that_does_not_load_are_made_again_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    action: str,
    reason: str,
):
    monkeypatch.syspath_prepend(tmp_path)
    loads(tmp_path, (2, 4, 5), action)
    with closing(WorkerReward("loads:fn", drops=True)) as reward:
        first, _ = scored(reward, ["good", "die", "good"])
        again, counts = scored(reward, ["die", "good", "good"])
        last, _ = scored(reward, ["good"])
    assert first == {0: 1.0, 2: 1.0}
    assert again == {} and counts["dropped/lost"] == 3
    assert last == {0: 1.0}
    assert "prompt 1" in capfd.readouterr().err
    (tmp_path / "loads.py.loads").unlink()
    loads(tmp_path, (2, 3), action)
    with closing(WorkerReward("loads:fn", drops=True)) as reward:
        (died,) = reward.pool.submit("score", [(Prompt(0, (5,), "die"), "", [])], None)
        (after,) = reward.pool.submit("score", [(Prompt(1, (5,), "good"), "", [])], None)
        assert "exit code 3" in str(died.exception(DEADLINE))
        assert reason.format(path=tmp_path / "loads.py") == str(after.exception(DEADLINE))


def test_workers_that_load_serve_where_another_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    loads(tmp_path, tuple(range(2, 100)), "raise ImportError('no judge')")
    with closing(WorkerReward("loads:fn", workers=3)) as reward:
        found, _ = scored(reward, ["good"] * 6)
    assert [*found.values()] == [1.0] * 6


def test_a_later_worker_has_a_limit_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers, "_LOAD_SECONDS", 1.0)
    loads(tmp_path, tuple(range(2, 100)), f"time.sleep({DEADLINE})")
    with closing(WorkerReward("loads:fn", drops=True)) as reward:
        (died,) = reward.pool.submit("score", [(Prompt(0, (5,), "die"), "", [])], None)
        (after,) = reward.pool.submit("score", [(Prompt(1, (5,), "good"), "", [])], None)
        assert "exit code 3" in str(died.exception(DEADLINE))
        message = r"its worker process did not load user code within \d+ s"
        assert re.fullmatch(message, str(after.exception(DEADLINE)))


class Unreadable:
    """An answer that raises in the worker that reads it."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_a_call_that_a_worker_cannot_read_is_lost(capfd: pytest.CaptureFixture[str]):
    with judge(concurrency=3, drops=True) as reward:
        found, counts = scored(reward, [Unreadable()])
        after, _ = scored(reward, ["linger"])
    assert found == {} and counts["dropped/lost"] == 1
    assert after == {0: 1.0}
    assert "ValueError: invalid literal for int() with base 10" in capfd.readouterr().err
