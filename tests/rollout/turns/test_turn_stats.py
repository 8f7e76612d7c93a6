"""Rollouts with environments: groups without dropped trajectories, ranks, recordings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.data.recordings import save_samples
from pyrl_ext.rollout.distribute import RolloutRequest, RolloutSamples, generate_on_ranks
from pyrl_ext.rollout.recorded import RecordedEngine
from pyrl_ext.rollout.turns.turn_stats import conversations, dropped_metrics, recorded
from pyrl_ext.samples import Prompt, Sampling
from tests.helpers.conversations import EOS, carrying, config, three_then_stop
from tests.helpers.engines import assert_same
from tests.helpers.environments import HOSTILE, Good
from tests.helpers.ranks import run_ranks
from tests.helpers.scripted import ScriptedEngine

pytestmark = pytest.mark.multiprocess

PROMPTS = [Prompt(i, (30 + i, 40)) for i in range(4)]
SAMPLING = Sampling(max_new_tokens=4, stop_ids=(EOS,), samples_per_prompt=2)
FAILS = HOSTILE["RaisesInStep"][0]
GOES_ON = HOSTILE["NeverDone"][0]
KINDS: dict[int, Callable[[], Any]] = {0: Good, 1: FAILS, 2: Good, 3: GOES_ON}


def request(kinds: dict[int, Callable[[], Any]], share: float, **turns: Any) -> RolloutRequest:
    ask = partial(conversations, config(**turns))
    prompts = [carrying(prompt, kinds[prompt.id]) for prompt in PROMPTS]
    return RolloutRequest(prompts, SAMPLING, len(prompts), ask, share)


def test_generate_on_ranks_goes_on_without_dropped_trajectories():
    shown: list[str] = []
    engine = ScriptedEngine(three_then_stop)
    rollout = generate_on_ranks(engine, request(KINDS, 0.5), show=shown.append)
    assert [(s.prompt_id, s.index) for s in rollout.samples] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert rollout.index.groups.tolist() == [0, 0, 2, 2]
    assert rollout.counts["dropped/error"] == rollout.counts["dropped/turns"] == 2
    assert "8 trajectories, 4 of them dropped, 4 of 4 groups" in shown[-1]
    metrics = dropped_metrics(rollout.counts)
    assert metrics["turns/dropped"] == 4 and metrics["turns/dropped/error"] == 2
    assert metrics["turns/mean"] == metrics["turns/max"] == 2


def test_generate_on_ranks_fails_when_too_few_trajectories_are_left():
    engine = ScriptedEngine(three_then_stop)
    with pytest.raises(RuntimeError) as caught:
        generate_on_ranks(engine, request(KINDS, 0.51))
    text = str(caught.value)
    least = "expected at least turns.min_share 0.51 of them; for the others: "
    assert text.startswith(f"generate_on_ranks: 4 of 8 trajectories are left, {least}")
    assert "the environment or the agent raised an error (2)" in text
    assert "the trajectory was not done after turns.max_turns (2)" in text


def over_ranks(group: Any) -> None:
    def take() -> RolloutSamples:
        engine = ScriptedEngine(three_then_stop)
        return generate_on_ranks(
            engine, request(KINDS, 0.5, form="stepwise", merge=False), None, group
        )

    rollout = take()
    alone = generate_on_ranks(
        ScriptedEngine(three_then_stop), request(KINDS, 0.5, form="stepwise", merge=False)
    )
    index = rollout.index
    for name in ("groups", "places", "turns", "seqlens", "rewards"):
        assert getattr(index, name).tolist() == getattr(alone.index, name).tolist()
    skip = ("seconds", "max_waited")
    counts = {k: v for k, v in rollout.counts.items() if k not in skip}
    assert counts == {k: v for k, v in alone.counts.items() if k not in skip}
    mine = [s for i, s in enumerate(alone.samples) if index.owners[i] == group.rank()]
    assert_same(rollout.samples, mine)


def test_generate_on_ranks_counts_trajectories_of_all_ranks():
    run_ranks(over_ranks, 2)


@pytest.mark.parametrize("merge", [True, False])
def test_recorded_trajectories_play_back_and_are_checked(tmp_path: Path, merge: bool):
    live = request(KINDS, 0.5, form="stepwise", merge=merge)
    first = generate_on_ranks(ScriptedEngine(three_then_stop), live)
    save_samples(tmp_path / "step-000000.safetensors", first.samples)
    engine = RecordedEngine(tmp_path, whole=False)
    engine.load_weights((), 0)
    again = generate_on_ranks(engine, replace(live, ask=recorded))
    assert_same(again.samples, first.samples)
    assert [s.spans for s in again.samples] == [s.spans for s in first.samples]
    if merge:
        return
    save_samples(tmp_path / "step-000000.safetensors", first.samples[1:])
    engine = RecordedEngine(tmp_path, whole=False)
    engine.load_weights((), 0)
    with pytest.raises(ValueError, match=r"prompt 0, sample 0\), turn 0: its sample begins with"):
        generate_on_ranks(engine, replace(live, ask=recorded))


def test_a_turn_has_the_budget_of_its_rollout():
    """An evaluation may have a smaller one than training."""
    whole = request(dict.fromkeys(range(4), Good), 1.0)
    short = replace(whole, sampling=replace(SAMPLING, max_new_tokens=2))
    rollout = generate_on_ranks(ScriptedEngine(three_then_stop), short)
    spans = [span for sample in rollout.samples for span in sample.spans]
    assert len(spans) == 16
    assert max(end - begin for begin, end in spans) == 2
