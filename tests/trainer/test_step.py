"""Step on two ranks: every rank hears of lengths that no schedule takes; a step's log-probs before
its first update are the current ones. On one: the engine starts before the trainer."""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.plan import Plan
from pyrl_ext.rollout import rollouts
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.trainer import policy
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.trainer.sft import SftStep
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers.configs import CONFIGS
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QUICK, tiny_plan

pytestmark = pytest.mark.multiprocess

CONFIG = CONFIGS / "tiny_sft.yaml"
LIMIT = 191
LAYOUT = ("parallel.dp=2", "parallel.dynamic_cp=2", f"batching.tokens_per_microbatch={LIMIT}")
SMALL = ("batching.samples=6", "data.held_out=3", "batching.minibatches=2")


def with_length(index: BatchIndex, sample: int, rows: int) -> BatchIndex:
    lengths = index.seqlens.copy()
    lengths[sample] = rows
    return replace(index, seqlens=lengths)


def first_sample(rollout: RolloutSamples, rank: int) -> RolloutSamples:
    """A batch of one sample, which its owner holds."""
    columns = {
        f.name: getattr(rollout.index, f.name)[:1]
        for f in fields(BatchIndex)
        if isinstance(getattr(rollout.index, f.name), np.ndarray)
    }
    index = replace(rollout.index, **columns)
    return RolloutSamples(index, rollout.samples[:1] if index.owners[0] == rank else [])


def scored(step: RolloutStep, clock: Clock, number: int = 0) -> tuple[RolloutSamples, BatchShard]:
    """The rollout of a step, and its rows with log-probs."""
    step.sync_weights(number, clock)
    rollout = step.take(number, clock)
    shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock)
    return rollout, shard


def ratios(*overrides: str) -> list[torch.Tensor]:
    """The log-ratios of loss tokens in the first and in the second minibatch of a step."""
    plan = tiny_plan(*QUICK, "parallel.dp=2", *overrides)
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        rollout, shard = scored(step, clock)
        assert not rollout.samples  # they are rows now
        found = []
        for number in range(2):
            part = shard.minibatch(number)
            seen = list[torch.Tensor]()
            assert len(part.schedule) > 1

            def loss(logprobs, entropy, fields, seen=seen):
                seen.append((logprobs.detach() - fields.old_logprobs)[fields.loss_mask])
                return step.loss(logprobs, entropy, fields)

            step.policy.update(part, loss)
            found.append(torch.cat(seen))
        return found


def without_loss_tokens(rollout: RolloutSamples, groups: int) -> RolloutSamples:
    """The same samples; those of the first ``groups`` groups have nothing to train on."""
    index = rollout.index
    first = [*dict.fromkeys(index.groups.tolist())][:groups]
    tokens = np.where(np.isin(index.groups, first)[:, None], 0, index.loss_tokens)
    samples = [
        replace(s, loss_mask=s.loss_mask & False, rollout_logprobs=s.rollout_logprobs * 0)
        if s.prompt_id in first
        else s
        for s in rollout.samples
    ]
    return RolloutSamples(replace(index, loss_tokens=tokens), samples)


def maps_of(step: RolloutStep) -> defaultdict[int, list[torch.Tensor]]:
    """Layer -> the experts [M, E] bool that its router hands to megatron, forward by forward."""
    from megatron.core.transformer.moe.router import TopKRouter

    seen: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for chunk in step.policy.llm.chunks:
        for router in filter(lambda module: isinstance(module, TopKRouter), chunk.modules()):

            def note(module: Any, _args: object, output: Any) -> None:
                seen[module.layer_number].append(output[1].clone())

            router.register_forward_hook(note)
    return seen


def moved_routes(*overrides: str) -> list[list[int]]:
    """Of each minibatch: the numbers of rows and layers of this rank, and in how many the update
    uses other experts than the pass for old log-probs."""
    small = ("batching.tokens_per_microbatch=32", "data.max_prompt_tokens=16")
    plan = tiny_plan(*QUICK, *small, "optimizer.lr=3e-2", *overrides)
    assert plan.batching.minibatches == 2
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        shard = step.batch_of(rollout, clock)
        assert plan.replay.of_engine or "routes" not in shard.stored
        seen = maps_of(step)
        shard, _ = step.score(shard, rollout.index, clock)
        old = {layer: [*maps] for layer, maps in seen.items()}
        found = list[list[int]]()
        first = 0
        for number, microbatches in enumerate(shard.minibatches):
            seen.clear()
            step.policy.update(shard.minibatch(number), step.loss)
            rows = other = 0
            for layer, maps in seen.items():
                scored = old[layer][first : first + microbatches]
                pairs = zip(maps, scored, strict=True)
                rows += sum(map(len, maps))
                other += sum(int((now != then).any(1).sum()) for now, then in pairs)
            first += microbatches
            found.append([rows, other])
        assert all(first == len(maps) for maps in old.values())
        return found


ROUTED = {
    "dp2 ep2": ("parallel.dp=2", "parallel.ep=2"),
    "tp2": ("parallel.tp=2",),
    "cp2": ("parallel.cp=2",),
    "pp2 vpp2": ("parallel.pp=2", "parallel.vpp=2"),
    "dynamic": ("parallel.dp=2", "parallel.dynamic_cp=2"),
}


class Skipped(NamedTuple):
    """A step whose first ``groups`` of four groups, in two minibatches, have no loss tokens.

    Args:
        metrics: of the update, and of the step.
        updates: that the policy counts.
        moved:   whether any weight changed.
    """

    metrics: dict[str, float]
    updates: int
    moved: bool


def skips() -> list[Skipped]:
    """Without loss tokens in no group, in the first minibatch, and in both."""
    plan = tiny_plan(*QUICK, "parallel.dp=2")
    clock = Clock()
    found = list[Skipped]()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        for groups in (0, 2, 4):
            step.sync_weights(len(found), clock)
            before = {n: x.clone() for n, x in step.policy.weights()}
            known = step.policy.updates
            rollout = without_loss_tokens(step.take(0, clock), groups)
            shard, old = step.score(step.batch_of(rollout, clock), rollout.index, clock, check=True)
            metrics = step.update(shard, clock) | step.metrics(rollout.index, shard, old)
            moved = any(not torch.equal(x, before[n]) for n, x in step.policy.weights())
            found.append(Skipped(metrics, step.policy.updates - known, moved))
    return found


class OneUpdate(NamedTuple):
    """Three steps of one update each, the last one without loss tokens.

    Args:
        passes: log-prob passes of the policy in each step.
        metrics: of each step.
        ratios: log-ratios of loss tokens in all.
        weights: a checksum of the weights after them.
    """

    passes: list[int]
    metrics: list[dict[str, float]]
    ratios: torch.Tensor
    weights: float


def one_update(*overrides: str) -> OneUpdate:
    small = ("batching.tokens_per_microbatch=32", "data.max_prompt_tokens=16")
    plan = tiny_plan(*QUICK, *small, "batching.minibatches=1", "optimizer.lr=3e-2", *overrides)
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        loss = step.loss
        scores = step.policy.scores
        seen = list[torch.Tensor]()
        passes = list[int]()
        metrics = list[dict[str, float]]()

        def watched(logprobs, entropy, fields):
            seen.append((logprobs.detach() - fields.old_logprobs)[fields.loss_mask])
            return loss(logprobs, entropy, fields)

        def counted(*args):
            passes[-1] += 1
            return scores(*args)

        step.loss = watched
        step.policy.scores = counted
        for number in range(3):
            step.sync_weights(number, clock)
            rollout = step.take(number, clock)
            if number == 2:
                rollout = without_loss_tokens(rollout, plan.batching.prompts)
            passes.append(0)
            shard = step.batch_of(rollout, clock)
            shard, old = step.score(shard, rollout.index, clock, check=number == 0)
            row = step.update(shard, clock)
            metrics.append(row | step.metrics(rollout.index, shard, old))
        weights = sum(float(x.double().abs().sum()) for _, x in step.policy.weights())
        return OneUpdate(passes, metrics, torch.cat([torch.empty(0), *seen]), weights)


def one_updates() -> dict[str, tuple[OneUpdate, OneUpdate]]:
    """Layout -> with old log-probs from the update, and from a pass before it."""
    kinds = dict[str, tuple[str, ...]](ROUTED)
    kinds["dp2 ep2"] += ("model.recompute=full",)
    kinds["cp2"] += ("objective.ratio=sequence",)
    kinds["pp2 vpp2"] += ("objective.tis_cap=0.5", "objective.mask_ratio=[0.9999999, 2]")
    before = "rollout.max_mismatch=0.01"
    return {name: (one_update(*each), one_update(*each, before)) for name, each in kinds.items()}


class Epochs(NamedTuple):
    """A step of two epochs, and the same updates one by one on its rows.

    Args:
        ratios: log-ratios of loss tokens in each update.
        metrics: of the step.
        losses: of the updates one by one.
        apart: names of weights that differ at the end.
        shared: True if some sample ran on both ranks, and another on one.
        gaps: largest distance between the log-probs of policy and reference in the steps after it,
            the second of which refreshes the reference.
    """

    ratios: list[torch.Tensor]
    metrics: dict[str, float]
    losses: list[float]
    apart: list[str]
    shared: bool
    gaps: list[float]


def two_epochs() -> Epochs:
    """Under dynamic context parallelism."""
    layout = ("parallel.dp=2", "parallel.dynamic_cp=2", "batching.tokens_per_microbatch=8")
    uneven = ("data.max_prompt_tokens=4", 'rollout.stop=["1", "3", "5"]')
    reference = ("objective.kl_coef=0.1", "objective.reference_refresh=2")
    plan = tiny_plan(*QUICK, *layout, *uneven, *reference, "batching.epochs=2")
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        other = policy.Policy.build(plan, topo)
        _, shard = scored(step, clock)
        groups = [g for micro in shard.schedule.microbatches for g in micro if g.samples]
        loss = step.loss
        seen = list[torch.Tensor]()

        def watched(logprobs, entropy, fields):
            ratios = (logprobs.detach() - fields.old_logprobs)[fields.loss_mask]
            seen[-1] = torch.cat([seen[-1], ratios])
            return loss(logprobs, entropy, fields)

        def update(minibatch, given, update=step.policy.update):
            seen.append(torch.empty(0))
            return update(minibatch, given)

        step.loss = watched
        step.policy.update = update
        metrics = step.update(shard, clock)
        losses = [other.update(shard.minibatch(n), loss)["loss"] for n in (0, 1, 0, 1)]
        mine = dict(step.policy.weights())
        apart = [name for name, x in other.weights() if not torch.equal(x, mine[name])]
        assert step.policy.updates == other.updates == 4
        gaps = list[float]()
        for number in (1, 2):
            columns = scored(step, clock, number)[1].columns
            gap = columns["old_logprobs"] - columns["ref_logprobs"]
            gaps.append(float(gap[columns["loss_mask_0"]].abs().max()))
        shared = {group.cp_size for group in groups} == {1, 2}
        return Epochs(seen, metrics, losses, apart, shared, gaps)


def on_rank(
    group: dist.ProcessGroup,
) -> tuple[
    dict[str, str],
    float,
    list[list[torch.Tensor]],
    list[Skipped],
    dict[str, tuple[OneUpdate, OneUpdate]],
    Epochs,
    dict[str, list[list[int]]],
]:
    """The message for each kind of wrong lengths; the loss of one sample on two ranks; log-ratios
    with each kind of head and of replay; steps with minibatches without loss tokens; steps of one
    update by layout; a step of two epochs; what `moved_routes` found by layout."""
    plan = tiny_plan(*SMALL, *LAYOUT, config=CONFIG)
    clock = Clock()
    with topology.start(plan) as topo:
        step = SftStep.build(plan, topo)
        rollout = step.take(0, clock)
        told = {}
        wrong = {
            "long": with_length(rollout.index, 4, 2 * LIMIT),  # padded to 384 for two ranks
            "empty": with_length(rollout.index, 1, 0),
            "other": with_length(rollout.index, 0, 30 + 100 * topo.rank),
            "long on one": with_length(rollout.index, 5, 9 + 400 * topo.rank),
        }
        for name, index in wrong.items():
            with pytest.raises(RuntimeError) as caught:
                step.batch_of(replace(rollout, index=index), clock)
            told[name] = str(caught.value)
        few = step.batch_of(first_sample(rollout, topo.rank), clock, minibatches=1)
        alone = step.policy.accumulate(few.minibatch(0), step.loss)["loss"]
    small = ("batching.tokens_per_microbatch=32", "data.max_prompt_tokens=16")
    heads = [ratios(*small, each) for each in ("logprob.head=logits", "replay=trainer")]
    heads.append(ratios(*small))
    moved = {name: moved_routes("replay=trainer", *layout) for name, layout in ROUTED.items()}
    moved["off"] = moved_routes("replay=off", *ROUTED["dp2 ep2"])
    return told, alone, heads, skips(), one_updates(), two_epochs(), moved


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_rank, 2)


def test_score_of_a_first_minibatch_is_its_current_logprobs_to_the_last_bit(ranks):
    """Scores and updates follow one placement. So the ratios of a step's first update are 1; later
    ones are not."""
    for _, _, heads, *_ in ranks:
        for first, second in heads:
            assert len(first) > 20 and not first.any()
            assert second.abs().max() > 1e-3


def test_update_replays_the_routes_of_the_pass_for_old_log_probs(ranks):
    """Under every layout, padding included, also after the first minibatch moved the weights."""
    moved = [found for *_, found in ranks]
    for name in ROUTED:
        assert all(rows > 50 for found in moved for rows, _ in found[name]), name
        assert [[other for _, other in found[name]] for found in moved] == [[0, 0]] * 2, name
    for (_, first), (_, second) in (found["off"] for found in moved):
        assert first == 0 and second > 5


def test_update_skips_minibatches_without_loss_tokens(ranks):
    for whole, half, none in (skipped for *_, skipped, _, _, _ in ranks):
        assert [each.updates for each in (whole, half, none)] == [2, 1, 0]
        assert [each.moved for each in (whole, half, none)] == [True, True, False]
        assert [each.metrics["policy/skipped_updates"] for each in (whole, half, none)] == [0, 1, 2]
        for each in (whole, half, none):
            assert all(map(math.isfinite, each.metrics.values()))
        assert half.metrics["loss"] != 0 and half.metrics["grad_norm"] > 0
        assert not {"loss", "grad_norm", "mismatch/k3"} & none.metrics.keys()


def test_update_scores_the_rows_where_a_step_has_one(ranks):
    """No pass but the first step's check, and the numbers of a step with one, in every layout."""
    by_layout: dict[str, tuple[OneUpdate, OneUpdate]] = {}
    for *_, by_layout, _, _ in ranks:
        for name, (inside, before) in by_layout.items():
            assert inside.passes == [1, 0, 0] and before.passes == [1, 1, 1], name
            assert not inside.ratios.any() and not before.ratios.any(), name
            assert inside.weights == pytest.approx(before.weights, rel=1e-6), name
            assert not {"mismatch/k3", "route/agree_topk"} & inside.metrics[2].keys(), name
            for one, other in zip(inside.metrics[:2], before.metrics[:2], strict=True):
                left_out = {key for key in one if key.startswith("time/")}
                assert one.keys() == other.keys(), name
                assert {"mismatch/k3", "route/agree_topk", "policy/entropy"} <= one.keys()
                for key in one.keys() - left_out:
                    assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-9), (name, key)
    assert sum(len(inside.ratios) for inside, _ in by_layout.values()) > 100
    corrected = by_layout["pp2 vpp2"][0].metrics[0]
    assert 0 < corrected["policy/rejected/token"] < 1 and corrected["policy/tis_mean"] == 0.5


def test_update_passes_over_the_minibatches_once_an_epoch(ranks):
    """Old log-probs stay those of before the step: only its very first update has ratios of 1."""
    both = [epochs for *_, epochs, _ in ranks]
    first, *later = [torch.cat(each) for each in zip(*(x.ratios for x in both), strict=True)]
    assert len(first) > 10 and not first.any()
    assert len(later) == 3 and all(each.abs().max() > 1e-3 for each in later)
    for found in both:
        assert found.shared and not found.apart
        assert found.metrics["loss"] == pytest.approx(sum(found.losses) / 4, rel=1e-12)
        assert found.metrics["policy/last_epoch/ppo_kl"] != found.metrics["policy/ppo_kl"]


def test_score_refreshes_the_reference_before_its_log_probs(ranks):
    for before, after in (epochs.gaps for *_, epochs, _ in ranks):
        assert before > 1e-3 and after == 0


def test_batch_of_refuses_lengths_on_every_rank_and_runs_fewer_samples_than_ranks(ranks):
    (told, loss, *_), (theirs, same, *_) = ranks
    assert told == theirs
    assert loss == same and math.isfinite(loss) and loss > 0
    both = "Step.batch_of: 2 of 2 ranks failed"
    assert both in told["long"] and both in told["empty"]
    # ids count from the first sample of the minibatch
    assert (
        "minibatch 1 of 2: plan_dynamic_cp: sample 1 has 382 tokens, expected at most 380"
        in (told["long"])
    )
    advice = "Raise batching.tokens_per_microbatch or the largest group, or shorten the responses"
    assert advice in told["long"]
    message = "minibatch 0 of 2: plan_dynamic_cp: sample 1 has 0 tokens, expected at least 1"
    assert message in told["empty"]
    assert "rank 0: ValueError: Step.batch_of: 3 samples with" in told["other"]
    assert "1 of 2 ranks failed" in told["long on one"]
    assert "rank 1: ValueError: minibatch 1 of 2" in told["long on one"]


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Data of all tensors of this process, by address: others' tests leave fake ones."""
    gc.collect()
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [each for each in gc.get_objects() if type(each) in kinds]
    return {s.data_ptr(): s for s in (each.untyped_storage() for each in tensors)}


def test_RolloutStep_starts_the_engine_on_an_empty_device_and_puts_it_to_sleep(
    monkeypatch: pytest.MonkeyPatch,
):
    """A real step; a CPU's plan shares no GPU, so the test says that it does."""
    held = list[tuple[str, int]]()
    plan = tiny_plan(*QUICK, "objective.kl_coef=0.1")
    engine = rollouts.build_engine
    module = TrainedModule.build

    def live_bytes() -> int:
        return sum(s.nbytes() for at, s in live_storages().items() if at not in before)

    def built(kind: str, build: Any, *args: Any) -> Any:
        held.append((kind, live_bytes()))
        return build(*args)

    monkeypatch.setattr(rollouts, "build_engine", partial(built, "engine", engine))
    monkeypatch.setattr(TrainedModule, "build", partial(built, "trainer", module))
    monkeypatch.setattr(Plan, "shares_gpus", True)
    weights = 4 * 303_424
    before = live_storages()  # held, so that none is freed while new ones are counted
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        names = [name for name, _ in held]
        assert names == ["engine", "trainer", "trainer"]  # the last is the frozen reference
        empty, asleep, trainer = (size for _, size in held)
        assert empty < asleep < weights / 10 and trainer > 2 * weights
        step.sync_weights(0, Clock())  # the engine has its memory again
        assert live_bytes() > trainer + 2 * weights


def test_score_leaves_out_prompts_unless_something_reads_them(tmp_path: Path):
    """The numbers of loss tokens are the same to the last bit."""
    found = list[dict[str, torch.Tensor]]()
    for more in ((), (f"rollout.record={tmp_path}",)):
        plan = tiny_plan(*QUICK, "objective.kl_coef=0.1", *more)
        with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
            found.append(dict(scored(step, Clock())[1].columns))
    few, every = found
    mask = few["loss_mask_0"]
    assert mask.any() and not mask.all()
    for name in ("old_logprobs", "ref_logprobs"):
        assert few[name][~mask].isnan().all() and every[name].isfinite().all()
        assert torch.equal(few[name][mask], every[name][mask])


def test_RolloutStep_works_on_the_stream_that_its_engine_left_current(
    monkeypatch: pytest.MonkeyPatch,
):
    """A CPU has no streams, so the test says which one is current."""
    plan = tiny_plan(*QUICK)
    clock = Clock()
    current = [0]
    build = rollouts.build_engine

    def built(*given: Any) -> Any:
        current[0] = 7  # as vLLM does
        return build(*given)

    monkeypatch.setattr(rollouts, "build_engine", built)
    monkeypatch.setattr(policy, "stream_of", lambda device: current[0])
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        _, shard = scored(step, clock)
        step.update(shard, clock)
        current[0] = 8
        for call in (
            lambda: step.policy.scores(shard),
            lambda: step.policy.accumulate(shard.minibatch(0), step.loss),
            step.policy.step_optimizer,
        ):
            with pytest.raises(RuntimeError, match="stream 0x8 is current, expected 0x7, on which"):
                call()


def onload_after_all_engines_sleep(group: dist.ProcessGroup) -> list[bool]:
    """True if the engines of both ranks slept when the trainer of this rank took memory."""
    Plan.shares_gpus = True  # type: ignore[method-assign]
    plan = tiny_plan(*QUICK, "parallel.dp=2")
    clock = Clock()
    asleep = list[bool]()
    store: Any = dist.distributed_c10d._get_default_store()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        sleep = step.engine.sleep
        onload = step.policy.onload

        def falls_asleep() -> int:
            time.sleep(0.5 * topo.is_main)  # the other rank is not to overtake it
            freed = sleep()
            store.set(f"asleep {topo.rank}", "")
            return freed

        def takes_memory() -> int:
            asleep.extend(store.check([f"asleep {rank}"]) for rank in range(group.size()))
            return onload()

        step.engine.sleep = falls_asleep  # type: ignore[method-assign]
        step.policy.onload = takes_memory  # type: ignore[method-assign]
        step.onload(clock)
    return asleep


def test_RolloutStep_takes_memory_when_the_engines_of_all_ranks_sleep():
    assert run_ranks(onload_after_all_engines_sleep, 2) == [[True, True]] * 2
