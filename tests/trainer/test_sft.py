"""Steps of fine-tuning: the same loss and gradient however records are packed and spread, resumed
runs, and a loss that falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext import train
from pyrl_ext.data.recordings import load_samples
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.trainer.sft import SftStep
from tests.helpers.configs import CONFIGS
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import numbers
from tests.helpers.tiny import CONFIG as TINY
from tests.helpers.tiny import QUICK, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

CONFIG = CONFIGS / "tiny_sft.yaml"
SMALL = ("batching.samples=6", "data.held_out=3")  # two minibatches
DYNAMIC = ("parallel.dp=2", "parallel.dynamic_cp=2")
LAYOUTS = [
    ("parallel.dp=2",),
    ("parallel.cp=2",),
    ("parallel.pp=2",),
    (*DYNAMIC, "batching.tokens_per_microbatch=96"),  # the longest records on both ranks
    (*DYNAMIC, "batching.tokens_per_microbatch=4096"),
]


def of_a_step(*overrides: str) -> dict[str, Any]:
    """Loss and gradient of the first minibatch, and the loss held out."""
    plan = tiny_plan(*SMALL, *overrides, config=CONFIG)
    clock = Clock()
    with topology.start(plan) as topo:
        step = SftStep.build(plan, topo)
        held_out = step.evaluate(clock)["eval_loss"]
        rollout = step.take(3, clock)
        owned = len(rollout.samples)
        shard = step.batch_of(rollout, clock)
        losses = [step.policy.accumulate(shard.minibatch(0), step.loss)["loss"]]
        gradients = {name: tensor.clone() for name, tensor in step.policy.gradients()}
        metrics = step.metrics(rollout.index, shard, None)
        return {
            "losses": [held_out, *losses],
            "gradients": gradients,
            "lengths": rollout.index.seqlens.tolist(),
            "owned": owned,
            "counts": {n: v for n, v in metrics.items() if n.startswith("data/")},
        }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return of_a_step()


def assert_equal(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert found["lengths"] == alone["lengths"]
    assert found["gradients"].keys() == alone["gradients"].keys()
    for name, wanted in alone["gradients"].items():
        torch.testing.assert_close(
            found["gradients"][name],
            wanted,
            rtol=0,
            atol=2e-6 * max(1.0, float(wanted.abs().max())),
        )
    for name in ("data/tokens", "data/loss_tokens", "data/longest"):
        assert found["counts"][name] == alone["counts"][name]


@pytest.mark.parametrize(
    "overrides",
    [
        ("batching.tokens_per_microbatch=4096",),
        ("batching.tokens_per_microbatch=191",),
        ("logprob.head=logits",),
        ("logprob.loss_in_chunk=true",),
    ],
)
def test_SftStep_does_not_depend_on_microbatches_and_the_head(overrides, alone):
    assert_equal(of_a_step(*overrides), alone)
    assert alone["counts"]["data/padding"] == 0 and alone["owned"] == 6


def on_rank(_group: Any) -> list[dict[str, Any]]:
    return [of_a_step(*layout) for layout in LAYOUTS]


def test_SftStep_does_not_depend_on_the_layout(alone):
    for rank in run_ranks(on_rank, 2):
        for found in rank:
            assert_equal(found, alone)
            assert found["owned"] == 3  # half of the records were read on each
        assert rank[1]["counts"]["data/padding"] > 0  # sequences are cut into 2 cp chunks


def test_SftStep_has_the_mean_over_tokens_of_the_minibatch_as_loss(alone):
    """Not a mean of means: records of many tokens count for more."""
    plan = tiny_plan(*SMALL, "batching.minibatches=1", config=CONFIG)
    clock = Clock()
    with topology.start(plan) as topo:
        step = SftStep.build(plan, topo)
        rollout = step.take(3, clock)
        shard = step.batch_of(rollout, clock)
        logprobs = step.policy.scores(shard, replay=False).logprobs
        mask = shard.columns["loss_mask_0"]
        (whole,) = [step.policy.accumulate(shard.minibatch(0), step.loss)["loss"]]
    assert whole == pytest.approx(-float(logprobs[mask].double().mean()), rel=1e-6)
    tokens = rollout.index.loss_tokens[:, 0]
    assert len({*tokens.tolist()}) > 3


def run(folder: Path, *overrides: str) -> int:
    quick = ("batching.samples=16", "evaluate.every=3", "log.progress=false")
    return train.main([str(CONFIG), f"run={folder}", *quick, *overrides])


def test_train_sft_resumes_exactly_and_its_loss_falls(tmp_path: Path, capsys):
    assert run(tmp_path / "whole", "steps=12") == 0
    printed = capsys.readouterr().out
    assert "countdown.jsonl: 320 records, 32 more held out; 12," in printed
    assert "eval loss end" in printed and "loss first" in printed
    assert run(tmp_path / "parts", "steps=5") == 0
    assert run(tmp_path / "parts", "steps=12") == 0
    rows = numbers(tmp_path / "whole")
    assert numbers(tmp_path / "parts") == [r for r in rows]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 12 and losses[0] > 4.4 and losses[-1] < 2.6
    evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert len(evaluated) == 5 and evaluated[0] > 4.4 and evaluated[-1] < 2.6
    assert rows[-2]["data/epoch"] == pytest.approx(12 * 16 / 320)
    assert (tmp_path / "whole/report.png").stat().st_size > 10_000


def test_train_sft_lists_broken_records_before_a_model_is_built(
    tmp_path: Path, capsys, monkeypatch
):
    path = tmp_path / "a.jsonl"
    good = {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}
    bad = [{"tokens": [5, 200], "loss_mask": [0, 1]}, {"messages": []}]
    path.write_text("".join(json.dumps(each) + "\n" for each in (good, *bad)))
    monkeypatch.setattr("pyrl_ext.trainer.policy.Policy.build", None)
    assert run(tmp_path / "run", f"data.path={path}", "data.held_out=1") == 1
    error = capsys.readouterr().err
    assert f"{path}: 2 of 3 records cannot be used" in error
    assert f"{path}:2: tokens[1] is 200, expected 0 to 127, a token of the model" in error
    assert f"{path}:3: messages [], expected a non-empty list" in error


def test_fine_tuning_reads_the_samples_that_a_teacher_recorded(tmp_path: Path):
    """The policy begins with the teacher's weights: its loss is that of the engine's log-probs."""
    teacher = (str(TINY), f"run={tmp_path / 'taught'}", *QUICK, "optimizer.lr=0", "steps=2")
    assert train.main([*teacher, "evaluate.every=0", "rollout.record=samples"]) == 0
    folder = tmp_path / "taught/samples"
    logprobs: list[list[float]] = []
    for file in sorted(folder.glob("*.safetensors")):
        for sample in load_samples(file):
            logprobs.append(sample.rollout_logprobs[sample.loss_mask].tolist())
    assert len(logprobs) == 32
    given = (f"run={tmp_path / 'run'}", f"data.path={folder}", "data.held_out=8", "steps=3")
    assert train.main([str(CONFIG), *given, "evaluate.every=3", "log.progress=false"]) == 0
    evaluated = [row["eval_loss"] for row in numbers(tmp_path / "run") if "eval_loss" in row]
    held_out = [logprob for own in logprobs[-8:] for logprob in own]
    assert evaluated[0] == pytest.approx(-sum(held_out) / len(held_out), abs=1e-4)
