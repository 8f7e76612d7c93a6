"""The loop of a run, its start and its end."""

from __future__ import annotations

import faulthandler
import gc
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from pyrl_ext.megatron.optimizer import name_of
from pyrl_ext.ops import check_extension, serve_gpu_from
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.atomic_write import locked
from pyrl_ext.parallel.heartbeat import Heartbeat, heartbeats
from pyrl_ext.parallel.hf_download import fetch
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.parallel.user_code import find_modules_in
from pyrl_ext.parallel.waiting import Stopped
from pyrl_ext.plan import ConfigError, Plan
from pyrl_ext.train.failure import report_failure, report_stop
from pyrl_ext.train.folder import RunFolder
from pyrl_ext.train.interrupt import Interrupt
from pyrl_ext.train.last_step import LastStep
from pyrl_ext.train.profile import peak_memory, profiled
from pyrl_ext.trainer.sft import SftStep
from pyrl_ext.trainer.step import RolloutStep, Step

STOPPED = 130  # exit code of a shell command that Ctrl-C ended


def train(plan: Plan, topo: Topology, heartbeat: Heartbeat) -> bool:
    """Run the plan from where its run folder stands; returns whether it reached its last step."""
    run = RunFolder(plan, topo)
    run.check()

    def enter(phase: str | None) -> None:
        heartbeat.enter(phase)
        run.enter(phase)

    clock = Clock(on_phase=enter)
    with (
        closing(build_step(plan, topo, run.note)) as step,
        Interrupt().handled() as interrupt,
    ):
        policy = step.policy
        if topo.is_main and policy.llm.optimizer is not None:
            print(f"optimizer: {name_of(policy.llm.optimizer)}", flush=True)
        run.resume(policy)
        last = LastStep(run, step)
        with last.kept():
            run_steps(step, run, clock, last, heartbeat, interrupt)
            finish(step, run, clock)
    return policy.step >= plan.steps


def run_steps(
    step: Step,
    run: RunFolder,
    clock: Clock,
    last: LastStep,
    heartbeat: Heartbeat,
    interrupt: Interrupt,
) -> None:
    """Train from the step where the policy stands to the plan's last one, or until Ctrl-C."""
    plan = run.plan
    topo = run.topo
    policy = step.policy
    first = policy.step
    for number in range(first, plan.steps):
        heartbeat.step = number
        if topo.world is not None and topo.is_main:
            heartbeat.advice = last.advice()
        with profiled(plan, topo.device, number), clock("time/step"):
            row = {"step": number} | step.sync_weights(number, clock)
            if plan.evaluate_every and number % plan.evaluate_every == 0:
                row |= step.evaluate(clock)
                run.record_evaluation(number, step.evaluated)
            rollout = step.take(number, clock)
            run.record(number, [*rollout.samples, *rollout.dropped])
            row |= step.onload(clock)
            shard = step.batch_of(rollout, clock)
            index = rollout.index
            check = number == first or plan.rollout.max_mismatch is not None
            shard, old = step.score(shard, index, clock, check)
            run.record_scores(number, index, shard, old)
            with last.updating():
                row |= step.update(shard, clock)
                policy.step = number + 1
        row |= step.metrics(index, shard, old) | speed(clock, index)
        run.write(row | peak_memory(topo.device))
        stop = interrupt.agreed()
        if stop or run.due(policy):
            with clock("time/checkpoint"):  # counted in the next row
                run.save(policy)
        if stop:
            break


def build_step(plan: Plan, topo: Topology, show: Callable[[str], None] | None = None) -> Step:
    """Everything the plan names; bad data, rewards or losses fail before a model is built.

    Args:
        show: takes a line of text as samples come.
    """
    if plan.has_rollouts:
        return RolloutStep.build(plan, topo, show)
    return SftStep.build(plan, topo)


def speed(clock: Clock, index: BatchIndex) -> dict[str, float]:
    seconds = clock.take()
    return seconds | {"tokens_per_s": int(index.starts[-1]) / seconds["time/step"]}


def finish(step: Step, run: RunFolder, clock: Clock) -> None:
    """After the last step: evaluate the final weights once more, and report."""
    reached = step.policy.step
    if reached == run.plan.steps and run.plan.evaluate_every:
        step.sync_weights(reached, clock)
        last = {"step": reached} | step.evaluate(clock)
        run.record_evaluation(reached, step.evaluated)
        step.onload(clock)
        run.write(last | clock.take())
    run.close()
    run.report()
    if run.topo.is_main and reached < run.plan.steps:
        print(f"stopped after step {reached}; the same command resumes from here", flush=True)


def start(plan: Plan) -> int:
    """Run the plan on this rank; returns the exit code: 0, 1, 2 or `STOPPED`."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
    serve_gpu_from(plan.kernels.backend)
    find_modules_in(plan.resolve("."))  # a config may name functions next to it
    run = Path(plan.run)
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a crash of native code prints the Python stack
    try:
        check_extension()
        with (
            topology.start(plan) as topo,
            heartbeats(topo) as heartbeat,
            locked(run, topo.is_main, topo.world),
        ):
            for note in plan.notes * topo.is_main:  # old names of keys, and what else may surprise
                print(f"note: {note}", flush=True)
            plan = fetch(plan, topo)
            done = train(plan, topo, heartbeat)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Stopped) as stop:
        report_stop(plan, stop)
        gc.freeze()  # the last collection of what was imported takes a second
        return STOPPED
    except BaseException as error:  # SystemExit of user code too: an unfinished run is no success
        report_failure(run, error)
        return 1
    return 0 if done else STOPPED
