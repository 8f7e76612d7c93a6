"""RoutedExperts: the rows and layers of a rank, as a plain loop takes them; padding is spread."""

from dataclasses import replace

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
