"""`changes_between` and `apply_changes`, compared with a loop over the words of two versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pyrl_ext.rollout.remote.changes import (
    APPLIED,
    CHANGE_BYTES,
    RUN,
    SentBuckets,
    apply_changes,
    changed_words,
    changed_words_native,
    changes_between,
)

SHARES = (0.0, 1e-4, 0.02, 0.4, 0.49, 0.5, 0.6, 1.0)


def sent_words(old: list[int], new: list[int]) -> list[tuple[int, int]]:
    """(place, value) of each word that is sent."""
    sent: list[tuple[int, int]] = []
    for place, (before, after) in enumerate(zip(old, new, strict=True)):
        is_last = place % RUN == RUN - 1 or place == len(new) - 1
        if before != after or is_last:
            sent.append((place, after))
    return sent


def pairs(distances: np.ndarray, values: np.ndarray) -> list[tuple[int, int]]:
    places = (np.cumsum(distances, dtype=np.int64) - 1).tolist()
    return list(zip(places, values.tolist(), strict=True))


def as_bytes(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.astype(np.uint16).view(np.uint8))


@given(
    length=st.integers(0, 40) | st.integers(RUN - 2, RUN + 2) | st.integers(2 * RUN, 2 * RUN + 9),
    share=st.sampled_from(SHARES),
    seed=st.integers(0, 99),
)
@example(length=2, share=0.0, seed=0)  # changes as large as the bytes
def test_changes_are_those_of_a_loop_and_give_the_new_bytes(length: int, share: float, seed: int):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, length)
    new = np.where(rng.random(length) < share, rng.integers(0, 2**16, length), old)
    expected = sent_words(old.tolist(), new.tolist())
    words = old.astype(np.uint16), new.astype(np.uint16)
    for find in (changed_words, changed_words_native):
        for most in (len(expected), len(expected) - 1) if expected else ():
            listed = find(*words, most)
            assert (listed is None) == (most < len(expected))
            if listed is not None:
                assert pairs(*listed) == expected
    found = changes_between(as_bytes(old), as_bytes(new))
    if len(expected) * CHANGE_BYTES >= 2 * length:
        assert found is None
        return
    assert found is not None
    assert pairs(*found.numpy().view(np.uint16).reshape(2, -1)) == expected
    data = as_bytes(old).clone()
    assert apply_changes(data, found)
    assert torch.equal(data, as_bytes(new))


def test_many_changes_are_applied_in_parts():
    old = torch.zeros(2 * 3 * APPLIED, dtype=torch.uint8)
    new = old.clone()
    new[:: 2 * 2] = 7
    found = changes_between(old, new[: len(new)])
    assert found is None  # every second word: as large as the bytes
    new = old.clone()
    new[:: 2 * 2 + 2] = 7
    found = changes_between(old, new)
    assert found is not None and len(found) // CHANGE_BYTES > APPLIED
    assert apply_changes(old, found) and torch.equal(old, new)


@pytest.mark.parametrize("distances", [[5], [1, 4], [0xFFFF, 0xFFFF], [4, 1, 1], [0], [1, 0]])
def test_apply_changes_stays_inside_its_bytes(distances: list[int]):
    around = torch.full((64,), 9, dtype=torch.uint8)
    data = around[16:24]
    changes = as_bytes(np.array(distances + [1] * len(distances)))
    assert not apply_changes(data, changes)
    assert (around[:16] == 9).all() and (around[24:] == 9).all()


def test_SentBuckets_compares_with_what_was_sent_last():
    sent = SentBuckets()
    versions = [torch.full((64,), n, dtype=torch.uint8) for n in range(3)]
    for n, version in enumerate(versions):
        version[8:] = 0
        found = sent.changes(0, version)
        if n == 0:
            assert found is None
        else:
            assert found is not None and found.base == f"digest {n - 1}"
            data = versions[n - 1].clone()
            assert apply_changes(data, found.data) and torch.equal(data, version)
        sent.keep(0, version, f"digest {n}")
        sent.keep(1, version[:32], f"other {n}")
    assert sent.changes(0, versions[2][:32]) is None  # another size
    assert sent.changes(1, versions[2][:32]) is not None
    assert sent.changes(2, versions[2]) is None
    sent.end(1)
    assert sent.changes(1, versions[2][:32]) is None
    versions[2].zero_()  # the trainer's memory, not the copy
    found = sent.changes(0, versions[2])
    assert found is not None and len(found.data) > CHANGE_BYTES
