"""Which weights sampled which tokens, through what happens to samples on their way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyrl_ext.rollout.process.server import pack, unpack
from pyrl_ext.rollout.turns.check import check_trajectory
from pyrl_ext.rollout.turns.trajectory import samples_of
from pyrl_ext.rollout.versions import newest, spans_of
from pyrl_ext.samples import Sample
from tests.helpers.engines import assert_same, random_sample


def turns_of(*versions: tuple[int, int]) -> list[Sample]:
    """Turns of four tokens each, of which the first three and the last were sampled by these
    versions; an observed token is between two turns."""
    turns, size = list[Sample](), 3
    for oldest, last in versions:
        sample, at = random_sample(0, 0, size + 4, None, oldest), torch.arange(size + 4)
        mask, spans = at >= size, ((size, size + 3, oldest), (size + 3, size + 4, last))
        logprobs = torch.where(mask, -1.0, 0.0)
        turn = replace(sample, prompt_len=size, loss_mask=mask, rollout_logprobs=logprobs)
        turns.append(replace(turn, version_spans=spans if oldest < last else ()).check())
        size += 5
    return turns


def test_merged_turns_keep_the_version_of_every_token():
    (sample,), _ = samples_of(turns_of((4, 4), (4, 6), (7, 7)), merge=True, routes="first")
    check_trajectory([sample])
    expected = ((3, 7, 4), (8, 11, 4), (11, 12, 6), (13, 17, 7))
    assert sample.version_spans == spans_of(sample) == expected
    assert sample.weight_version == 4 and newest(sample) == 7
    assert sample.versions.tolist() == [4] * 11 + [6] + [4] + [7] * 4  # observed: the oldest


def test_turns_of_one_version_have_no_spans_of_it():
    (sample,), _ = samples_of(turns_of((5, 5), (5, 5)), merge=True, routes="first")
    assert sample.version_spans == () and sample.weight_version == 5
    assert spans_of(sample) == ((3, 7, 5), (8, 12, 5))


def test_check_trajectory_knows_the_newest_version_of_a_sample():
    turns = turns_of((4, 6), (6, 6))
    samples, _ = samples_of(turns, merge=False, routes="first")
    check_trajectory(samples)
    older = [samples[0], replace(samples[1], weight_version=5, version_spans=())]
    with pytest.raises(ValueError, match="weight version 5 after 6, expected none lower"):
        check_trajectory(older)


def test_engines_in_another_process_hand_versions_on():
    (turn,) = turns_of((2, 3))
    assert_same([unpack(pack(turn))], [turn])
