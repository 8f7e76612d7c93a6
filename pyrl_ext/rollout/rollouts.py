"""Rollouts: the engine of a rank, fed with the prompts of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from pyrl_ext.data.source import Source
from pyrl_ext.dist.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.build import build_engine, sampling_of
from pyrl_ext.rollout.distribute import Rollout, RolloutRequest, Score, generate_on_ranks
from pyrl_ext.rollout.dynamic import fill, stream_step
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.samples import Prompt, Sample, Sampling


class Rollouts:
    """The engine of this rank, fed with its share of the plan's prompts.

    Args:
        show: takes a line of text as samples come.

    Attributes:
        dropped: metrics of the last `train`, about groups that are not trained on.

    Raises: ValueError when the plan replays routes and the engine returns none.
    """

    def __init__(
        self,
        plan: Plan,
        topo: Topology,
        source: Source,
        show: Callable[[str], None] | None = None,
    ):
        self.plan, self.source, self.show = plan, source, show
        self.dropped: dict[str, float] = {}
        self.engine: Engine = build_engine(plan, topo.device, topo.rank)
        if plan.replay.enabled and not self.engine.capabilities.routes:
            raise ValueError(
                f"replay: the {plan.rollout.engine} engine returns no routes, expected one that "
                "does. Use replay=off, or an engine and a model with routers"
            )
        if plan.trains_on_kept_sets and not self.engine.capabilities.kept_sets:
            raise ValueError(
                f"rollout: the {plan.rollout.engine} engine returns no kept sets for top_p "
                f"{plan.rollout.top_p:g} and top_k {plan.rollout.top_k}, expected one that does; "
                "the trainer would score the full distribution. Use rollout.engine=hf, or set "
                "rollout.accept_truncated_sampling=true"
            )
        self.group = topo.world

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def train(self, step: int) -> Rollout:
        """The scored samples of a step.

        The prompts of a step are a function of its number. An aborted prompt is not retried; it is
        seen again in the next epoch.
        """
        plan, keep = self.plan, self.plan.batching.prompts
        sampling = sampling_of(plan, self.source, step)
        if rounds := plan.objective.dynamic_sampling:
            ask = partial(self._refill, step, sampling)
            hold = plan.rollout.record is not None
            short = plan.objective.dynamic_sampling_short
            rollout, self.dropped = fill(ask, keep, rounds, short, hold)
            return rollout
        prompts = self.source.prompts.take(step, plan.prompts_asked)
        rollout = self._generate(prompts, sampling, keep, self.show)
        if len(prompts) > keep:
            self.dropped = {
                "rollout/aborted_groups": len(prompts) - keep,
                "rollout/aborted_tokens": rollout.discarded,
            }
        return rollout

    def _refill(
        self, step: int, sampling: Sampling, number: int, asked: int, found: int
    ) -> Rollout:
        """The samples of ``asked`` prompts of a round; ``found`` groups are kept from before."""
        plan, show = self.plan, self.show
        keep, rounds = plan.batching.prompts, plan.objective.dynamic_sampling
        prompts = self.source.prompts.take(stream_step(step, number, rounds), keep)[:asked]
        if show is not None and number:
            so_far = f"refill {number} of {rounds}, {found} of {keep} groups kept; "
            show = partial(_after, so_far, show)
        return self._generate(prompts, sampling, asked, show)

    def held_out_reward(self) -> float:
        """Mean reward of one greedy response to each held-out prompt."""
        prompts = self.source.prompts.held_out(self.plan.evaluate.prompts)
        sampling = sampling_of(self.plan, self.source, 0)
        sampling = replace(sampling, greedy=True, samples_per_prompt=1)
        index = self._generate(prompts, sampling, len(prompts), self.show).index
        return float(index.rewards[index.firsts].mean())

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        keep: int,
        show: Callable[[str], None] | None,
    ) -> Rollout:
        """The samples of ``keep`` complete groups."""
        if any(p.images for p in prompts) and not self.engine.capabilities.images:
            raise ValueError(
                f"data.prompts: prompts with images, expected text: the {self.plan.rollout.engine} "
                "engine was built without an image processor"
            )
        scorer = self.source.scorer(list(prompts))
        if self.plan.objective.overlong_filter:
            scorer = partial(_without_overlong, scorer)
        return generate_on_ranks(
            self.engine,
            RolloutRequest(prompts, sampling, keep),
            scorer,
            self.group,
            self.plan.engine_of_rank,
            show,
            depths=self.plan.num_mtp_layers,
        )


def _after(before: str, show: Callable[[str], None], text: str) -> None:
    show(before + text)


def _without_overlong(score: Score, samples: list[Sample]) -> list[Sample]:
    """The scored samples, without loss tokens in trajectories that ran out of room."""
    cut = {s.index for s in samples if s.last and s.finish_reason == "length"}
    return [
        replace(
            sample,
            loss_mask=torch.zeros_like(sample.loss_mask),
            rollout_logprobs=torch.zeros_like(sample.rollout_logprobs),
        )
        if sample.index in cut
        else sample
        for sample in score(samples)
    ]
