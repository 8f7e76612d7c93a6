"""A plan with remote engines: its loop in seconds, and the steps that simulation gives for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from pyrl_ext.plan.forecast.ahead import simulate
from pyrl_ext.plan.forecast.hardware import gpu_of
from pyrl_ext.plan.forecast.loop import Group, Loop, Steady, Trajectory
from pyrl_ext.plan.forecast.rollout_time import Decoder
from pyrl_ext.plan.forecast.step_time import StepTime
from pyrl_ext.plan.forecast.workload import step_samples
from pyrl_ext.plan.plan import Plan

AHEAD = (0, 1, 2)
"""Values of rollout.ahead that a plan is shown with, next to its own."""


def steady_states(
    plan: Plan, time: StepTime, ahead: Sequence[int] | None = None
) -> tuple[Steady, ...]:
    """A step of the plan with each value of rollout.ahead.

    Args:
        time: of a step; its parts are those of the simulated one
        ahead: rising; None: `AHEAD`, and the plan's value
    """
    numbers = sorted({*AHEAD, plan.rollout.ahead}) if ahead is None else ahead
    return tuple(replace(simulate(loop_of(plan, time, number)), ahead=number) for number in numbers)


def loop_of(plan: Plan, time: StepTime, ahead: int) -> Loop:
    """The plan's loop with another `ahead`. Raises `ValueError` where the plan names no GPU.

    One step of it is kept for groups that are carried to the next step, so that no token is older.
    """
    gpu = gpu_of(plan)
    if gpu is None:
        raise ValueError("loop_of: hardware.gpu is null, expected a GPU")
    engine = Decoder(plan, gpu)
    beside = ahead > 0 and plan.rollout.overlap_publish
    carries = ahead > 0 and plan.prompts_asked > plan.batching.prompts
    return Loop(
        engines=plan.num_engines,
        slots=engine.running,
        token=cache(engine.token_seconds),
        read=cache(engine.read_seconds),
        train=time.trainer,
        publish=time.seconds("publish"),
        gather=time.of("publish", "gather weights") if beside else None,
        beside=time.seconds("old_logprobs") if beside else 0.0,
        groups=_groups(plan),
        keep=plan.batching.prompts,
        ahead=ahead - (carries and plan.rollout.too_old == "drop"),
        carry=carries,
        pause=plan.rollout.pause,
    )


def _groups(plan: Plan) -> Callable[[int], Sequence[Group]]:
    """The groups that each step asks for: those of `step_samples`, from another one on."""
    samples = step_samples(plan)
    size = plan.batching.samples_per_prompt
    each = [
        tuple(Trajectory(one.prompt, (one.response,)) for one in samples[first : first + size])
        for first in range(0, len(samples), size)
    ]

    @cache
    def asked(step: int) -> Sequence[Group]:
        return [each[(step * 7 + i) % len(each)] for i in range(plan.prompts_asked)]

    return asked
