"""The feed: each microbatch once, one ahead at most, and of the routes only what a rank needs."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.dist import topology
from pyrl_ext.dist.upload import Upload
from pyrl_ext.pack.schedule import plan_microbatches
from pyrl_ext.replay.routed_experts import Routes
from pyrl_ext.samples import route_dtype
from pyrl_ext.trainer.policy import Policy
from tests.helpers.tiny import CONFIG, EXPERTS, LAYERS, TOPK, random_batch, random_routes, tiny_plan

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def routes_of(rows, wanted, layer_ids, route_mask, device="cpu"):
    ids = random_routes(len(route_mask), torch.Generator().manual_seed(1))[:, : len(layer_ids)]
    upload = Upload(torch.device(device))
    made = Routes.of(ids, layer_ids, route_mask, torch.tensor(rows), wanted, EXPERTS, upload)
    upload.arrive()
    return ids, made


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 9), min_size=1, max_size=12),
    wanted=st.lists(st.sampled_from(LAYERS), unique=True),
    asked=st.lists(st.integers(0, 4), unique=True),
    missing=st.sets(st.integers(0, 9)),
)
def test_routes_of_a_rank_equal_a_python_loop(device, rows, wanted, asked, missing):
    """Rows in any order, some layers of those reported, tokens without a route, padding."""
    mask = torch.tensor([t not in missing for t in range(10)])
    ids, routes = routes_of(rows, wanted, LAYERS, mask, device)
    padding = [row < 0 for row in rows]
    for layer, forced in zip(asked, routes.of_layers(asked), strict=True):
        known = bool(wanted) and min(wanted) <= layer <= max(wanted)
        if forced is None:
            assert not known and not any(padding)
            continue
        routed = [known and row >= 0 and bool(mask[row]) for row in rows]
        assert forced.routed.tolist() == routed
        in_use = [True] * len(rows) if forced.forced is None else forced.forced.tolist()
        assert in_use == [a or b for a, b in zip(routed, padding, strict=True)]
        real = [True] * len(rows) if forced.real is None else forced.real.tolist()
        assert real == [not each for each in padding]
        for m, row in enumerate(rows):
            if padding[m]:
                assert forced.ids[m].tolist() == [(m * TOPK + j) % EXPERTS for j in range(TOPK)]
            elif routed[m]:
                assert forced.ids[m].tolist() == ids[row, LAYERS.index(layer)].tolist()


def test_only_the_rows_and_layers_of_the_rank_are_taken():
    ids, routes = routes_of([4, 2, -1], [3], LAYERS, torch.ones(10, dtype=torch.bool))
    assert routes.layer_ids == (3,)
    assert routes.ids.dtype == torch.uint8 and routes.ids.shape == (3, 1, TOPK)
    assert routes.ids[:2, 0].tolist() == ids[[4, 2], 2].tolist()


def test_a_layer_without_routes_is_refused():
    with pytest.raises(ValueError, match=r"layers \[5\] have a router but no routes"):
        routes_of([0], [1, 5], LAYERS, torch.ones(10, dtype=torch.bool))


def test_every_microbatch_once_and_one_ahead_at_most():
    plan, batch = tiny_plan(), random_batch(12)
    schedule = plan_microbatches(batch.seqlens, 1, 64)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        feed = policy._feed(batch, schedule, replayed=True)
        taken = []
        for _, ready, routes in feed.of_chunk(0):
            assert len(routes) == len(LAYERS) and not feed._ready
            for _ in range(3):
                feed.prepare_next()
            assert len(feed._ready) == (len(taken) + 1 < len(feed))
            taken.append(ready.micro)
    assert len(taken) == len(feed) == len(schedule[0])
    rows = torch.cat([micro.rows for micro in taken])
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(batch.tokens)))
    for micro in taken:
        real = micro.rows >= 0
        for name in ("tokens", "targets", "positions"):
            field = getattr(micro, name)
            assert torch.equal(field[real], getattr(batch, name)[micro.rows[real]])
            assert not field[~real].any()


@pytest.mark.parametrize("experts", [EXPERTS, 256, 257, 384])
def test_padding_without_replay_is_spread_over_all_experts(tmp_path, experts):
    """A rank without samples computes padding alone, whatever type an expert id needs."""
    hf = json.loads((CONFIG.parent / "tiny" / "config.json").read_text())
    small = {"n_routed_experts": experts, "num_hidden_layers": 2, "moe_intermediate_size": 8}
    small["mlp_layer_types"] = ["dense", "sparse"]
    (tmp_path / "config.json").write_text(json.dumps(hf | small))
    plan, batch = tiny_plan(f"model.config={tmp_path}/config.json"), random_batch(3)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        feed = policy._feed(batch, [[[0, 1, 2], []]], replayed=False)
        (_, _, (native,)), (_, _, (padding,)) = feed.of_chunk(0)
        scores = policy.scores(batch, [[[0, 1, 2], []]], replay=False)
    assert native is None and padding is not None
    assert padding.ids.dtype == route_dtype(experts)
    assert padding.ids.tolist() == [[0, 1]]
    assert scores.logprobs.isfinite().all()


@needs_gpu
def test_setting_a_microbatch_up_never_waits_for_the_device():
    plan, batch = tiny_plan("device=cuda"), random_batch(12)
    schedule = plan_microbatches(batch.seqlens, 1, 64)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        for _ in range(2):  # the first allocates
            feed = policy._feed(batch, schedule, replayed=True)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in feed.of_chunk(0):
                    feed.prepare_next()
            finally:
                torch.cuda.set_sync_debug_mode("default")
