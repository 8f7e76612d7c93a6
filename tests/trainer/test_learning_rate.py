"""The learning rate by step, against megatron-core's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from pyrl_ext.schedule.learning_rate import LearningRate, Schedule
from tests.helpers.tiny import tiny_plan

STEPS = 12


def megatrons(rate: LearningRate, step: int) -> float:
    """The learning rate that megatron-core's scheduler sets for the 0-based step."""
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rate.lr,
        min_lr=rate.min_lr,
        lr_warmup_steps=rate.warmup_steps,
        lr_decay_steps=rate.steps + 1,
        lr_decay_style="WSD" if rate.schedule == "wsd" else rate.schedule,
        wsd_decay_steps=rate.decay_steps + 1,
        lr_wsd_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    scheduler.step(step + 1)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 8])
def test_learning_rate_is_that_of_megatron_at_every_step(schedule: Schedule, warmup_steps: int):
    decay_steps = 4 if schedule == "wsd" else 0
    rate = LearningRate(0.8, 0.05, schedule, warmup_steps, decay_steps, STEPS)
    for step in range(STEPS + 3):
        assert rate(step) == pytest.approx(megatrons(rate, step), rel=1e-12, abs=1e-15)


def test_a_warmup_begins_with_its_part_and_a_schedule_ends_with_min_lr():
    rate = LearningRate(0.8, 0.1, "cosine", 4, 0, STEPS)
    assert [rate(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rate(STEPS) == pytest.approx(0.1)
    assert rate(STEPS - 1) > 0.1
    assert LearningRate(0.8, 0.1, "linear", STEPS, 0, STEPS)(STEPS - 1) == pytest.approx(0.8)


def test_the_plan_counts_the_optimizer_steps_of_the_run():
    plan = tiny_plan(
        "steps=3",
        "batching.minibatches=2",
        "batching.epochs=2",
        "optimizer.lr=0.8",
        "optimizer.warmup_steps=2",
        "optimizer.schedule=wsd",
        "optimizer.decay_steps=4",
        "optimizer.min_lr=0.4",
    )
    assert plan.learning_rate() == LearningRate(0.8, 0.4, "wsd", 2, 4, 12)
