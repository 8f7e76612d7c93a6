"""Which weights sampled which tokens, through what happens to samples on their way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyrl_ext.rollout.process.server import pack, unpack
from pyrl_ext.rollout.turns.check import check_trajectory
from pyrl_ext.rollout.turns.trajectory import samples_of
from pyrl_ext.rollout.versions import newest, spans_of, with_newest_routes
from pyrl_ext.samples import Sample
from tests.helpers.engines import assert_same, random_sample


def turns_of(*versions: tuple[int, int]) -> list[Sample]:
    """Turns of four tokens each, of which the first three and the last were sampled by these
    versions; an observed token is between two turns."""
    turns = list[Sample]()
    size = 3
    for oldest, last in versions:
        sample = random_sample(0, 0, size + 4, None, oldest)
        at = torch.arange(size + 4)
        mask = at >= size
        spans = ((size, size + 3, oldest), (size + 3, size + 4, last))
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


def test_merged_turns_have_the_passes_of_all():
    turns = [replace(turn, passes=2 + n) for n, turn in enumerate(turns_of((4, 4), (4, 4)))]
    for merge, passes in ((True, [5]), (False, [2, 3])):
        samples, _ = samples_of(turns, merge=merge, routes="first")
        assert [sample.passes for sample in samples] == passes


@pytest.mark.parametrize("merge", [True, False])
def test_masked_rows_are_counted_once(merge: bool):
    """The second turn's weights are newer than the routes of its context, the first turn's; its
    first row, of which merged turns have no route, is not masked there."""
    known = 6
    turns = list[Sample]()
    for turn, masked in zip(turns_of((4, 4), (5, 5)), (0, known), strict=True):
        rows = torch.arange(turn.tokens.numel())
        given = (rows >= max(masked, 1)) & (rows < len(rows) - 1)
        routes = torch.zeros(len(rows), 1, 1, dtype=torch.uint8)
        fields = {"routes": routes, "layer_ids": (1,), "route_mask": given, "masked": masked}
        turns.append(replace(turn, **fields).check())
    samples, _ = samples_of(turns, merge=merge, routes="first")
    assert [sample.masked for sample in samples] == ([0] if merge else [0, known])
    last = with_newest_routes(samples[-1])  # it leaves out all rows before the newest version's
    assert last.masked == known and int((~last.route_mask[:-1]).sum()) == known + merge


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
    other = samples[0].tokens.clone()
    other[0] += 1
    begun = replace(samples[0], tokens=other, last=False)
    check_trajectory([begun, replace(older[1], weight_version=4)])  # conversations side by side
    with pytest.raises(ValueError, match="weight version 3 after 4, expected none lower"):
        check_trajectory([begun, replace(older[1], weight_version=3)])


def test_engines_in_another_process_hand_versions_on():
    (turn,) = turns_of((2, 3))
    assert_same([unpack(pack(turn))], [turn])
