"""Samples of a trajectory that do not fit together are refused, naming trajectory and turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from pyrl_ext.rollout.turns.check import check_trajectories, check_trajectory
from pyrl_ext.samples import Sample
from tests.helpers.conversations import hold, trained
from tests.helpers.environments import Good


def parts(form: str = "stepwise") -> list[Sample]:
    found, _ = hold(partial(Good, 3), prompts=1, size=1, form=form, merge=False)
    return list(trained(found[0, 0]))


Change = Callable[[list[Sample]], list[Sample]]
WHERE = r"trajectory \(prompt 0, sample 0\), turn {}: .*{}.*, expected "
BROKEN: dict[str, tuple[Change, int, str]] = {
    "first turn missing": (lambda s: s[1:], 0, "begins with turn 1"),
    "turn missing": (lambda s: [s[0], s[2]], 1, "begins with turn 2"),
    "last turn missing": (lambda s: s[:2], 1, "last False at sample 1 of 2"),
    "turn twice": (lambda s: [s[0], s[0], *s[1:]], 1, "begins with turn 0"),
    "last marked early": (lambda s: [s[0], replace(s[1], last=True), s[2]], 1, "last True"),
    "last not marked": (lambda s: [*s[:2], replace(s[2], last=False)], 2, "last False"),
    "no spans": (lambda s: [s[0], replace(s[1], spans=()), s[2]], 1, "no spans"),
    "version falls": (lambda s: [replace(s[0], weight_version=1), *s[1:]], 1, "version 0 after 1"),
    "reward differs": (lambda s: [s[0], replace(s[1], reward=9.0), s[2]], 1, "reward 9.0"),
    "end differs": (lambda s: [*s[:2], replace(s[2], finish_reason="length")], 2, "length"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_trajectory_refuses(name: str):
    change, turn, found = BROKEN[name]
    samples = parts()
    check_trajectory(samples)
    with pytest.raises(ValueError, match=WHERE.format(turn, found)):
        check_trajectory(change(samples))


def test_check_trajectory_refuses_log_probs_and_loss_of_observed_tokens():
    (sample,) = parts("concatenated")
    check_trajectory([sample])
    observed = sample.spans[0][1]
    logprobs = sample.rollout_logprobs.clone()
    logprobs[observed] = -1.0
    with pytest.raises(ValueError, match=f"token {observed} has log-prob -1.0, expected 0"):
        check_trajectory([replace(sample, rollout_logprobs=logprobs)])
    mask = torch.ones_like(sample.loss_mask)
    mask[: sample.prompt_len] = False
    with pytest.raises(ValueError, match=f"token {observed} has loss_mask True, expected False on"):
        check_trajectory([replace(sample, loss_mask=mask)])
    spans = ((sample.spans[0][0], sample.spans[1][0] + 1), *sample.spans[1:])
    with pytest.raises(ValueError, match="turn 1 sampled tokens"):
        check_trajectory([replace(sample, spans=spans)])


def test_check_trajectories_takes_samples_of_several_in_any_order_of_trajectories():
    found, _ = hold(partial(Good, 3), prompts=2, size=2, form="stepwise", merge=False)
    samples = [s for c in found.values() for s in trained(c)]
    check_trajectories(sorted(samples, key=lambda s: s.turn))
    with pytest.raises(ValueError, match=r"prompt 1, sample 1\), turn 1"):
        check_trajectories(s for s in samples if (s.prompt_id, s.index, s.turn) != (1, 1, 1))
