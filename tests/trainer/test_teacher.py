"""On-policy distillation: a teacher's log-probs in the advantages, against transformers'."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext.data.files import DataError
from pyrl_ext.data.mixed_prompts import MixedPrompts
from pyrl_ext.megatron.logprob_head import TeacherOutput
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.language.errors import ConfigError
from pyrl_ext.plan.model.units import size
from pyrl_ext.plan.show.summary import facts
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers import teachers
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, QUICK, tiny_plan

pytestmark = pytest.mark.multiprocess

STATES = "teacher's hidden states"


def plan_with(folder: Path, *overrides: str) -> Plan:
    return tiny_plan(*QUICK, f"teacher.model={folder}", "objective.distill_coef=0.5", *overrides)


@pytest.mark.parametrize("write", [teachers.write_dense, teachers.write_sparse])
def test_the_teacher_is_in_the_advantages(write: Any, tmp_path: Path):
    model = write(tmp_path / "teacher")
    plan = plan_with(
        tmp_path / "teacher", "objective.distill_clip=0.7", "objective.normalize_std=false"
    )
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        tokens = [sample.tokens.clone() for sample in rollout.samples]
        shard = step.batch_of(rollout, clock)
        index = rollout.index
        shard, _ = step.score(shard, index, clock)
        columns = {name: column.double() for name, column in shard.columns.items()}
        found = step.weighed
        rows = torch.from_numpy(shard.lengths.sample_of(shard.rows.tokens))
        teacher = columns["teacher_logprobs"]
        gaps: list[float] = []
        for number, sample in enumerate(tokens):
            here = rows == number
            want = teachers.logprobs(model, sample)
            mask = columns["loss_mask_0"][here].bool()
            assert torch.allclose(teacher[here][mask], want[mask], atol=2e-4)
            group = index.rewards[index.groups == index.groups[number]]
            own = index.rewards[number] - group.mean()
            gap = torch.where(mask, want - columns["old_logprobs"][here], 0)
            assert torch.allclose(
                columns["advantages"][here], own + 0.5 * gap.clamp(-0.7, 0.7), atol=2e-4
            )
            gaps += gap[mask].tolist()
    cut = sum(abs(gap) > 0.7 for gap in gaps)
    assert 0 < cut < len(gaps)
    assert found["policy/teacher_clip_fraction"] == pytest.approx(cut / len(gaps), abs=0.01)
    assert found["policy/teacher_kl"] == pytest.approx(-sum(gaps) / len(gaps), rel=1e-3)


def test_without_rewards_the_teacher_alone_is_the_advantage(tmp_path: Path):
    teachers.write_dense(tmp_path / "teacher")
    plan = tiny_plan(
        *QUICK[2:],
        "batching.prompts=16",
        "batching.samples_per_prompt=1",  # there are no rewards to compare
        f"teacher.model={tmp_path / 'teacher'}",
        "objective=opd",
    )
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        shard, scores = step.score(step.batch_of(rollout, clock), rollout.index, clock)
        assert rollout.index.rewards.any()
        columns = shard.columns
        gap = columns["teacher_logprobs"] - columns["old_logprobs"]
        mask = columns["loss_mask_0"]
        assert torch.equal(columns["advantages"][mask], gap[mask])
        assert not columns["advantages"][~mask].any()
        metrics = step.metrics(rollout.index, shard, scores)
        assert "reward" in metrics and "rollout/flat_groups" not in metrics


def test_grpo_opd_adds_the_teacher_to_the_advantages_of_grpo(tmp_path: Path):
    """Standardized by the group, with the mean over trajectories of token means."""
    teachers.write_dense(tmp_path / "teacher")
    plan = tiny_plan(*QUICK, f"teacher.model={tmp_path / 'teacher'}", "objective=grpo_opd")
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        index = rollout.index
        shard, _ = step.score(step.batch_of(rollout, clock), index, clock)
        columns = shard.columns
        rows = shard.lengths.sample_of(shard.rows.tokens)
    own: list[float] = []
    for reward, group in zip(index.rewards, index.groups, strict=True):
        rewards = index.rewards[index.groups == group]
        own.append((reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))
    assert any(own)
    mask = columns["loss_mask_0"]
    gap = columns["teacher_logprobs"] - columns["old_logprobs"]
    want = torch.tensor(own)[torch.from_numpy(rows)] + gap
    assert torch.allclose(columns["advantages"][mask].double(), want[mask].double(), atol=1e-4)
    assert "weights" in columns  # of the reduction: sequence


def test_each_source_has_its_teacher(tmp_path: Path):
    models = {
        "copied": teachers.write_dense(tmp_path / "dense"),
        "sorted": teachers.write_sparse(tmp_path / "sparse"),
    }
    sources = f"{{copied: {{task: copy}}, sorted: {{task: sort, teacher: {tmp_path / 'sparse'}}}}}"
    plan = plan_with(
        tmp_path / "dense", "data.task=null", "data.task_options={}", f"data.sources={sources}"
    )
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        samples = [*rollout.samples]
        shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock)
        columns = shard.columns
        found = columns["teacher_logprobs"].double()
        metrics = step.weighed
        rows = torch.from_numpy(shard.lengths.sample_of(shard.rows.tokens))
        prompts = step.rollouts.source.prompts
        assert isinstance(prompts, MixedPrompts)
        taught = [prompts.source_of(sample.prompt_id) for sample in samples]
        for number, sample in enumerate(samples):
            want = teachers.logprobs(models[taught[number]], sample.tokens)
            part = columns["loss_mask_0"][rows == number]
            assert torch.allclose(found[rows == number][part], want[part], atol=2e-4)
    assert {*taught} == {*models}
    mask = columns["loss_mask_0"]
    gaps = columns["old_logprobs"].double() - found
    whole = metrics["policy/teacher_kl"] * int(mask.sum())
    for name in models:
        own = [taught[number] == name for number in rows.tolist()]
        here = gaps[mask & torch.tensor(own)]
        assert metrics[f"source/{name}/teacher_kl"] == pytest.approx(float(here.mean()))
        whole -= float(here.sum())
    assert whole == pytest.approx(0, abs=1e-3)
    lines = [line for name, line in facts(plan) if name == "teacher"]
    of_sources = [f"{tmp_path / 'dense'} of copied, on", f"{tmp_path / 'sparse'} of sorted, on"]
    assert [line.partition(" the trainer's ranks, ")[0] for line in lines] == of_sources
    memory = {item.name for stage in stage_memory(plan) for item in stage.items}
    assert {"teacher", "teacher 2"} <= memory


def test_a_teacher_with_other_tokens_is_refused_before_a_model_is_built(tmp_path: Path):
    folder = tmp_path / "teacher"
    teachers.write_dense(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    plan = plan_with(folder)
    with topology.start(plan) as topo, pytest.raises(DataError, match=r"differs .* in 2 tokens"):
        RolloutStep.build(plan, topo)


def test_a_token_that_the_teacher_does_not_have_is_refused(tmp_path: Path):
    """The policy draws ids that its embedding has beyond the tokenizer's, the teacher's has not."""
    teachers.write_dense(tmp_path / "teacher", vocab_size=128)
    config = json.loads((teachers.TINY / "config.json").read_text()) | {"vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_with(tmp_path / "teacher", f"model.config={tmp_path / 'config.json'}")
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        with pytest.raises(DataError, match=r"a sample has token \d+, expected ids below 128"):
            step.batch_of(step.take(0, clock), clock)


def test_the_plan_counts_the_teacher(tmp_path: Path):
    model = teachers.write_dense(tmp_path / "teacher")
    plan = plan_with(tmp_path / "teacher", "parallel.pp=2")
    held = [
        item.bytes for stage in stage_memory(plan) for item in stage.items if item.name == "teacher"
    ]
    assert sum(held) == 4 * sum(weight.numel() for weight in model.parameters())
    first, last = stage_memory(
        plan_with(tmp_path / "teacher", "parallel.pp=2", "objective.distill=forward")
    )
    assert first.bytes_of(STATES) == 0
    assert last.bytes_of(STATES) == 4 * 32 * plan.samples * plan.longest  # its width is 32
    (shared,) = stage_memory(
        plan_with(tmp_path / "teacher", "parallel.dp=2", "objective.distill=forward")
    )
    assert 2 * shared.bytes_of(STATES) == last.bytes_of(STATES)
    sampled = stage_memory(plan)[-1].bytes_of("logits")
    head_gradient = 4 * 128 * 64
    assert last.bytes_of("logits") == 6 * sampled + head_gradient
    line = dict(facts(plan))["teacher"]
    assert line == f"{tmp_path / 'teacher'}, on the trainer's ranks, {size(max(held))} a rank"
    assert Plan.from_json(plan.to_json()).teacher_plans == plan.teacher_plans
    assert Plan.from_json(plan.to_json()).fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    ("sizes", "override", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "parallel.tp=2", "parallel.tp: "),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "parallel.tp=2", "parallel.tp: "),
    ],
)
def test_a_teacher_that_the_layout_cannot_run_is_refused(
    sizes: dict[str, int], override: str, message: str, tmp_path: Path
):
    teachers.write_dense(tmp_path / "teacher", **sizes)
    with pytest.raises(ConfigError, match="on the ranks of the trainer") as caught:
        plan_with(tmp_path / "teacher", override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "override", "split"),
    [
        (3, "parallel.pp=2", [[(0, 1)], [(2,)]]),
        (3, "parallel.pp=4", [[(0,)], [(1,)], [(2,)], [()]]),
        (7, "parallel.vpp=2", [[(0, 1), (4, 5)], [(2, 3), (6,)]]),
    ],
)
def test_a_deeper_or_shallower_teacher_is_split_evenly(
    layers: int, override: str, split: Any, tmp_path: Path
):
    teachers.write_dense(tmp_path / "teacher", num_hidden_layers=layers)
    stages = ("parallel.pp=2",) if "vpp" in override else ()
    (teacher,) = plan_with(tmp_path / "teacher", override, *stages).teacher_plans.values()
    assert [[chunk.layers for chunk in stage] for stage in teacher.stages] == split


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "No such file or directory, expected an HF config.json"),
        ('{"model_type": "gpt2"}', "model_type is 'gpt2', expected one of"),
        ('{"model_type": "qwen3"}', "hidden_size"),
        ("{", "not JSON"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(written: str | None, message: str, tmp_path: Path):
    folder = tmp_path / "teacher"
    folder.mkdir()
    if written is not None:
        (folder / "config.json").write_text(written)
    overrides = (f"teacher.model={folder}", "objective.distill_coef=1")
    with pytest.raises(ConfigError, match=message):
        compile_plan(CONFIG, overrides)


def compared(plan: Plan) -> tuple[dict[str, float], dict[str, torch.Tensor], list[Any]]:
    """Metrics and gradients of the first update of a step, and its samples with their masks."""
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        samples = [(sample.tokens.clone(), sample.loss_mask.clone()) for sample in rollout.samples]
        shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock)
        metrics = step.policy.accumulate(shard, step.loss)
        gradients = {name: value.clone() for name, value in step.policy.gradients()}
    return metrics, gradients, samples


def divergences(
    student: Any, teacher: Any, samples: list[Any], kind: str, share: float = 0.5
) -> tuple[torch.Tensor, int]:
    """The sum over loss tokens of the divergences of transformers' two models, and their number."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for tokens, mask in samples:
        ours = student(tokens[None].long()).logits[0, :-1].double().log_softmax(-1)
        with torch.no_grad():
            theirs = teacher(tokens[None].long()).logits[0, :-1].double()
        theirs = theirs[:, : ours.shape[1]].log_softmax(-1)
        values = teachers.divergence(ours, theirs, kind, share)
        total = total + values[mask[1:]].sum()
        count += int(mask[1:].sum())
    return total, count


def write_tied(folder: Path) -> Any:
    """A teacher whose head is its embedding."""
    return teachers.write_dense(folder, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("kind", "share", "write"),
    [
        ("reverse", 0.5, partial(teachers.write_sparse, seed=3)),
        ("forward", 0.5, write_tied),
        ("js", 0.3, teachers.write_dense),
    ],
)
def test_distributions_are_compared_over_the_vocabulary(
    kind: str, share: float, write: Any, tmp_path: Path
):
    """The divergence and its gradient are those of transformers' two models."""
    teacher = write(tmp_path / "teacher")
    student = teachers.write_sparse(tmp_path / "student")
    plan = plan_with(
        tmp_path / "teacher",
        f"model.weights={tmp_path / 'student'}",
        f"objective.distill={kind}",
        f"objective.distill_share={share}",
        "objective.advantage=none",
        "objective.entropy_coef=0",
        "batching.minibatches=1",
    )
    metrics, gradients, samples = compared(plan)
    total, count = divergences(student, teacher, samples, kind, share)
    loss = 0.5 * total / count
    want = float(loss.detach())
    assert metrics["policy/divergence"] == pytest.approx(2 * want, rel=1e-4)
    assert metrics["loss"] == pytest.approx(want, rel=1e-4)
    assert metrics["loss/distill"] == pytest.approx(want, rel=1e-4)
    loss.backward()
    for name, parameter in student.named_parameters():
        if name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
            found = gradients[name].double()
            want = parameter.grad.double()
            assert (found - want).norm() < 2e-3 * want.norm(), name


def stepped(plan: Plan) -> list[dict[str, float]]:
    """Metrics of two steps; with offloading, frozen models are away while the engine generates."""
    clock = Clock()
    found: list[dict[str, float]] = []
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        assert step.reference is not None
        frozen = [step.reference, *step.teachers.values()]
        for number in range(2):
            step.sync_weights(number, clock)
            for each in frozen:
                sizes = {
                    x.untyped_storage().size() for m in each.llm.models for x in m.parameters()
                }
                assert (sizes == {0}) == (plan.rollout.offload_trainer == "all")
            rollout = step.take(number, clock)
            step.onload(clock)
            shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock)
            found.append(step.update(shard, clock) | step.weighed)
    return found


def test_frozen_models_are_offloaded_while_the_engine_generates(tmp_path: Path):
    teachers.write_dense(tmp_path / "teacher")
    plan = plan_with(tmp_path / "teacher", "objective.kl_coef=0.1")
    # a rule refuses it on a CPU, where it serves no purpose
    rollout = plan.rollout.model_copy(update={"offload_trainer": "all"})
    away = plan.model_copy(update={"rollout": rollout})
    for one, other in zip(stepped(away), stepped(plan), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    for name in ("teacher", "reference"):
        items = [i for stage in stage_memory(away) for i in stage.items if i.name.startswith(name)]
        assert [(item.name, item.host) for item in items] == [
            (name, False),
            (f"{name} on the host", True),
        ]
        assert "rollout" not in items[0].phases


@pytest.mark.parametrize("override", ["teacher.dtype=bfloat16", "model.dtype=bfloat16"])
def test_distributions_of_bfloat16_models_are_compared(override: str, tmp_path: Path):
    teacher = teachers.write_dense(tmp_path / "teacher")
    student = teachers.write_sparse(tmp_path / "student")
    student_weights = f"model.weights={tmp_path / 'student'}"
    overrides = (student_weights, "objective.distill=js", "batching.minibatches=1", override)
    plan = plan_with(tmp_path / "teacher", *overrides)
    metrics, _, samples = compared(plan)
    total, count = divergences(student, teacher, samples, "js")
    assert metrics["policy/divergence"] == pytest.approx(float(total.detach()) / count, rel=0.05)


def heads_on_ranks(group: Any) -> None:
    rows = 12 // group.size()
    whole = torch.arange(24.0).view(12, 2)
    padded = torch.cat([whole, torch.zeros(24, 2)])
    output = TeacherOutput(group)
    output.head = whole[group.rank() * rows :][:rows]
    for columns in (4, 6, 8, 12, 15):
        want = padded[group.rank() * columns :][:columns]
        assert torch.equal(output.head_for(columns), want), columns


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_head_is_cut_and_padded_to_the_columns_of_the_policy(world_size: int):
    run_ranks(heads_on_ranks, world_size)


def test_mtp_layers_predict_next_to_a_compared_teacher(tmp_path: Path):
    """Their loss is that of log-probs, and the divergence that of the next token alone."""
    teachers.write_dense(tmp_path / "teacher")
    config = json.loads((CONFIG.parent / "tiny/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    overrides = ("objective.distill=js", "batching.minibatches=1")
    without, _, _ = compared(plan_with(tmp_path / "teacher", *overrides))
    keys = (f"model.config={tmp_path / 'config.json'}", "model.mtp=true")
    metrics, _, _ = compared(plan_with(tmp_path / "teacher", *overrides, *keys))
    assert metrics["policy/divergence"] == pytest.approx(without["policy/divergence"], rel=1e-4)
    assert 4 < metrics["mtp_loss"] < 6  # near the logarithm of the 128 tokens, 4.9
