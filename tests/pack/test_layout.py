"""TokenLayout against an oracle of Python loops, written from the definition of the zigzag."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import gather_rows
from pyrl_ext.pack.layout import TokenLayout

layouts = st.builds(
    TokenLayout,
    seqlens=st.lists(st.integers(0, 40), max_size=5).map(tuple),
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    tp_size=st.sampled_from([1, 2, 4]),
    align=st.sampled_from([1, 2, 6, 16]),
)


class Oracle:
    """Every rank's list of (sequence, position), position >= length being padding."""

    def __init__(self, layout):
        cp = layout.cp_size
        tp = layout.tp_size
        self.padded = []
        for n in layout.seqlens:
            while n % (tp if cp == 1 else 2 * cp * tp) or n % layout.align:
                n += 1
            self.padded.append(n)
        self.packed = [(s, p) for s, n in enumerate(self.padded) for p in range(n)]
        self.local = []
        for rank in range(cp):
            held = []
            for s, n in enumerate(self.padded):
                chunk = n // (2 * cp)
                mine = list(range(rank * chunk, (rank + 1) * chunk))
                mine += list(range((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk))
                held += [(s, p) for p in (range(n) if cp == 1 else mine)]
            self.local.append(held)
        self.gathered = [token for held in self.local for token in held]
        real = [(s, p) for s, n in enumerate(layout.seqlens) for p in range(n)]
        self.ragged = {token: row for row, token in enumerate(real)}


@settings(max_examples=150, deadline=None)
@given(layouts)
def test_rows_and_global_order_equal_the_oracle(layout):
    oracle = Oracle(layout)
    assert list(layout.padded_seqlens) == oracle.padded
    assert layout.num_local == len(oracle.packed) // layout.cp_size
    for rank, held in enumerate(oracle.local):
        assert layout.rows(rank).tolist() == [oracle.ragged.get(token, -1) for token in held]
        parts = [layout.shard(layout.rows(rank), tp_rank) for tp_rank in range(layout.tp_size)]
        assert torch.equal(torch.cat(parts), layout.rows(rank))
        assert len({len(part) for part in parts}) == 1
    for rank, held in enumerate(oracle.local):
        real = [token in oracle.ragged for token in held]
        positions = [p if ok else -1 for (_, p), ok in zip(held, real, strict=True)]
        assert layout.positions(rank).tolist() == positions
        following = [oracle.ragged.get((s, p + 1), -1) for s, p in held]
        assert layout.following(rank).tolist() == following
    at = {token: row for row, token in enumerate(oracle.gathered)}
    assert layout.gathered_rows.tolist() == [at[token] for token in oracle.ragged]
    assert layout.global_order().tolist() == [at[token] for token in oracle.packed]


@settings(max_examples=100, deadline=None)
@given(layouts)
def test_segments_are_causal_attention(layout):
    oracle = Oracle(layout)
    for rank, held in enumerate(oracle.local):
        segments = layout.segments(rank)
        covered = []
        for q_start, q_len, k_start, k_len in segments:
            assert 0 < q_len <= k_len
            covered += range(q_start, q_start + q_len)
            for i in range(q_len):
                s, p = held[q_start + i]
                seen = oracle.packed[k_start : k_start + k_len - q_len + i + 1]
                assert seen == [(s, earlier) for earlier in range(p + 1)]
        assert covered == list(range(len(held)))
        per_sequence = 1 if layout.cp_size == 1 else 2
        assert len(segments) == per_sequence * sum(n > 0 for n in oracle.padded)


@settings(max_examples=50, deadline=None)
@given(layouts)
def test_global_order_packs_what_the_ranks_hold(layout):
    tokens = torch.arange(sum(layout.seqlens)) + 100
    pad = torch.tensor(-1)
    gathered = torch.cat([gather_rows(tokens, layout.rows(r), pad) for r in range(layout.cp_size)])
    packed = gather_rows(gathered, layout.global_order(), pad)
    want = [
        F.pad(sequence, (0, padded - len(sequence)), value=-1)
        for sequence, padded in zip(
            tokens.split(layout.seqlens), layout.padded_seqlens, strict=True
        )
    ]
    assert torch.equal(packed, torch.cat(want) if want else packed[:0])


@settings(max_examples=80, deadline=None)
@given(layouts, st.data())
def test_rows_begin_where_the_source_says(layout, data):
    """Sequences anywhere in the source stream; one that begins at -1 is padding alone."""
    starts = tuple(data.draw(st.integers(-1, 99)) for _ in layout.seqlens)
    moved = dataclasses.replace(layout, starts=starts)
    for rank, held in enumerate(Oracle(layout).local):
        want = [starts[s] + p if p < layout.seqlens[s] and starts[s] >= 0 else -1 for s, p in held]
        assert moved.rows(rank).tolist() == want
        positions = [p if row >= 0 else -1 for row, (_, p) in zip(want, held, strict=True)]
        assert moved.positions(rank).tolist() == positions
        lengths = [layout.seqlens[s] for s, _ in held]
        ends = [p + 1 == n for p, n in zip(positions, lengths, strict=True)]
        next_rows = [-1 if row < 0 or end else row + 1 for row, end in zip(want, ends, strict=True)]
        assert moved.following(rank).tolist() == next_rows


def test_rows_and_segments_of_a_zigzag_by_hand():
    layout = TokenLayout((7, 3, 0), cp_size=2)
    assert layout.padded_seqlens == (8, 4, 0)
    assert layout.rows(0).tolist() == [0, 1, 6, -1, 7, -1]
    assert layout.rows(1).tolist() == [2, 3, 4, 5, 8, 9]
    assert layout.segments(0) == ((0, 2, 0, 2), (2, 2, 0, 8), (4, 1, 8, 1), (5, 1, 8, 4))


@pytest.mark.parametrize(
    ("layout", "padded"),
    [
        (TokenLayout((1, 8, 9), tp_size=8), (8, 8, 16)),
        (TokenLayout((1, 8, 9), cp_size=2), (4, 8, 12)),
        (TokenLayout((1, 8, 9), cp_size=2, tp_size=2), (8, 8, 16)),
        (TokenLayout((1, 33), cp_size=2, align=32), (32, 64)),
        (TokenLayout((1,), cp_size=3, align=4), (12,)),
    ],
)
def test_padded_seqlens_are_aligned(layout, padded):
    assert layout.padded_seqlens == padded


def test_rows_of_no_sequences():
    for cp_size in (1, 2):
        layout = TokenLayout((), cp_size)
        assert layout.rows(0).tolist() == layout.global_order().tolist() == []
        assert layout.segments(0) == () and layout.max_padded_seqlen == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenLayout((3, -1)), "seqlens[1] is -1, expected >= 0"),
        (lambda: TokenLayout((3,), cp_size=0), "cp_size is 0, expected >= 1"),
        (lambda: TokenLayout((3,), starts=(0, 1)), "starts has 2 entries"),
        (lambda: TokenLayout((3, 2), starts=(0, -2)), "starts[1] is -2, expected >= -1"),
        (lambda: TokenLayout((3,), cp_size=2).rows(2), "cp_rank is 2, expected one in [0, 2)"),
        (
            lambda: TokenLayout((3,)).shard(torch.zeros(3), 1),
            "tp_rank is 1, expected one in [0, 1)",
        ),
    ],
)
def test_layout_refuses_wrong_arguments(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
