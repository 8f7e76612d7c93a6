"""Kept sets against lists of lists."""

import pytest
import torch

from pyrl_ext.loss.sampling_mask import KeptSets

SETS = [[1, 4, 7], None, [0], [3, 9], None, [2, 5, 6, 8]]


def of(sets: list[list[int] | None]) -> KeptSets:
    counts = [-1 if each is None else len(each) for each in sets]
    ids = [i for each in sets for i in each or ()]
    return KeptSets(torch.tensor(counts, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))


def lists(sets: KeptSets) -> list[list[int] | None]:
    assert sets.counts.dtype == sets.ids.dtype == torch.int32
    found = list[list[int] | None]()
    at = 0
    for count in sets.counts.tolist():
        found.append(None if count < 0 else sets.ids[at : at + count].tolist())
        at += max(0, count)
    assert at == len(sets.ids)
    return found


@pytest.mark.parametrize("rows", [[], [0], [5, 1, 3, 3, -1, 0], [-1, -1], [4]])
def test_select_takes_the_sets_of_rows(rows: list[int]):
    found = of(SETS).select(torch.tensor(rows, dtype=torch.int64))
    assert lists(found) == [None if row < 0 else SETS[row] for row in rows]


def test_select_of_no_sets_has_padding_alone():
    assert lists(KeptSets.joined([]).select(torch.tensor([-1, -1]))) == [None, None]


@pytest.mark.parametrize(("first", "end"), [(0, 10), (0, 5), (5, 10), (3, 4), (10, 20)])
def test_within_leaves_out_other_tokens(first: int, end: int):
    wanted = [None if s is None else [i for i in s if first <= i < end] for s in SETS]
    assert lists(of(SETS).within(first, end)) == wanted


def test_joined_has_the_rows_of_all_parts():
    assert lists(KeptSets.joined([of(SETS[:2]), of([]), of(SETS[2:])])) == SETS
    assert of(SETS).nbytes == 4 * (len(SETS) + 10)


@pytest.mark.parametrize(("first", "columns"), [(0, 10), (0, 5), (5, 5), (8, 4)])
@pytest.mark.parametrize("width", [1, 3, 12])
def test_tile_is_the_mask_of_its_columns(first: int, columns: int, width: int):
    masks = of(SETS).masks(first, columns, torch.device("cpu"))
    for part in (slice(0, 6), slice(2, 4), slice(5, 5)):
        for begin in range(first, first + columns, width):
            count = min(width, first + columns - begin)
            wanted = [
                [s is None or i in s for i in range(begin, begin + count)] for s in SETS[part]
            ]
            assert masks.tile(part, begin, count).tolist() == wanted
