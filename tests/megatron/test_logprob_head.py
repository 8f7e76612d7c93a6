"""The trainer's log-probs from hidden states and LM head equal those from logits."""

import json
import os
from dataclasses import replace
from functools import cache
from math import isfinite

import pytest
import torch

from benchmarks.end_to_end import microbatch
from pyrl_ext.loss.fused_head import chunking
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.ddp import unwrap
from pyrl_ext.models.hf_folder import save_safetensors
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.model import units
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy
from tests import parity
from tests.helpers import passes
from tests.helpers.configs import hf_of
from tests.helpers.probe import local_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch, tiny_plan
from tests.parity import BOUNDS, apart, compiled

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

OVERLAPPED = ("optimizer.distributed=true", "optimizer.overlap_grad_reduce=true")
LOGITS = "logprob.head=logits"
ROUNDED = (LOGITS, "logprob.accept_rounded_logits=true")
CHUNKS = "logprob.chunk_bytes=8192"  # 8 tokens of the tiny vocabulary, 16 at tp 2
CACHE = "logprob.cache_bytes=20000"  # some of them, in bfloat16
INSIDE = "logprob.loss_in_chunk=true"
RUNS = {
    1: [
        ("glm mtp", (CHUNKS,)),
        ("glm mtp 2", (CHUNKS, CACHE)),
        ("tied", (CHUNKS,)),
        ("tied", ("model.recompute=full",)),
        ("glm mtp 2", (CHUNKS, INSIDE)),
        ("glm mtp kept", (CHUNKS, CACHE)),
        ("glm mtp kept", (CHUNKS, INSIDE)),
    ],
    2: [
        ("glm mtp 2", (CHUNKS, "parallel.tp=2")),
        ("tied", (CHUNKS, "parallel.tp=2")),
        ("tied", (CHUNKS, CACHE, "parallel.tp=2")),
        ("glm mtp", (CHUNKS, "parallel.pp=2")),
        ("qwen", ("parallel.pp=2", "parallel.vpp=2")),
        ("qwen", (CHUNKS, INSIDE, "parallel.pp=2", "parallel.vpp=2")),  # one is padding alone
        ("tied", (CHUNKS, INSIDE, "parallel.tp=2")),
        ("glm mtp kept", (CHUNKS, INSIDE, "parallel.tp=2")),
        ("glm mtp 2", ("parallel.dp=2", *OVERLAPPED)),
    ],
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def plan_of(model, folder, *overrides):
    if model != "tied":
        return compiled(model, folder, overrides)
    path = folder / "tied" / "config.json"
    path.parent.mkdir(exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(hf_of("tiny_qwen3") | {"tie_word_embeddings": True}))
    written.rename(path)
    config = f"model.config={path}"
    return compile_plan(parity.CONFIGS / "tiny_qwen3.yaml", (config, *parity.COMMON, *overrides))


def one_pass(plan):
    """(scores, metrics, gradients) of one minibatch in several microbatches."""
    with passes.built(plan) as policy:
        batch = parity.batches(plan, mtp_routes=False)[0]
        schedule = plan_microbatches(
            batch.seqlens,
            policy.topo.dp_size,
            128 // policy.topo.cp_size,
            plan.row_alignment,
            policy.topo.cp_size,
        )
        scores = passes.scores(policy, batch, schedule)
        batch = replace(batch, old_logprobs=scores.logprobs)
        metrics = passes.accumulate(policy, batch, schedule, build_loss(plan.objective))
        return scores, metrics, {n: t.clone() for n, t in policy.gradients()}


def compared(group, folder):
    """The worst deviations of the fused head from logits, for every run."""
    found = []
    from_logits = cache(lambda model, *layout: one_pass(plan_of(model, folder, *layout, LOGITS)))
    for model, overrides in RUNS[group.size()]:
        scores, metrics, grads = one_pass(plan_of(model, folder, *overrides))
        logits = from_logits(model, *(o for o in overrides if "logprob" not in o))
        found.append(
            {
                "run": (model, overrides),
                "logprobs": float((scores.logprobs - logits[0].logprobs).abs().max()),
                "entropy": float((scores.entropy - logits[0].entropy).abs().max()),
                "metrics": max(abs(metrics[n] - logits[1][n]) for n in metrics | logits[1]),
                "grads": {n: apart(grads[n], logits[2][n]) for n in grads | logits[2]},
            }
        )
    return found


@pytest.mark.parametrize("world_size", RUNS)
def test_score_tokens_equals_scores_from_logits(tmp_path, world_size):
    for off in run_ranks(compared, world_size, tmp_path)[0]:
        model, overrides = off["run"]
        assert max(off["logprobs"], off["entropy"], off["metrics"]) < 1e-6, off
        bound = 1e-3 if CACHE in overrides else BOUNDS["grad"]  # logits kept in bfloat16: 2^-9
        assert max(off["grads"].values()) < bound, off
        assert ("lm_head.weight" in off["grads"]) == (model != "tied")


def test_score_tokens_takes_logprobs_over_sampling_mask_but_those_of_mtp(folder):
    """Row by row from the logits, in float64; MTP layers have the loss that they have without."""
    plan = compiled("glm mtp kept", folder, (LOGITS, "rollout.temperature=0.7"))
    logits = []
    batch = parity.batches(plan, mtp_routes=False)[0]
    assert batch.kept is not None and (batch.kept.counts < 0).any()
    with passes.built(plan) as policy:
        layer = unwrap(policy.llm.chunks[0]).get_submodule("output_layer")
        layer.register_forward_hook(
            lambda _m, _i, out: logits.append(out[0].flatten(0, 1).double())
        )
        schedule = plan_microbatches(batch.seqlens, 1, 1 << 20)
        scores = passes.scores(policy, batch, schedule)
    layout = microbatch(batch, schedule.microbatches[0][0].samples, RankCoords())
    row_of = {int(row): at for at, row in enumerate(layout.rows) if row >= 0}
    sets = batch.kept.ids.split(batch.kept.counts.clamp(min=0).tolist())
    for row, (ids, target) in enumerate(zip(sets, batch.targets.tolist(), strict=True)):
        kept = ids.tolist() or list(range(plan.sizes.vocab_size))
        log_p = (logits[0][row_of[row], kept] / 0.7).log_softmax(-1)
        assert scores.logprobs[row] == pytest.approx(float(log_p[kept.index(target)]), abs=1e-6)
        assert scores.entropy[row] == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-6)
    with_sets, without = (
        one_pass(compiled(model, folder, (CHUNKS,)))[1] for model in ("glm mtp kept", "glm mtp")
    )
    assert with_sets["mtp_loss"] == without["mtp_loss"]
    assert abs(with_sets["policy/entropy"] - without["policy/entropy"]) > 1


def test_score_tokens_in_bfloat16_errs_no_more_than_rounded_logits(tmp_path):
    """Against float32 weights of the same values; the routers follow the same routes."""
    weights = tmp_path / "weights"
    with topology.start(plan := tiny_plan("model.dtype=bfloat16")) as topo:
        save_safetensors(weights, Policy.build(plan, topo).weights(), plan.hf)
    same = (f"model.weights={weights}", CHUNKS)
    exact = one_pass(tiny_plan(*same))
    fused = one_pass(tiny_plan(*same, "model.dtype=bfloat16"))
    logits = one_pass(tiny_plan(*same, "model.dtype=bfloat16", *ROUNDED))

    def off(got):
        return (
            float((got[0].logprobs - exact[0].logprobs).norm()),
            apart(got[2]["lm_head.weight"], exact[2]["lm_head.weight"]),
        )

    assert all(a <= 1.1 * b for a, b in zip(off(fused), off(logits), strict=True))


@pytest.mark.parametrize("head", ["fused", "logits"])
def test_score_tokens_with_the_fused_head_runs_no_output_layer(folder, head):
    """The output layer never runs with the fused head, whose loss sees loss tokens alone."""
    plan = tiny_plan(f"logprob.head={head}")
    layer_runs = []
    left_out = []
    grpo = build_loss(plan.objective)

    def loss(logprobs, entropy, inputs):
        assert torch.equal(logprobs.isnan(), entropy.isnan())
        left_out.append((logprobs.isnan(), ~inputs.loss_mask))
        return grpo(logprobs, entropy, inputs)

    with passes.built(plan) as policy:
        batch = random_batch()
        layer = unwrap(policy.llm.chunks[0]).get_submodule("output_layer")
        layer.register_forward_hook(lambda *_: layer_runs.append(1))
        schedule = plan_microbatches(batch.seqlens, 1, 64)
        scores = passes.scores(policy, batch, schedule)
        assert scores.logprobs.isfinite().all() and scores.entropy.isfinite().all()
        metrics = passes.accumulate(policy, batch, schedule, loss)
    assert all(isfinite(value) for value in metrics.values())
    assert len(left_out) == len(schedule) > 1
    assert len(layer_runs) == (0 if head == "fused" else 2 * len(left_out))
    for nan, masked in left_out:
        assert torch.equal(nan, masked) if head == "fused" else not nan.any()


def reinforce(logprobs, entropy, inputs):
    """A token-wise loss as a user writes it; rows without a loss token may be NaN."""
    mask = inputs.loss_mask
    each = -(logprobs - inputs.old_logprobs).exp() * inputs.advantages - 0.01 * entropy
    each = torch.where(mask, each, 0)
    count = mask.sum()
    return each.sum(), count, {"mine": (logprobs.detach().where(mask, 0).sum(), count)}


def test_accumulate_has_the_same_update_by_a_token_wise_loss_of_the_user(folder):
    """With all rows, with loss tokens alone, and inside the chunks."""
    mine = (CHUNKS, "objective.loss=tests.megatron.test_logprob_head:reinforce")
    token_wise = "objective.loss_is_token_wise=true"
    plain, *others = (
        one_pass(plan_of("glm mtp 2", folder, *mine, *overrides))
        for overrides in ((), (token_wise,), (token_wise, INSIDE))
    )
    assert plain[1]["mine"] < 0 and plain[2]["lm_head.weight"].count_nonzero() > 0
    for _, metrics, grads in others:
        assert metrics == pytest.approx(plain[1], rel=1e-5, abs=1e-6)
        assert max(apart(grads[n], plain[2][n]) for n in grads | plain[2]) < BOUNDS["grad"]


def test_Microbatch_has_the_loss_rows_of_a_plain_loop(folder):
    plan = compiled("glm mtp 2", folder)
    batch = parity.batches(plan, mtp_routes=False)[0]
    ids = [3, 0, 7, 2]
    for cp_size, cp_rank in [(1, 0), (2, 0), (2, 1)]:
        place = RankCoords(cp_size, cp_rank)
        micro = microbatch(batch, ids, place, depths=2)
        rows = local_rows(batch, ids, place)
        sample = [i for i, n in enumerate(batch.seqlens) for _ in range(n)]
        for depth in range(3):
            want = [
                m
                for m, row in enumerate(rows)
                if row >= 0
                and row + depth < len(sample)
                and sample[row + depth] == sample[row]
                and batch.loss_mask[row + depth]
            ]
            assert micro.loss_rows[depth].tolist() == want
    assert microbatch(batch, (), place).loss_rows[0].tolist() == []


def test_chunks_of_the_plan_are_those_of_the_head():
    assert units.CHUNK_BYTES == chunking.CHUNK_BYTES
    assert tiny_plan().head_chunk_bytes == 2**30
    assert tiny_plan("logprob.chunk_bytes=3000").head_chunk_bytes == 3000
