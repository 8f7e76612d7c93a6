"""TokenLayout against an oracle of Python loops, written from the definition of the zigzag."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import gather_rows
from pyrl_ext.pack.layout import TokenLayout

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

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
        cp, tp = layout.cp_size, layout.tp_size
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
def test_every_index_equals_the_oracle(layout):
    oracle = Oracle(layout)
    assert list(layout.padded_seqlens) == oracle.padded
    assert layout.num_tokens == len(oracle.ragged)
    assert layout.num_local == len(oracle.packed) // layout.cp_size
    for rank, held in enumerate(oracle.local):
        assert layout.rows(rank).tolist() == [oracle.ragged.get(token, -1) for token in held]
        assert layout.positions(rank).tolist() == [p for _, p in held]
        parts = [layout.rows(rank, tp_rank) for tp_rank in range(layout.tp_size)]
        assert torch.equal(torch.cat(parts), layout.rows(rank))
        assert len({len(part) for part in parts}) == 1
    at = {token: row for row, token in enumerate(oracle.gathered)}
    assert layout.inverse().tolist() == [at[token] for token in oracle.ragged]
    assert layout.global_order().tolist() == [at[token] for token in oracle.packed]
    assert layout.gathered_rows().tolist() == [oracle.ragged.get(t, -1) for t in oracle.gathered]
    for rank, held in enumerate(oracle.local):
        at = {token: row for row, token in enumerate(held)}
        assert layout.inverse_rows(rank).tolist() == [at.get(token, -1) for token in oracle.ragged]


@settings(max_examples=100, deadline=None)
@given(layouts, st.integers(0, 20))
def test_capacity_only_adds_a_tail(layout, spare):
    capacity = layout.num_local + spare * layout.tp_size
    for rank in range(layout.cp_size):
        for short, long in (
            (layout.rows(rank), layout.rows(rank, capacity=capacity)),
            (layout.positions(rank), layout.positions(rank, capacity=capacity)),
        ):
            assert long.shape == (capacity,) and torch.equal(long[: len(short)], short)
            assert (long[len(short) :] == -1).all()
        parts = [layout.rows(rank, part, capacity) for part in range(layout.tp_size)]
        assert torch.equal(torch.cat(parts), layout.rows(rank, capacity=capacity))
    for padded in (False, True):
        ends = layout.cu_seqlens(padded).tolist()
        longer = layout.cu_seqlens(padded, capacity=len(layout.seqlens) + spare)
        assert longer.tolist() == ends + ends[-1:] * spare and longer.dtype == torch.int32


def in_fixed_shapes(tokens, hidden, rows, cu_seqlens):
    """Work that a CUDA graph can hold: two gathers, and the sequence each row belongs to."""
    of_row = torch.searchsorted(cu_seqlens, rows.int(), right=True)
    return (
        gather_rows(tokens, rows, tokens.new_full((), -9)),
        gather_rows(hidden, rows, hidden.new_zeros(hidden.shape[1:])),
        of_row.masked_fill(rows < 0, 0),
    )


BATCHES = [TokenLayout(n, cp_size=2) for n in [(7, 3, 20), (31,), (1, 1, 1, 1, 9), (), (0, 16)]]


def fixed_arguments(layout, device):
    rows, ends = layout.rows(1, capacity=24), layout.cu_seqlens(False, capacity=6)
    return rows.to(device), ends.to(device)


def test_fixed_shapes_compute_what_the_batch_needs():
    tokens, hidden = torch.arange(40), torch.randn(40, 12)
    for layout in BATCHES:
        found = in_fixed_shapes(tokens, hidden, *fixed_arguments(layout, "cpu"))
        wanted = in_fixed_shapes(tokens, hidden, layout.rows(1), layout.cu_seqlens(False))
        for got, want, fill in zip(found, wanted, (-9, 0, 0), strict=True):
            assert torch.equal(got[: layout.num_local], want)
            assert (got[layout.num_local :] == fill).all()


@needs_gpu
def test_one_cuda_graph_serves_every_batch():
    tokens, hidden = torch.arange(40).cuda(), torch.randn(40, 12).cuda()
    rows, ends = fixed_arguments(BATCHES[0], "cuda")
    in_fixed_shapes(tokens, hidden, rows, ends)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = in_fixed_shapes(tokens, hidden, rows, ends)
    for layout in BATCHES[1:] + BATCHES[:1]:
        others = fixed_arguments(layout, "cuda")
        rows.copy_(others[0])
        ends.copy_(others[1])
        graph.replay()
        for got, want in zip(found, in_fixed_shapes(tokens, hidden, *others), strict=True):
            assert torch.equal(got, want)


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
def test_shard_then_gather_is_the_identity(layout):
    tokens = torch.arange(layout.num_tokens) + 100
    pad = torch.tensor(-1)
    shards = [gather_rows(tokens, layout.rows(r), pad) for r in range(layout.cp_size)]
    gathered = torch.cat(shards)
    assert torch.equal(gather_rows(gathered, layout.inverse(), pad), tokens)
    assert torch.equal(gather_rows(tokens, layout.gathered_rows(), pad), gathered)
    merged = torch.stack(
        [gather_rows(shard, layout.inverse_rows(r), pad) for r, shard in enumerate(shards)]
    )
    assert (merged >= 0).sum(0).tolist() == [1] * layout.num_tokens
    if layout.num_tokens:
        assert torch.equal(merged.amax(0), tokens)
    packed = gather_rows(gathered, layout.global_order(), pad)
    starts = layout.cu_seqlens(padded=True).tolist()
    ragged = layout.cu_seqlens(padded=False).tolist()
    for s, n in enumerate(layout.seqlens):
        sequence = packed[starts[s] : starts[s + 1]]
        assert torch.equal(sequence[:n], tokens[ragged[s] : ragged[s + 1]])
        assert (sequence[n:] == -1).all()


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    offsets=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    cp_size=st.sampled_from([1, 2, 4]),
)
def test_padded_input_gives_the_rows_of_ragged_input(lengths, offsets, cp_size):
    """Left, right or both-sided padding: the real tokens come out as from a ragged stream."""
    mask = torch.zeros(len(lengths), 18, dtype=torch.bool)
    for row, (n, offset) in enumerate(zip(lengths, offsets, strict=False)):
        mask[row, offset : offset + n] = True
    padded = torch.where(mask, torch.arange(mask.numel()).view_as(mask), -5)
    layout = TokenLayout.from_mask(mask, cp_size)
    ragged = TokenLayout(tuple(lengths), cp_size)
    assert layout.seqlens == ragged.seqlens
    for rank in range(cp_size):
        ours = gather_rows(padded.flatten(), layout.rows(rank), torch.tensor(-1))
        theirs = gather_rows(padded[mask], ragged.rows(rank), torch.tensor(-1))
        assert torch.equal(ours, theirs)


def test_a_zigzag_by_hand():
    layout = TokenLayout((7, 3, 0), cp_size=2)
    assert layout.padded_seqlens == (8, 4, 0)
    assert layout.rows(0).tolist() == [0, 1, 6, -1, 7, -1]
    assert layout.rows(1).tolist() == [2, 3, 4, 5, 8, 9]
    assert layout.positions(0).tolist() == [0, 1, 6, 7, 0, 3]
    assert layout.segments(0) == ((0, 2, 0, 2), (2, 2, 0, 8), (4, 1, 8, 1), (5, 1, 8, 4))
    assert layout.cu_seqlens(padded=True).tolist() == [0, 8, 12, 12]
    assert layout.cu_seqlens(padded=True).dtype == torch.int32


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
def test_alignment(layout, padded):
    assert layout.padded_seqlens == padded


def test_no_sequences():
    for cp_size in (1, 2):
        layout = TokenLayout((), cp_size)
        assert layout.rows(0).tolist() == layout.inverse().tolist() == []
        assert layout.cu_seqlens(padded=True).tolist() == [0]
        assert layout.segments(0) == () and layout.max_padded_seqlen == 0


def test_values_are_kept_and_the_layout_compares_and_pickles():
    layout = TokenLayout((5, 6), cp_size=2)
    assert layout.rows(1) is layout.rows(1)
    assert layout == TokenLayout((5, 6), cp_size=2) and hash(layout) == hash(layout)
    assert torch.equal(pickle.loads(pickle.dumps(layout)).rows(1), layout.rows(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.cp_size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenLayout((3, -1)), "seqlens[1] is -1, expected >= 0"),
        (lambda: TokenLayout((3,), cp_size=0), "cp_size is 0, expected >= 1"),
        (lambda: TokenLayout((3,), starts=(0, 1)), "starts has 2 entries"),
        (lambda: TokenLayout((3, 2), starts=(0, -1)), "starts[1] is -1, expected >= 0"),
        (
            lambda: TokenLayout((3, 5)).rows(0, capacity=7),
            "TokenLayout.rows: 8 rows, expected at most the capacity of 7. Raise the capacity",
        ),
        (lambda: TokenLayout((3,)).positions(0, capacity=2), "TokenLayout.positions: 3 rows"),
        (lambda: TokenLayout((3, 5)).cu_seqlens(True, capacity=1), "cu_seqlens: 2 sequences"),
        (
            lambda: TokenLayout((3,), tp_size=2).rows(0, 1, capacity=5),
            "capacity is 5, expected a multiple of tp_size 2",
        ),
        (lambda: TokenLayout((3,), cp_size=2).inverse_rows(2), "cp_rank is 2"),
        (lambda: TokenLayout((3,), cp_size=2).rows(2), "cp_rank is 2, expected one in [0, 2)"),
        (lambda: TokenLayout((3,)).rows(0, 1), "tp_rank is 1, expected one in [0, 1)"),
        (lambda: TokenLayout((2**31,)).cu_seqlens(False), "2147483648 rows"),
        (
            lambda: TokenLayout.from_mask(torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()),
            "row 1 has 2 runs of real tokens, expected one",
        ),
        (lambda: TokenLayout.from_mask(torch.ones(2, 2)), "mask is torch.float32 [2, 2]"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
