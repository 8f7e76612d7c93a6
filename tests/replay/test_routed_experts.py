"""RoutedExperts: the rows and layers of a rank, as a plain loop takes them; padding is spread."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.end_to_end import shard_at
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.replay.routed_experts import RoutedExperts
from tests.helpers.tiny import EXPERTS, LAYERS, TOPK, random_batch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
BATCH = random_batch(3, unrouted=0.0)


def routes_of(rows, layers, missing=(), device="cpu"):
    mask = torch.tensor([row not in missing for row in range(len(BATCH.tokens))])
    upload = Upload(torch.device(device))
    batch = replace(BATCH, route_mask=mask)
    shard = shard_at(batch, range(3), RankCoords())
    routes = RoutedExperts.of(shard, torch.tensor(rows), layers, EXPERTS, TOPK, upload)
    upload.arrive()
    return batch, routes


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 9), min_size=1, max_size=12),
    replayed=st.lists(st.sampled_from(LAYERS), unique=True),
    asked=st.lists(st.integers(0, 4), unique=True),
    missing=st.sets(st.integers(0, 9)),
)
def test_of_layers_equals_a_plain_loop(device, rows, replayed, asked, missing):
    """Rows in any order, some layers of those reported, tokens without a route, padding."""
    batch, routes = routes_of(rows, replayed, missing, device)
    padding = [row < 0 for row in rows]
    for layer, found in zip(asked, routes.of_layers(asked), strict=True):
        known = bool(replayed) and min(replayed) <= layer <= max(replayed)
        if found is None:
            assert not known and not any(padding)
            continue
        from_engine = [known and row >= 0 and row not in missing for row in rows]
        assert found.from_engine.tolist() == from_engine
        use = [True] * len(rows) if found.use is None else found.use.tolist()
        assert use == [a or b for a, b in zip(from_engine, padding, strict=True)]
        is_token = [True] * len(rows) if found.is_token is None else found.is_token.tolist()
        assert is_token == [not each for each in padding]
        for m, row in enumerate(rows):
            if padding[m]:
                assert found.ids[m].tolist() == [(m * TOPK + j) % EXPERTS for j in range(TOPK)]
            elif from_engine[m]:
                assert batch.routes is not None
                want = batch.routes[row, LAYERS.index(layer)].tolist()
                assert found.ids[m].tolist() == want


def test_of_takes_only_the_rows_and_layers_of_the_rank():
    batch, routes = routes_of([4, 2, -1], [3])
    assert routes.layer_ids == (3,)
    assert routes.ids.dtype == torch.uint8 and routes.ids.shape == (3, 1, TOPK)
    assert batch.routes is not None
    assert routes.ids[:2, 0].tolist() == batch.routes[[4, 2], 2].tolist()


def test_of_refuses_a_layer_without_routes():
    with pytest.raises(ValueError, match=r"layers \[5\] have a router but no routes"):
        routes_of([0], [1, 5])


# From other trainers' batches ---------------------------------------------------------------------


def padded_batch(seed: int, longest: int = 9, experts: int = 8):
    """Routes [B, S, L, K] of distinct experts, and a mask with padding left, right or between."""
    draw = torch.Generator().manual_seed(seed)
    shape = (int(torch.randint(1, 5, (), generator=draw)), longest, 3)
    routes = torch.rand(*shape, experts, generator=draw).argsort(-1)[..., :2]
    mask = torch.rand(shape[:2], generator=draw) < 0.7
    known = torch.rand(shape[:2], generator=draw) < 0.8
    return routes, mask, known


def zigzag(tokens, cp_size, cp_rank, tp_size, tp_rank):
    """Tokens of a rank, by the definition: chunks r and 2 cp - 1 - r of every padded sequence."""
    local = []
    for sequence in tokens:
        unit = (2 * cp_size if cp_size > 1 else 1) * tp_size
        padded = sequence + [None] * (-len(sequence) % unit)
        if cp_size == 1:
            local += padded
            continue
        chunk = len(padded) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            local += padded[number * chunk : (number + 1) * chunk]
    part = len(local) // tp_size
    return local[tp_rank * part : (tp_rank + 1) * part]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cp=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 1)]),
    tp=st.sampled_from([(1, 0), (2, 0), (2, 1)]),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    kept=st.sampled_from([None, (4,), (2, 7), (7, 2), ()]),
    with_known=st.booleans(),
)
def test_from_padded_and_from_ragged_take_the_rows_and_layers_of_a_rank(
    seed, cp, tp, dtype, kept, with_known
):
    routes, mask, known = padded_batch(seed)
    ids = (2, 4, 7)
    tokens = [[(b, s) for s in range(mask.shape[1]) if mask[b, s]] for b in range(mask.shape[0])]
    local = zigzag(tokens, *cp, *tp)
    place: dict[str, Any] = dict(cp_size=cp[0], cp_rank=cp[1], tp_size=tp[0], tp_rank=tp[1])
    common: dict[str, Any] = dict(num_experts=8, layer_ids=ids, layers=kept, **place)
    padded = RoutedExperts.from_padded(
        routes.to(dtype), mask, known=known if with_known else None, **common
    )
    ragged = RoutedExperts.from_ragged(
        routes.to(dtype)[mask],
        mask.sum(1).tolist(),
        known=known[mask] if with_known else None,
        **common,
    )
    for found in (padded, ragged):
        assert found.ids.dtype == torch.uint8
        for layer in ids if kept is None else kept:
            (got,) = found.of_layers([layer])
            if got is None:
                assert not local
                continue
            for m, token in enumerate(local):
                has_route = token is not None and (not with_known or bool(known[token]))
                assert bool(got.from_engine[m]) == has_route
                assert (got.use is None or bool(got.use[m])) == (token is None or has_route)
                assert (got.is_token is None or bool(got.is_token[m])) == (token is not None)
                if has_route:
                    assert got.ids[m].tolist() == routes[token][ids.index(layer)].tolist()
                elif token is None:
                    assert got.ids[m].tolist() == [(2 * m + j) % 8 for j in range(2)]


def test_from_padded_takes_rows_of_an_input_that_is_not_packed():
    """Megatron's rows are sequence-major; here sequence 0 has one token less, on the left."""
    routes, _, _ = padded_batch(3, longest=3)
    routes = routes[:1].repeat(2, 1, 1, 1).roll(1, 0)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    rows = torch.tensor([1, 3, 2, 4, -1, 5])
    found = RoutedExperts.from_padded(routes, mask, num_experts=8, rows=rows)
    (got,) = found.of_layers([1])
    assert got is not None and got.is_token is not None
    assert got.is_token.tolist() == [True, True, True, True, False, True]
    flat = routes.flatten(0, 1)
    for m, row in enumerate(rows.tolist()):
        if row >= 0:
            assert got.ids[m].tolist() == flat[row, 1].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask \[2, 3\], expected \[B, S, L, K\]"),
        ({"known": torch.ones(2, 3)}, r"known \[2, 3\], expected \[B, S, L, K\], \[B, S\]"),
        ({"layer_ids": [1]}, "1 layer_ids, expected one for each of the 3 layers of routes"),
        ({"layers": [1, 5]}, r"layers \[5\] have a router but no routes"),
        (
            {"num_experts": 4},
            r"routes\[1, 2\], layer 1: experts \[0, 5\] are out of range, expected ids from 0 to 3",
        ),
        ({"num_experts": 4, "layers": [1, 2]}, r"routes\[1, 2\], layer 1: experts \[0, 5\]"),
        (
            {"num_experts": 4, "known": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
            r"routes\[1, 2\], layer 1: experts \[0, 5\]",
        ),
        (
            {"attention_mask": torch.ones(2, 4)},
            r"routes\[0, 3\], layer 0: experts \[2, 2\] repeat, expected 2 distinct ids. "
            "If the token has no route, give known",
        ),
        ({"rows": torch.tensor([8])}, r"rows\[0\] is 8"),
    ],
)
def test_from_padded_refuses(change, message):
    routes = torch.arange(2).expand(2, 4, 3, 2).clone()
    routes[1, 2, 1, 1] = 5
    routes[0, 3] = 2
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    arguments = {"attention_mask": mask, "num_experts": 8} | change
    with pytest.raises((ValueError, IndexError), match=message):
        RoutedExperts.from_padded(routes, **arguments)


def test_from_ragged_refuses():
    routes = torch.tensor([[[0, 1]], [[3, 3]]])
    message = r"routes\[1\], layer 0: experts \[3, 3\] repeat"
    with pytest.raises(ValueError, match=message):
        RoutedExperts.from_ragged(routes, [2], num_experts=8)
    unchecked = RoutedExperts.from_ragged(routes, [2], num_experts=8, check=False)
    assert unchecked.ids[1, 0].tolist() == [3, 3]
    known = torch.tensor([True, False])
    found = RoutedExperts.from_ragged(routes, [2], num_experts=8, known=known)
    assert found.from_engine.tolist() == [True, False]
    aligned = RoutedExperts.from_ragged(routes[:1], [1], num_experts=8, align=8)
    assert aligned.rows.tolist() == [0] + [-1] * 7
    with pytest.raises(ValueError, match=r"expected \[T, L, K\] with T = 3, the sum of seqlens"):
        RoutedExperts.from_ragged(routes, [2, 1], num_experts=8)
    with pytest.raises(ValueError, match=r"known \[1\], expected \[2\], one a token"):
        RoutedExperts.from_ragged(routes, [2], num_experts=8, known=known[:1])
