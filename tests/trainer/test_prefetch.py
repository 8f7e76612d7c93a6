"""Prefetch: each microbatch once and one ahead at most; a rank takes only the routes it needs."""

from dataclasses import replace

import pytest
import torch

from benchmarks.end_to_end import positions_of
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.samples import route_dtype
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer import prefetch
from tests.helpers import passes
from tests.helpers.configs import hf_of, write_sizes
from tests.helpers.late_upload import LateUpload
from tests.helpers.tiny import EXPERTS, LAYERS, random_batch, schedule_of, tiny_plan
from tests.parity import batches, compiled

pytestmark = pytest.mark.multiprocess

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_microbatches_come_once_and_one_ahead_at_most():
    plan = tiny_plan()
    batch = random_batch(12)
    schedule = plan_microbatches(batch.seqlens, 1, 64)
    with passes.built(plan) as policy:
        prefetch = passes.prefetch(policy, batch, schedule, replayed=True)
        taken = []
        for _, ready in prefetch.microbatches(0):
            assert ready.routes is not None and ready.routes.layer_ids == LAYERS
            assert not prefetch._ready
            for _ in range(3):
                prefetch.prepare_next()
            assert len(prefetch._ready) == (len(taken) + 1 < len(prefetch))
            taken.append(ready.micro)
    assert len(taken) == len(prefetch) == len(schedule)
    rows = torch.cat([micro.rows for micro in taken])
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(batch.tokens)))
    known = {"tokens": batch.tokens, "targets": batch.targets, "positions": positions_of(batch)}
    for micro in taken:
        real = micro.rows >= 0
        for name, column in known.items():
            field = getattr(micro, name)
            assert torch.equal(field[real], column[micro.rows[real]])
            assert not field[~real].any()


@pytest.mark.parametrize("reported", [False, True])
def test_microbatches_replay_mtp_layers_if_samples_have_their_routes(tmp_path, reported):
    plan = compiled("glm mtp 2", tmp_path)
    batch = batches(plan, mtp_routes=reported)[0]
    with passes.built(plan) as policy:
        prefetch = passes.prefetch(policy, batch, schedule_of([range(8)]), replayed=True, depths=2)
        _, ready = next(prefetch.microbatches(0))
        policy.llm.replay.use(0, ready.routes)
        used = {hook.layer_id: hook.current for hook in policy.llm.replay.hooks[0]}
        policy.llm.replay.use(0, None)
    assert batch.routes is not None
    for layer in (4, 5):
        routes = used[layer]
        if not reported:
            assert routes is None
            continue
        assert routes is not None and routes.use is not None
        from_engine = routes.from_engine
        rows = ready.micro.rows[from_engine]
        slot = batch.layer_ids.index(layer)
        assert len(rows) > 0
        assert torch.equal(routes.ids[from_engine], batch.routes[rows, slot])


@pytest.mark.parametrize("experts", [EXPERTS, 256, 257, 384])
def test_microbatches_without_replay_spread_padding_over_all_experts(tmp_path, experts):
    """A rank without samples computes padding alone, whatever type an expert id needs."""
    small = {"n_routed_experts": experts, "num_hidden_layers": 2, "moe_intermediate_size": 8}
    small["mlp_layer_types"] = ["dense", "sparse"]
    plan = tiny_plan(write_sizes(tmp_path, hf_of() | small))
    batch = replace(random_batch(3), routes=None, layer_ids=())
    with passes.built(plan) as policy:
        schedule = schedule_of([range(3)], [()])
        prefetch = passes.prefetch(policy, batch, schedule, replayed=False)
        routes = [ready.routes for _, ready in prefetch.microbatches(0)]
        (native,), (padding,) = (each.of_layers([1]) for each in routes if each is not None)
        scores = passes.scores(policy, batch, schedule, replay=False)
    assert native is None and padding is not None
    assert padding.ids.dtype == route_dtype(experts)
    assert padding.ids.tolist() == [[0, 1]]
    assert scores.logprobs.isfinite().all()


def test_microbatches_are_computed_after_their_copies_arrived(monkeypatch: pytest.MonkeyPatch):
    """The same bits whether copies are there at once or as late as a GPU may have them."""
    plan = tiny_plan("objective.reduction=sequence")
    batch = random_batch(12)
    schedule = plan_microbatches(batch.seqlens, 1, 64)
    with passes.built(plan) as policy:
        found = []
        for upload in (prefetch.Upload, LateUpload):
            monkeypatch.setattr(prefetch, "Upload", upload)
            scores = passes.scores(policy, batch, schedule)
            weighed = passes.weighed(policy, replace(batch, old_logprobs=scores.logprobs), schedule)
            metrics = policy.accumulate(weighed, build_loss(plan.objective))
            found.append((scores, metrics, dict(policy.gradients())))
    (scores, metrics, gradients), (late_scores, late_metrics, late_gradients) = found
    assert torch.equal(scores.logprobs, late_scores.logprobs) and len(schedule) > 2
    assert scores.agreement == late_scores.agreement and metrics == late_metrics
    assert all(torch.equal(late_gradients[name], x) for name, x in gradients.items())


@needs_gpu
def test_microbatches_never_wait_for_the_device():
    plan = tiny_plan("device=cuda")
    batch = random_batch(12)
    schedule = plan_microbatches(batch.seqlens, 1, 64)
    with passes.built(plan) as policy:
        for _ in range(2):  # the first allocates
            prefetch = passes.prefetch(policy, batch, schedule, replayed=True)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _, ready in prefetch.microbatches(0):
                    policy.llm.replay.use(0, ready.routes)
                    prefetch.prepare_next()
            finally:
                torch.cuda.set_sync_debug_mode("default")
