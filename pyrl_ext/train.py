"""``python -m pyrl_ext.train CONFIG [section.key=value ...]``: compile the plan and run it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pyrl_ext.data.source import Source, build_source
from pyrl_ext.dist import topology
from pyrl_ext.dist.clock import Clock
from pyrl_ext.dist.disk import locked
from pyrl_ext.dist.heartbeat import Heartbeat, heartbeats
from pyrl_ext.dist.hub import fetch
from pyrl_ext.dist.topology import Topology
from pyrl_ext.loss.registry import build_advantage, build_loss
from pyrl_ext.metrics.mismatch import mismatch
from pyrl_ext.models import family
from pyrl_ext.ops import serve_gpu_from
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.schedule import Schedule, plan_microbatches
from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.forecast.phases import OFFLOADED
from pyrl_ext.rollout.build import build_engine, sampling_of
from pyrl_ext.rollout.distribute import RolloutRequest, generate_on_ranks
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.run.failure import no_silent_exit, report_failure
from pyrl_ext.run.folder import RunFolder
from pyrl_ext.run.interrupt import Interrupt
from pyrl_ext.samples import Sample, Sampling
from pyrl_ext.trainer.policy import Policy, Scores
from pyrl_ext.weights.check import (
    check_batch,
    engine_tensor_names,
    full_check,
    mismatch_limit,
    sync_weights,
)

STOPPED = 130  # exit code of a shell command that Ctrl-C ended


def train(plan: Plan, topo: Topology, heartbeat: Heartbeat) -> bool:
    """Run the plan from where its run folder stands; whether it reached its last step."""
    run = RunFolder(plan, topo)
    run.check()
    source = build_source(plan)  # bad prompts, rewards or objectives end here, before any model
    advantage, loss = build_advantage(plan.objective), build_loss(plan.objective)
    policy = Policy.build(plan, topo)
    reference = Policy.build(plan, topo, trainable=False) if plan.objective.kl_coef else None
    experts = plan.sizes.num_experts
    layers = plan.router_layers if plan.replay.enabled else None  # None: routes are not needed

    clock = Clock(on_phase=heartbeat.enter)
    with (
        closing(Rollouts(plan, topo, source, run.note)) as rollouts,
        Interrupt(topo.device).watched() as interrupt,
    ):
        run.resume(policy)
        first = policy.step
        for step in range(first, plan.steps):
            heartbeat.step = step
            with clock("time/step"):
                with clock("time/publish"):
                    row = {"step": step} | rollouts.publish(policy, step, clock)
                if plan.evaluate.every and step % plan.evaluate.every == 0:
                    with clock("time/eval"):
                        row["eval_reward"] = rollouts.held_out_reward()
                with clock("time/rollout"):
                    samples = rollouts.train(step)
                run.record(step, samples)
                row |= rollouts.rest(policy, clock)
                batch = Batch.of(samples, advantage, num_experts=experts, layer_ids=layers)
                whole = schedule(plan, batch)
                with clock("time/old_logprobs"):
                    old = policy.scores(batch, whole, plan.replay.old)
                if step == first or plan.rollout.max_mismatch is not None:
                    check_first_batch(rollouts, policy, batch, old)
                batch = batch.with_(old_logprobs=old.logprobs)
                if reference is not None:
                    with clock("time/ref_logprobs"):
                        ref = reference.scores(batch, whole, plan.replay.reference)
                    batch = batch.with_(ref_logprobs=ref.logprobs)
                with clock("time/update"):
                    parts = batch.split(plan.batching.minibatches)
                    row |= mean([policy.update(p, schedule(plan, p), loss) for p in parts])
            policy.step = step + 1
            if plan.replay.enabled:
                models = [m for m in (policy, reference) if m is not None]
                row["time/replay"] = sum(sum(m.llm.replay.clock.take().values()) for m in models)
            run.write(
                row | batch.stats() | rollouts.aborted | compare(batch, old) | speed(clock, batch)
            )
            stop = interrupt.agreed()
            if stop or run.due(policy):
                with clock("time/checkpoint"):  # in the next row: this one must not wait for it
                    run.save(policy)
            if stop:
                break
        finish(policy, rollouts, run, clock)
    return policy.step >= plan.steps


def schedule(plan: Plan, batch: Batch) -> Schedule:
    """Which samples run together on which data-parallel rank."""
    sizes = plan.parallel
    tokens = plan.batching.tokens_per_microbatch
    return plan_microbatches(batch.seqlens, sizes.dp, tokens, plan.row_alignment, sizes.cp)


class Rollouts:
    """The engine of this rank, fed with its share of the plan's prompts.

    Args:
        show: takes a line of text as samples come.

    Attributes:
        aborted: metrics of the last `train`, about the groups that were not waited for.
    """

    def __init__(
        self,
        plan: Plan,
        topo: Topology,
        source: Source,
        show: Callable[[str], None] | None = None,
    ):
        self.plan, self.source, self.show = plan, source, show
        self.aborted: dict[str, float] = {}
        self.engine: Engine = build_engine(plan, topo.device, topo.rank)
        if plan.replay.enabled and not self.engine.capabilities.routes:
            raise ValueError(
                f"replay: the {plan.rollout.engine} engine returns no routes, expected one that "
                "does. Use replay=off, or an engine and a model with routers"
            )
        self.group = torch.distributed.group.WORLD if topo.world_size > 1 else None

    def close(self) -> None:
        self.engine.close()

    def publish(self, policy: Policy, version: int, clock: Clock) -> dict[str, float]:
        """Send the weights to the engine and offload what `rollout.offload_trainer` names (weights
        last: the engine reads them). Returns metrics."""
        away = OFFLOADED[self.plan.rollout.offload_trainer]
        freed = 0
        for part in (p for p in away if p != "weights"):
            with clock("time/offload"):
                freed += policy.offload(part)
        row = sync_weights(
            self.engine,
            policy.weights(),
            engine_names(policy),
            version,
            dtype=getattr(torch, self.plan.rollout_dtype),
            check=self.plan.rollout.check_tensors,
            seed=self.plan.seed,
        )
        if "weights" in away:
            with clock("time/offload"):
                freed += policy.offload("weights")
        return row | {"memory/offloaded": freed} if away else row

    def rest(self, policy: Policy, clock: Clock) -> dict[str, float]:
        """Put the engine to sleep and bring the trainer back onto the device. Returns metrics."""
        sleeps, found = self.plan.engine_sleeps, {}
        if sleeps or self.plan.rollout.offload_trainer != "none":
            with clock("time/onload"):
                if sleeps:
                    found["memory/engine_slept"] = self.engine.sleep()
                policy.onload()
        return found

    def train(self, step: int) -> list[Sample]:
        """The scored samples of a step, alike on every rank.

        The prompts of a step are a function of its number. Those that are aborted come again as
        often as any other: in the next epoch.
        """
        keep = self.plan.batching.prompts
        prompts = self.source.prompts.take(step, self.plan.prompts_asked)
        sampling = sampling_of(self.plan, self.source, step)
        samples, lost = self._generate(prompts, sampling, keep)
        if len(prompts) > keep:
            self.aborted = {
                "rollout/aborted_groups": len(prompts) - keep,
                "rollout/aborted_tokens": lost,
            }
        return samples

    def held_out_reward(self) -> float:
        """Mean reward on held-out prompts, one response each, the likeliest token every time."""
        prompts = self.source.prompts.held_out(self.plan.evaluate.prompts)
        sampling = sampling_of(self.plan, self.source, 0)
        sampling = replace(sampling, greedy=True, samples_per_prompt=1)
        samples, _ = self._generate(prompts, sampling, len(prompts))
        return sum(s.reward for s in samples) / len(samples)

    def _generate(self, prompts: list, sampling: Sampling, keep: int) -> tuple[list[Sample], int]:
        scorer = self.source.scorer(prompts)
        asked, held = RolloutRequest(prompts, sampling, keep), self.plan.engine_of_rank
        return generate_on_ranks(self.engine, asked, scorer, self.group, held, self.show)


def engine_names(policy: Policy) -> list[str]:
    """The checkpoint tensors that an engine holds."""
    names = (name for row in policy.llm.table for name in row.hf)
    return engine_tensor_names(names, policy.plan.sizes.num_hidden_layers)


def check_first_batch(rollouts: Rollouts, policy: Policy, batch: Batch, old: Scores) -> None:
    """Stop before the update if trainer and engine disagree about the tokens of ``batch``."""
    plan, agreement = policy.plan, old.agreement.items()
    check_batch(
        batch,
        old.logprobs,
        mismatch_limit(plan),
        partial(
            full_check,
            rollouts.engine,
            policy.weights,
            engine_names(policy),
            policy.step,
            dtype=getattr(torch, plan.rollout_dtype),
            slept=plan.engine_sleeps,
        ),
        step=policy.step,
        agreement={layer: share / count for layer, (share, _, count) in agreement if count},
        group=rollouts.group,
    )


def compare(batch: Batch, old: Scores) -> dict[str, float]:
    """How far trainer and engine are apart, in log-probs and in routes of the same tokens."""
    row = mismatch(old.logprobs, batch.rollout_logprobs, batch.loss_mask)
    if old.agreement:
        share, exact, count = (sum(x) for x in zip(*old.agreement.values(), strict=True))
        row |= {"route/agree_topk": share / count, "route/exact_set": exact / count}
        for layer, each in old.agreement.items():
            row[f"route/agree_topk/layer_{layer}"] = each.share / each.rows
    return row


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step's updates, averaged."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def speed(clock: Clock, batch: Batch) -> dict[str, float]:
    seconds = clock.take()
    return seconds | {"tokens_per_s": sum(batch.seqlens) / seconds["time/step"]}


def finish(policy: Policy, rollouts: Rollouts, run: RunFolder, clock: Clock) -> None:
    """After the last step: one more evaluation, of the final weights, and the report."""
    if policy.step == run.plan.steps and run.plan.evaluate.every:
        rollouts.publish(policy, policy.step, clock)
        last = {"step": policy.step, "eval_reward": rollouts.held_out_reward()}
        rollouts.rest(policy, clock)
        run.write(last | clock.take())
    run.close()
    run.report()
    if run.topo.is_main and policy.step < run.plan.steps:
        print(f"stopped after step {policy.step}; the same command resumes from here", flush=True)


def load_kernels(plan: Plan, topo: Topology) -> None:
    """Let Triton load the kernels that were compiled for this plan, and say so."""
    if (folder := plan.kernels.prebuilt) is None:
        return
    from pyrl_ext.ops import prebuilt  # needs Triton

    config = family(plan.model.family).config(plan.sizes)
    launches = prebuilt.use(plan, config, Path(folder))
    if topo.is_main:
        print(f"kernels: {launches} kinds of Triton launches are prebuilt in {folder}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: the last step is done; 1: failed, with the reason; 2: the plan does not hold;
    130: Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m pyrl_ext.train", description=__doc__)
    parser.add_argument("config", help="the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    options = parser.parse_intermixed_args(arguments)
    try:
        plan = compile_plan(options.config, options.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if plan.unsupported:
        print("\n".join(f"not built yet: {reason}" for reason in plan.unsupported), file=sys.stderr)
        return 2
    if plan.threads:
        torch.set_num_threads(plan.threads)
    serve_gpu_from(plan.kernels.backend)
    run = Path(plan.run)
    try:
        with (
            no_silent_exit(),
            topology.start(plan) as topo,
            heartbeats(topo) as heartbeat,
            locked(run, topo.is_main),
        ):
            plan = fetch(plan, topo)
            load_kernels(plan, topo)
            done = train(plan, topo, heartbeat)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once; the same command resumes from the last checkpoint", flush=True)
        return STOPPED
    except BaseException as error:  # SystemExit of user code too: an unfinished run is no success
        report_failure(run, error)
        return 1
    return 0 if done else STOPPED


if __name__ == "__main__":
    sys.exit(main())
