"""Time of a step: lengths and microbatches as trained, FLOPs as torch counts them, pipelines as
megatron runs them, and seconds that follow from them."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.engine_memory import language_weights
from pyrl_ext.plan.forecast.flops import model_flops, update_flops
from pyrl_ext.plan.forecast.rollout_time import running_over_time
from pyrl_ext.plan.forecast.rounds import step_rounds, update_rounds
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.forecast.workload import quantiles, step_samples
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.model.hardware import GPUS, exchange_rate, group_rate, parse_gpus
from pyrl_ext.plan.phases import STEP_PHASES
from pyrl_ext.plan.show.summary import facts
from pyrl_ext.schedule.pipeline import order, pipeline
from tests.helpers.configs import CONFIGS, hf_of
from tests.helpers.plan_pages import glm47, time_of

pytestmark = pytest.mark.multiprocess

DRAFTS = "rollout.speculation=mtp"
SCORED = "rollout.max_mismatch=1"  # every batch is scored before its update


MOE_ACT = ((), ("model.recompute_modules=[moe_act]",))


def amounts(plan: Plan, phase: str) -> dict[str, float]:
    return {cost.name: cost.amount for cost in time_of(plan).costs if cost.phase == phase}


# Lengths ----------------------------------------------------------------------------------------


def test_quantiles_have_the_stated_mean_and_spread():
    found = quantiles(4000, 300.0, 0.5, 10**6)
    assert found == sorted(found)
    assert sum(found) / len(found) == pytest.approx(300, rel=0.01)
    assert found[len(found) * 84134 // 100000] / found[len(found) // 2] == pytest.approx(
        2.71828**0.5, rel=0.02
    )  # one standard deviation above the median
    assert set(quantiles(8, 7.0, 0.0, 100)) == {7}
    assert max(quantiles(4000, 300.0, 0.5, 400)) == 400


def test_step_samples_are_groups_of_the_stated_lengths():
    plan = glm47("estimate.prompt_tokens=100", "estimate.response_tokens=300")
    samples = step_samples(plan)
    assert len(samples) == plan.samples == 512
    groups = [samples[i : i + 8] for i in range(0, 512, 8)]
    assert all(len({sample.prompt for sample in group}) == 1 for group in groups)
    assert sum(s.prompt for s in samples) / 512 == pytest.approx(100, rel=0.03)
    assert sum(s.response for s in samples) / 512 == pytest.approx(300, rel=0.03)
    halves = [sum(s.rows for s in samples[first : first + 256]) for first in (0, 256)]
    assert halves[0] == pytest.approx(halves[1], rel=0.1)  # an order that mixes lengths


def test_step_rounds_hold_every_sample_once():
    plan = glm47("parallel.cp=2", "parallel.dp=4")
    samples = step_samples(plan)
    for rounds in (step_rounds(plan), [r for part in update_rounds(plan) for r in part]):
        bins = [each for turn in rounds for each in turn.bins]
        assert {len(turn.bins) for turn in rounds} == {4} and {r.cp for r in rounds} == {2}
        assert max(each.rows for each in bins) <= 2 * plan.batching.tokens_per_microbatch
        assert sum(each.scored for each in bins) == sum(s.response for s in samples)
        assert sum(each.pairs for each in bins) == sum(s.rows * (s.rows + 1) / 2 for s in samples)


def test_step_rounds_give_the_longest_sample_the_ranks_it_needs():
    plan = glm47(
        "parallel.dynamic_cp=4", "batching.tokens_per_microbatch=8192", "data.max_prompt_tokens=64"
    )
    plan = plan.model_copy(
        update={"batching": plan.batching.model_copy(update={"tokens_per_microbatch": 512})}
    )
    rounds = step_rounds(plan)
    assert {turn.cp for turn in rounds} == {1, 2, 4}
    for turn in rounds:
        assert len(turn.bins) == 8 // turn.cp
        assert max(each.rows for each in turn.bins) <= 512 * turn.cp
    assert time_of(plan).seconds("update") > 0


# FLOPs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "tiny_qwen3"])
def test_model_flops_equal_torchs_count(name: str):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(CONFIGS / name)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    samples = 3
    rows = 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 100, (samples, rows)))
    sizes = read_sizes(hf_of(name))
    # eager attention computes the half that no query may see, too
    ours = model_flops(sizes).of(samples * rows, samples * rows**2, samples * rows)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_update_flops_are_six_times_active_parameters_and_tokens():
    plan = glm47("estimate.response_tokens=200", "data.max_prompt_tokens=128")
    counts = parameters(plan.sizes)
    assert counts.active == pytest.approx(3.9e9, rel=0.05)  # 3.3e9 without embedding and head
    rows = sum(sample.rows for sample in step_samples(plan))
    embedding = plan.sizes.vocab_size * plan.sizes.hidden_size
    short = 6 * (counts.active - embedding) * rows
    assert update_flops(plan) == pytest.approx(short, rel=0.1)  # prompts are not scored


# Pipeline ---------------------------------------------------------------------------------------

LAYOUTS = [(1, 1, 3), (2, 1, 1), (4, 1, 9), (8, 1, 3), (2, 2, 4), (4, 2, 4), (4, 3, 8), (3, 5, 9)]


@pytest.mark.parametrize(("pp", "vpp", "count"), LAYOUTS)
def test_order_equals_megatrons_on_every_rank(pp: int, vpp: int, count: int):
    pytest.importorskip("megatron.core")
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    for rank in range(pp):
        here: Any = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: pp, rank=lambda r=rank: r),
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        )
        _, _, warm_up, _ = get_pp_rank_microbatches(count, vpp, pp, p2p_communicator=here)
        table = get_schedule_table(count, vpp, pp)
        expected = convert_schedule_table_to_order(warm_up, vpp, table)
        found = order(rank, pp, vpp, count)
        assert [c + 1 if kind == "F" else -1 - c for kind, c, _ in found] == expected
        assert [(m, c) for kind, c, m in found if kind == "F"] == table
        assert [(m, vpp - 1 - c) for kind, c, m in found if kind == "B"] == table


@pytest.mark.parametrize(("pp", "vpp", "count"), LAYOUTS)
def test_bubble_share_equals_the_closed_form(pp: int, vpp: int, count: int):
    slots = pipeline(pp, vpp, count, 1.0, 2.0)
    ideal = 3 * vpp * count
    end = max(slot.end for slot in slots)
    assert (end - ideal) / ideal == pytest.approx((pp - 1) / (count * vpp))
    assert sum(slot.end - slot.start for slot in slots) == pytest.approx(pp * ideal)


def test_pipeline_starts_a_pass_after_its_input_and_its_rank():
    draw = random.Random(0)
    forward = {
        at: draw.random() for at in ((r, c, m) for r in range(4) for c in (0, 1) for m in range(8))
    }
    slots = pipeline(4, 2, 8, lambda *at: forward[at], lambda *at: 2 * forward[at], send=0.1)
    ends = {(s.kind, s.chunk * 4 + s.rank, s.microbatch): s.end for s in slots}
    assert len(ends) == len(slots) == 4 * 2 * 8 * 2
    for slot in slots:
        place = slot.chunk * 4 + slot.rank
        number = slot.microbatch
        if slot.kind == "F" and place:
            assert slot.start >= ends["F", place - 1, number] + 0.1
        elif slot.kind == "B" and place < 7:
            assert slot.start >= ends["B", place + 1, number] + 0.1
        elif slot.kind == "B":
            assert slot.start >= ends["F", place, number]
        assert slot.end - slot.start == pytest.approx(
            forward[slot.rank, slot.chunk, number] * (1 if slot.kind == "F" else 2)
        )
    for rank in range(4):
        mine = [slot for slot in slots if slot.rank == rank]
        assert all(before.end <= after.start for before, after in pairwise(mine))


def test_pipeline_of_forward_passes_alone_is_full():
    slots = pipeline(4, 1, 6, 1.0, None)
    assert {slot.kind for slot in slots} == {"F"}
    assert max(slot.end for slot in slots) == 6 + 3


# Hardware ---------------------------------------------------------------------------------------


def test_group_rate_and_exchange_rate_take_the_slowest_link():
    gpu = GPUS["H100"]
    assert group_rate(gpu, 8, 8, 1) == gpu.link
    assert group_rate(gpu, 8, 16, 1) == 8 * gpu.network  # rings through all adapters of a node
    assert group_rate(gpu, 8, 4, 8) == gpu.network
    assert exchange_rate(gpu, 8, 8, 1) == gpu.link
    # 8 of 15 parts leave the node
    assert exchange_rate(gpu, 8, 16, 1) == pytest.approx(gpu.network * 15 / 8)


@pytest.mark.parametrize("text", ["8H200", "H200x8", "0xH200", "8xV100", "", "8x"])
def test_parse_gpus_refuses_unknown_gpus_and_counts(text: str):
    with pytest.raises(ValueError, match="8xH200"):
        parse_gpus(text)


def test_parse_gpus_reads_count_and_kind():
    assert parse_gpus("8xH200") == (8, "H200")
    assert parse_gpus(" 128 x h100") == (128, "H100")


# A step -----------------------------------------------------------------------------------------


def test_step_time_is_none_without_a_gpu():
    assert step_time(compile_plan(CONFIGS / "tiny.yaml")) is None


def test_step_time_has_the_pass_of_a_teacher():
    overrides = ("teacher.model=zai-org/GLM-4.7-Flash", "objective.distill_coef=1")
    found = time_of(glm47(*overrides))
    scored, taught = found.seconds("old_logprobs"), found.seconds("teacher_logprobs")
    assert taught == pytest.approx(scored)  # a model of the same sizes


def test_step_time_counts_the_all_reduces_of_an_engine():
    """Two a layer and token, of attention and of the feed-forward part."""
    found = amounts(glm47("rollout.tp=2"), "rollout")
    assert found["all-reduces"] == 2 * found["layers"] > 0
    alone = amounts(glm47(), "rollout")
    assert alone["layers"] > 0 and "all-reduces" not in alone


def test_step_time_of_drafted_tokens_has_fewer_passes_with_one_more_layer():
    run = ("rollout.tp=2", "model.mtp=true")
    found = amounts(glm47(*run, DRAFTS), "rollout")
    plain = amounts(glm47(*run), "rollout")
    assert found["layers"] / 48 == pytest.approx(plain["layers"] / 47 / 1.7)
    assert found["all-reduces"] == pytest.approx(2 * found["layers"])
    assert found["tensor parallel"] > plain["tensor parallel"]  # rejected tokens too
    assert 1 / 1.7 < found["tokens"] / plain["tokens"] < 0.7  # more experts, a layer and a head
    few = (*run, "batching.prompts=8", "batching.samples_per_prompt=2", "batching.minibatches=1")
    found = amounts(glm47(*few, DRAFTS), "rollout")
    plain = amounts(glm47(*few), "rollout")
    # two tokens of 4 samples choose 1.77 times the experts that one chooses
    assert 0.9 < found["tokens"] / plain["tokens"] < 1
    assert amounts(glm47(*run, DRAFTS), "publish")["tensors"] == 9491 + 210


def test_step_time_of_quantized_weights_reads_half_of_them():
    run = ("rollout.tp=2", "rollout.max_num_seqs=128")
    plain = glm47(*run)
    fp8 = glm47(*run, "rollout.quantization=fp8")
    found = amounts(fp8, "rollout")
    before = amounts(plain, "rollout")
    held = [language_weights(plan) for plan in (plain, fp8)]
    assert 0.5 < held[1] / held[0] < 0.53  # embedding, head and routers have two bytes
    # nearly all experts are read in each pass; the cache is read as before
    assert 0.5 < found["tokens"] / before["tokens"] < 0.62
    assert found["prompts"] == before["prompts"]
    sizes = fp8.sizes
    slow, fast = (
        next(cost.seconds for cost in time_of(plan).costs if cost.name == "prompts")
        for plan in (plain, fp8)
    )
    # at 45 % of 1979 TFLOP/s, not at 60 % of 989: all of a token's products but attention and head
    rows = sum(sample.prompt for sample in step_samples(fp8)[::8]) / 2
    linear = 2 * (parameters(sizes).active - 2 * sizes.vocab_size * sizes.hidden_size) * rows
    saved = linear / 0.6 / 989e12 - linear / 0.45 / 1979e12
    assert slow - fast == pytest.approx(saved, rel=0.05)
    sent = amounts(fp8, "publish")
    # gate and up projections are one matrix
    assert sent.pop("quantize") == 2 * 64 * 46 + 5 * 47
    assert sent == amounts(plain, "publish")


@pytest.mark.parametrize(
    "override",
    [
        "batching.minibatches=2",
        "batching.epochs=2",
        SCORED,
        "rollout.record=rollouts",
        "objective.tis=sequence",
        "objective.veto=1e-4",
        "objective.sequence_bounds=[0.99, 1.01]",
        "objective=opd",
        "replay=trainer",
        "replay.old=false",
        "replay.train=false",
        "logprob.loss_in_chunk=true",
        "objective.kl_in=reward",
    ],
)
def test_step_time_leaves_out_log_probs_that_the_update_gives(override: str):
    """A step of one update, unless something reads its old log-probs before."""
    teacher = "teacher.model=zai-org/GLM-4.7-Flash"
    both = ["objective.kl_coef=0.1", "objective.kl=k1"]
    inside = glm47(*both, "batching.minibatches=1")
    assert inside.scores_in_update
    found = time_of(inside)
    assert not found.seconds("old_logprobs") and found.seconds("ref_logprobs") > 0
    assert any("the update's forward pass" in sentence for sentence in found.assumed)
    more = [override]
    if override == "objective=opd":
        more.append(teacher)
    if override != "batching.minibatches=2":
        more.append("batching.minibatches=1")
    before = glm47(*both, *more)
    assert not before.scores_in_update
    found = time_of(before)
    assert found.seconds("old_logprobs") > 0
    assert not any("the update's forward pass" in sentence for sentence in found.assumed)


def test_step_time_adds_up_and_says_what_it_assumes():
    found = time_of(glm47())
    assert tuple(dict.fromkeys(c.phase for c in found.costs)) == tuple(
        phase for phase in STEP_PHASES if phase not in ("ref_logprobs", "teacher_logprobs")
    )
    assert found.total == pytest.approx(sum(found.seconds(phase) for phase in STEP_PHASES))
    assert all(cost.why and cost.seconds > 0 for cost in found.costs)
    assert 0.05 < found.mfu < 0.6
    assert "never compared with a run on GPUs" in found.error
    assert any("512 samples" in sentence for sentence in found.assumed)


def test_step_time_counts_the_operations_of_an_update():
    plan = glm47("parallel.dp=1", "parallel.ep=1", "model.recompute=none")
    samples = step_samples(plan)
    sizes = plan.sizes
    counts = parameters(plan.sizes)
    rows = sum(sample.rows for sample in samples)
    found = amounts(plan, "update")
    assert found["experts"] == pytest.approx(3 * 2 * counts.active_expert * rows)
    pairs = sum(s.rows * (s.rows + 1) / 2 for s in samples)
    assert found["attention"] == pytest.approx(3 * 2 * 47 * 20 * (256 + 256) * pairs)
    scored = sum(s.response for s in samples)
    assert found["head"] == pytest.approx(8 * scored * sizes.vocab_size * sizes.hidden_size)
    assert "bubble" not in found and "expert parallel" not in found


@pytest.mark.parametrize(
    ("override", "times"),
    [
        ("logprob.loss_in_chunk=true", 6),
        ("logprob.cache_bytes=1000000000000", 6),
        ("logprob.cache_bytes=0", 8),
    ],
)
def test_step_time_counts_the_operations_of_the_head(override: str, times: int):
    plan = glm47(override)
    scored = sum(sample.response for sample in step_samples(plan))
    each = plan.sizes.vocab_size * plan.sizes.hidden_size
    # a rank's share, more by the unevenness of rounds
    assert amounts(plan, "update")["head"] == pytest.approx(times * scored * each / 8, rel=0.1)
    assert amounts(plan, "old_logprobs")["head"] == pytest.approx(2 * scored * each / 8, rel=0.1)
    rows = sum(sample.rows for sample in step_samples(plan))
    recorded = amounts(glm47(override, "rollout.record=rollouts"), "old_logprobs")
    assert recorded["head"] == pytest.approx(2 * rows * each / 8, rel=0.01)


@pytest.mark.parametrize(
    ("recompute", "projections", "experts", "attention"),
    [
        ("none", 3, 3, 3),
        ("selective", 3, 4, 4),
        ("full", 4, 4, 4),
        ("[core_attn]", 3, 3, 4),
        ("[moe]", 3, 4, 3),
        ("[moe_act]", 3, 3, 3),
    ],
)
def test_step_time_adds_a_forward_pass_for_recompute(
    recompute: str, projections: int, experts: int, attention: int
):
    modules = recompute.startswith("[")
    how = [f"model.recompute={'selective' if modules else recompute}"]
    how += [f"model.recompute_modules={recompute}"] * modules
    plan = glm47(*how, "batching.minibatches=1", SCORED)
    once = amounts(plan, "old_logprobs")
    found = amounts(plan, "update")
    for name, times in (
        ("projections", projections),
        ("experts", experts),
        ("attention", attention),
        ("expert parallel", experts - 1),
    ):
        assert found[name] == pytest.approx(times * once[name]), name


def test_step_time_counts_the_bytes_between_ranks():
    plan = glm47(
        "parallel.dp=2",
        "parallel.tp=2",
        "parallel.cp=2",
        "parallel.ep=4",
        "parallel.etp=1",
        "batching.minibatches=1",
        "batching.tokens_per_microbatch=1000000",
        SCORED,
    )
    (turn,) = step_rounds(plan)
    rows = max(each.rows for each in turn.bins)
    hidden = 2048 * 2
    found = amounts(plan, "old_logprobs")
    # 47 layers; attention and feed-forward part each gather and scatter half of a cp rank's rows,
    # and attention half of the other cp rank's latents
    sent = 47 * (4 * rows / 2 * hidden / 2 + rows / 2 * 576 * 2 / 2)
    assert found["tensor parallel"] == pytest.approx(sent, rel=0.01)
    # 46 layers; 4 experts a row of tp * cp ranks, three of four elsewhere, there and back
    sent = 46 * 2 * 4 * rows / 4 * hidden * 3 / 4
    assert found["expert parallel"] == pytest.approx(sent, rel=0.01)
    # latents and rotated key in bfloat16, half of the half that the other cp rank holds; it is
    # projected to 10 heads of 192 + 256 elements here as well
    assert found["context parallel"] == pytest.approx(47 * rows / 2 * 576 / 2 * 2, rel=0.01)
    assert found["latents"] == pytest.approx(47 * rows / 2 * 2 * 512 * 10 * 448, rel=0.01)


def test_step_time_sums_gradients_over_copies():
    plan = glm47("batching.minibatches=1")
    counts = parameters(plan.sizes)
    dense = counts.total - counts.expert
    found = amounts(plan, "update")
    assert found["reduce gradients"] == pytest.approx(4 * dense * 7 / 8)  # experts have no copy
    assert found["gather weights"] == pytest.approx(2 * dense * 7 / 8)
    twice = amounts(glm47("batching.minibatches=1", "optimizer.distributed=false"), "update")
    assert twice["reduce gradients"] == pytest.approx(8 * dense * 7 / 8)
    assert "gather weights" not in twice


def test_step_time_counts_the_bytes_of_the_optimizer():
    plan = glm47("batching.minibatches=1")
    counts = parameters(plan.sizes)
    dense = counts.total - counts.expert
    expert = counts.expert / 8
    # gradients of all local weights are set to zero (4 bytes written) and their norm is taken (4
    # read); of the rank's part AdamW reads 16 bytes, writes 12, and writes the bfloat16 weight
    norms = 8 * (dense + expert)
    assert amounts(plan, "update")["optimizer"] == pytest.approx(
        norms + (28 + 2) * (dense / 8 + expert)
    )
    alone = glm47("batching.minibatches=1", "optimizer.distributed=false")
    assert amounts(alone, "update")["optimizer"] == pytest.approx(38 * (dense + expert))
    # moments of bfloat16 are read (4) and written in float32 (8), which is read and written by
    # AdamW (16) with weight and gradient (12), and read (8) to write them back (4)
    narrow = glm47("batching.minibatches=1", "optimizer.moments=bfloat16")
    assert amounts(narrow, "update")["optimizer"] == pytest.approx(
        norms + (52 + 2) * (dense / 8 + expert)
    )


def test_step_time_moves_offloaded_bytes_both_ways():
    plan = glm47("rollout.offload_trainer=all")
    counts = parameters(plan.sizes)
    dense = counts.total - counts.expert
    expert = counts.expert / 8
    weights = 2 * (dense + expert)
    optimizer = 12 * (dense / 8 + expert)  # gradients are dropped
    # the optimizer's state comes back behind the passes
    assert amounts(plan, "publish")["offload trainer"] == pytest.approx(2 * weights + optimizer)
    moments = amounts(glm47("rollout.offload_trainer=optimizer"), "publish")
    assert moments["offload trainer"] == pytest.approx(optimizer)
    narrow = glm47("rollout.offload_trainer=optimizer", "optimizer.moments=bfloat16")
    assert amounts(narrow, "publish")["offload trainer"] == pytest.approx(8 * (dense / 8 + expert))


def test_step_time_waits_for_an_optimizer_that_comes_back_after_short_passes():
    given = ("hardware.gpu=H100", "rollout.offload_trainer=all")
    assert "state of the optimizer" not in amounts(glm47(*given), "update")
    short = glm47(*given, "batching.prompts=8")
    costs = time_of(short).costs
    steps = ("optimizer", "gather weights", "state of the optimizer")
    passes = sum(c.seconds for c in costs if c.phase == "old_logprobs")
    of_update = [c.seconds for c in costs if c.phase == "update" and c.name not in steps]
    passes += sum(of_update) / 2  # of two minibatches
    counts = parameters(short.sizes)
    held = 12 * ((counts.total - counts.expert) / 8 + counts.expert / 8)
    left = amounts(short, "update")["state of the optimizer"]
    assert left == pytest.approx(held - passes * 0.8 * 64e9, rel=0.02)


def test_step_time_counts_the_memory_traffic_of_recomputed_units():
    """46 layers read gate and up again, and write their product, for 4 experts of 1536 columns."""
    ways = ("none", "selective", "full")
    none, again, full = (
        amounts(glm47(f"model.recompute={way}", *MOE_ACT[way == "selective"], SCORED), "update")
        for way in ways
    )
    rows = sum(sample.rows for sample in step_samples(glm47())) / 8
    more = again["memory"] - none["memory"]
    # rounds are uneven; a step passes over its samples once
    assert more == pytest.approx(46 * 2 * 3 * 4 * 1536 * rows, rel=0.1)
    assert more < 0.5 * (full["memory"] - none["memory"])


@pytest.mark.parametrize(
    "config", ["glm47", "llama31_8b", "mixtral_8x7b", "tiny_nemotron", "tiny_qwen3_next", "tiny_vl"]
)
def test_num_tensors_is_that_of_the_weight_table(config: str):
    sizes = compile_plan(CONFIGS / f"{config}.yaml").sizes
    for tied in (False, True):
        changed = sizes.model_copy(update={"tie_word_embeddings": tied})
        changed.__dict__.pop("num_tensors", None)
        assert changed.num_tensors == sum(len(row.hf_names) for row in changed.weights(0))
    if sizes.num_nextn_predict_layers:
        every = sum(len(row.hf_names) for row in sizes.weights(1))
        assert sizes.num_mtp_tensors == every - sizes.num_tensors


def test_step_time_counts_the_tensors_of_a_weight_sync():
    assert amounts(glm47(), "publish")["tensors"] == 9491
    awake = "rollout.sleep=false"
    tables = glm47(awake, "model.freeze=[lm_head.weight, model.embed_tokens.weight]")
    assert amounts(tables, "publish")["tensors"] == 9489
    assert amounts(glm47(awake, "model.freeze=[model.layers.*]"), "publish")["tensors"] == 3
    # vLLM loads gate, up and down projections of all 64 experts of a layer at once
    loaded = 9491 - 46 * 3 * 63
    assert amounts(glm47(), "publish")["load tensors"] == loaded
    assert amounts(glm47("model.mtp=true", DRAFTS), "publish")["load tensors"] == loaded + 210 - 189
    assert "load tensors" not in amounts(glm47("rollout.engine=hf"), "publish")
    spread = glm47("rollout.tp=4", "rollout.engine_options={enable_expert_parallel: true}")
    assert amounts(spread, "publish")["load tensors"] == loaded + 46 * 3 * 48  # of other ranks


def test_step_time_has_a_bubble_that_interleaving_shrinks():
    layout = ["parallel.pp=4", "parallel.dp=2", "parallel.ep=2"]
    plain = [*layout, "parallel.num_layers_in_first_pipeline_stage=11"]
    chunks = "Et*5|t*6|t*6|t*6|t*6|t*6|t*6|t*6L"
    woven = [*layout, "parallel.vpp=2", f"parallel.pipeline_model_parallel_layout='{chunks}'"]
    bubbles = [amounts(glm47(*each), "update")["bubble"] for each in (plain, woven)]
    assert 100 > bubbles[0] > bubbles[1] > 0


def test_step_time_updates_in_each_epoch_and_scores_once():
    once = time_of(glm47("objective.kl_coef=0.1"))
    thrice = time_of(glm47("objective.kl_coef=0.1", "batching.epochs=3"))
    for phase in STEP_PHASES:
        times = 3 if phase == "update" else 1
        assert thrice.seconds(phase) == pytest.approx(times * once.seconds(phase)), phase
    assert thrice.mfu == pytest.approx(once.mfu)
    written = dict(facts(glm47("batching.epochs=3")))["minibatch"]
    assert written == "256 samples, 2 a step in each of 3 epochs"


def test_step_time_has_a_cost_for_each_cause():
    def names(*overrides: str) -> set[tuple[str, str]]:
        return {(cost.phase, cost.name) for cost in time_of(glm47(*overrides)).costs}

    before = names()
    assert ("ref_logprobs", "attention") in names("objective.kl_coef=0.1") - before
    assert ("publish", "send weights") in names("rollout.gpus=8") - before
    assert not any(phase in ("rollout", "publish") for phase, _ in names(
        "rollout.engine=recorded", "rollout.path=glm47/config.json"))  # fmt: skip


def test_step_time_of_overlapped_gradients_is_the_rest():
    seconds = [
        {cost.name: cost.seconds for cost in time_of(glm47(*each)).costs if cost.phase == "update"}
        for each in ((), ("optimizer.overlap_grad_reduce=true",))
    ]
    assert seconds[0]["reduce gradients"] > seconds[1].get("reduce gradients", 0.0)


def test_running_over_time_counts_sequences_until_they_end():
    assert running_over_time((3, 5, 2), 3) == [(2, 3), (1, 2), (2, 1)]
    assert running_over_time((3, 5, 2), 1) == [(3, 1), (5, 1), (2, 1)]
    steps = running_over_time((7, 1, 4, 4, 9, 2), 2)
    assert sum(count * running for count, running in steps) == 27


def test_step_time_grows_with_slower_hardware():
    totals = [time_of(glm47(f"hardware.gpu={name}")).total for name in ("B200", "H200", "A100")]
    assert totals == sorted(totals)
