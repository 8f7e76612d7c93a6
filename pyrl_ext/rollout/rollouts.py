"""Rollouts: the engine of a rank, fed with the prompts of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from pyrl_ext.data.mixed_prompts import MixedPrompts
from pyrl_ext.data.prompt_dataset import AnyReward, PromptDataset
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.parallel.collective_errors import agreeing
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.groups import engine_ranks
from pyrl_ext.rollout.async_rollouts import AsyncRollouts
from pyrl_ext.rollout.build import build_engine, sampling_of
from pyrl_ext.rollout.distribute import RolloutRequest, RolloutSamples, generate_on_ranks
from pyrl_ext.rollout.dynamic_sampling import sample_groups
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.evaluation import Evaluation, by_source, eval_sampling, eval_sets
from pyrl_ext.rollout.prompt_groups import Score, without_overlong
from pyrl_ext.rollout.source_metrics import source_metrics
from pyrl_ext.rollout.turns.turn_stats import (
    Environments,
    Trajectories,
    dropped_metrics,
    recorded,
)
from pyrl_ext.samples import Prompt, Sample, Sampling


class Rollouts:
    """The engine of this rank, fed with its share of the plan's prompts.

    Args:
        show: takes a line of text as samples come.

    Attributes:
        dropped: metrics of the last `train`, about groups that are not trained on, and by source.

    Raises: ValueError when the plan replays routes and the engine returns none.
    """

    def __init__(
        self,
        plan: Plan,
        topo: Topology,
        source: PromptDataset,
        show: Callable[[str], None] | None = None,
    ):
        self.plan = plan
        self.source = source
        self.show = show
        self.dropped: dict[str, float] = {}
        self._eval_sets: dict[str, Sequence[Prompt]] | None = None
        if plan.evaluate_every:  # a task with too few held-out prompts fails now
            self._eval_sets = eval_sets(plan, source)
        self.environments = _trajectories(plan, source)
        thread_group = None
        if plan.rollout.syncs_weights_in_background and topo.world is not None:
            thread_group = topo.make_group("publish", range(topo.world_size))
        self.holders = _holders(plan, topo)
        self.engine: Engine = build_engine(plan, topo.device, topo.rank, topo.world, thread_group)
        if plan.replay.of_engine and not self.engine.capabilities.routes:
            raise ValueError(
                f"replay: the {plan.rollout.engine} engine returns no routes, expected one that "
                "does. Use replay=off, or an engine and a model with routers"
            )
        if plan.trains_on_sampling_mask and not self.engine.capabilities.sampling_mask:
            raise ValueError(
                f"rollout: the {plan.rollout.engine} engine returns no kept sets for top_p "
                f"{plan.rollout.top_p:g} and top_k {plan.rollout.top_k}, expected one that does; "
                "the trainer would score the full distribution. Use rollout.engine=hf, or set "
                "rollout.accept_truncated_sampling=true"
            )
        if self.environments is not None:
            self.environments.need_turns(self.engine, topo.rank)
        self.group = topo.world
        asked = self._request_of, self._scorer, self.group, show
        self.ahead = AsyncRollouts(plan, self.engine, *asked) if plan.rollout.ahead else None

    def make_room(self) -> None:
        """Return once no engine takes more memory of the trainer's GPUs; those that may, sleep.

        Communicates: waits for all ranks, whose engines may use several GPUs.
        """
        if self.plan.shares_gpus:
            _ = self.engine.capabilities  # waits until it has started
            if self.plan.engine_sleeps:
                self.sleep()
            else:
                dist.barrier(self.group)

    def sleep(self) -> int:
        """Put the engine to sleep; returns the bytes that it freed.

        vLLM reads the free memory of its GPUs before and after, and asserts that it grew
        (`gpu_worker.py`: "Memory usage increased after sleeping"). So no trainer takes memory
        meanwhile: this rank's waits for the call, those of other ranks wait at the barrier.

        Communicates: waits for all ranks.
        """
        freed = self.engine.sleep()
        dist.barrier(self.group)
        return freed

    def close(self) -> None:
        """Close the engine, and stop the workers of user code."""
        (self.ahead or self.engine).close()
        if self.environments is not None:
            self.environments.close()
        self.source.close()

    def train(self, step: int) -> RolloutSamples:
        """The scored samples of a step.

        The prompts of a step are a function of its number. An aborted prompt is not retried; it is
        seen again in the next epoch.
        """
        rollout = self._samples_of(step)
        if isinstance(prompts := self.source.prompts, MixedPrompts):
            index = rollout.generated or rollout.index
            self.dropped |= source_metrics(index, prompts.source_of, self.plan.evaluate.pass_reward)
            self._note_rewards(step)
        return rollout

    def _note_rewards(self, step: int) -> None:
        """Tell tasks that become harder the mean rewards of a step."""
        for name, task in self.source.rising.items():
            self.dropped[f"source/{name}/level"] = level = task.level(step) + 1
            reward = self.dropped.get(f"source/{name}/reward")  # a step may lack the source
            if reward is None or not task.note(step, reward):
                continue
            if self.group is None or self.group.rank() == 0:
                print(
                    f"step {step}: source {name} has a mean reward of {reward:.3f}; its level "
                    f"{level + 1} of {len(task.levels)} begins at step {task.starts[-1]}",
                    flush=True,
                )

    def _samples_of(self, step: int) -> RolloutSamples:
        plan = self.plan
        keep = self.plan.batching.prompts
        if self.ahead is not None:
            rollout, self.dropped = self.ahead.take(step)
            return rollout
        sampling = sampling_of(plan, self.source, step)
        if plan.objective.dynamic_sampling:
            generate = partial(self._generate, sampling, min_share=0.0)
            rollout, self.dropped = sample_groups(
                plan, step, self._take, generate, self.show, self._min_share
            )
            self._warn_of_shortage(step)
            self.dropped |= dropped_metrics(rollout.counts)
            return rollout
        prompts = self._take(step, plan.prompts_asked)
        rollout = self._generate(sampling, prompts, keep, self.show)
        self.dropped = dropped_metrics(rollout.counts)
        if len(prompts) > keep:
            self.dropped |= {
                "rollout/aborted_groups": len(prompts) - keep,
                "rollout/aborted_tokens": rollout.counts["discarded"],
            }
        return rollout

    def _take(self, step: int, count: int) -> Sequence[Prompt]:
        """The prompts of a step. Raises: on every rank, if one cannot read them."""
        with agreeing("Rollouts.train", "steps", self.group) as doing:
            doing.append(step)
            prompts = self.source.prompts.take(step, count)
        return prompts

    def _warn_of_shortage(self, step: int) -> None:
        """Say that the step is trained on groups with equal rewards too."""
        if not (kept := self.dropped["rollout/flat_groups_kept"]):
            return
        if self.group is None or self.group.rank() == 0:
            all_groups = self.plan.batching.prompts
            print(
                f"step {step}: {all_groups - kept} of {all_groups} groups have unequal rewards "
                f"after {self.dropped['rollout/refills']} refills; {kept} with equal ones are kept",
                flush=True,
            )

    def evaluate(self) -> tuple[dict[str, Evaluation], dict[str, list[Sample]]]:
        """Results of every set of held-out prompts, the same on every rank, and the samples that
        this rank owns."""
        results: dict[str, Evaluation] = {}
        samples: dict[str, list[Sample]] = {}
        chosen = self.plan.evaluate
        if self._eval_sets is None:
            with agreeing("Rollouts.evaluate", "prompts", self.group):
                self._eval_sets = eval_sets(self.plan, self.source)
        for name, prompts in self._eval_sets.items():
            sampling = eval_sampling(self.plan, self.source, name)
            reward = self.source.sets[name].reward if name in self.source.sets else None
            least = None if self.environments is None else 0.0
            rollout = self._generate(sampling, prompts, len(prompts), self.show, least, reward)
            ks = [k for k in chosen.pass_k if k <= sampling.samples_per_prompt]
            asked = len(prompts)
            results[name] = Evaluation.of(rollout.index, asked, sampling, ks, chosen.pass_reward)
            samples[name] = rollout.samples
            for source, ids in by_source(prompts).items():
                own = BatchIndex.joined([rollout.index], ids)
                results[source] = Evaluation.of(own, len(ids), sampling, ks, chosen.pass_reward)
        return results, samples

    def _generate(
        self,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        keep: int,
        show: Callable[[str], None] | None,
        min_share: float | None = None,
        reward: AnyReward | None = None,
    ) -> RolloutSamples:
        """The samples of ``keep`` complete groups.

        Args:
            min_share: of trajectories that must be left; None: the plan's.
            reward: that scores them; None: the run's.
        """
        if any(p.images for p in prompts) and not self.engine.capabilities.images:
            raise ValueError(
                f"data.prompts: prompts with images, expected text: the {self.plan.rollout.engine} "
                "engine was built without an image processor"
            )
        scorer = self._scorer(prompts, reward)
        request = self._request(prompts, sampling, keep, min_share)
        ranks = self.group, self.plan.engine_of_rank
        depths = self.plan.num_mtp_layers
        while True:
            rollout = generate_on_ranks(
                self.engine, request, scorer, *ranks, show, depths, self.holders
            )
            if not self.samples_stale():
                return rollout

    def samples_stale(self) -> bool:
        """As `Engine.samples_stale`; steps that are generated ahead are begun again."""
        samples_stale = self.engine.samples_stale()
        if samples_stale and self.ahead is not None:
            self.ahead.again()
        return samples_stale

    def _request(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        keep: int,
        min_share: float | None = None,
    ) -> RolloutRequest:
        share = self._min_share if min_share is None else min_share
        request = RolloutRequest(prompts, sampling, keep, min_share=share)
        if self.plan.rollout.engine == "recorded" and self.plan.drops_samples:
            request = replace(request, ask=recorded)
        if self.environments is not None:
            request = replace(request, ask=self.environments.ask)
        return request

    @property
    def _min_share(self) -> float:
        """The share of trajectories that must be left in a step."""
        if self.environments is None:
            return self.plan.data.reward_min_share
        return self.plan.turns.min_share

    def _request_of(self, step: int) -> RolloutRequest:
        prompts = self.source.prompts.take(step, self.plan.prompts_asked)
        sampling = sampling_of(self.plan, self.source, step)
        return self._request(prompts, sampling, self.plan.batching.prompts)

    def _scorer(self, prompts: Sequence[Prompt], reward: AnyReward | None = None) -> Score:
        score = self.source.scorer(prompts, reward)
        return partial(without_overlong, score) if self.plan.objective.overlong_filter else score


def _trajectories(plan: Plan, source: PromptDataset) -> Trajectories | None:
    """What answers the policy, or calls it; None: a response is a trajectory."""
    if plan.turns.kind is None:
        return None
    if plan.turns.has_agent:
        from pyrl_ext.rollout.agents.agents import Agents  # needs the extra `agents`

        return Agents(plan, source)
    return Environments(plan, source)


def _holders(plan: Plan, topo: Topology) -> dist.ProcessGroup | None:
    """The ranks that hold the engine of this rank together; None: this rank alone."""
    ranks = next((ranks for ranks in engine_ranks(plan) if topo.rank in ranks), None)
    return None if ranks is None else topo.make_group("engine", ranks)
