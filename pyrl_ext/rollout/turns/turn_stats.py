"""Trajectories of several turns as the events of a rollout."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace

from pyrl_ext.data.prompt_dataset import PromptDataset
from pyrl_ext.pack.index import sampled_tokens
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.prompt_groups import Counts, EngineEvent
from pyrl_ext.rollout.turns.check import check_trajectories
from pyrl_ext.rollout.turns.conversation import ConversationConfig
from pyrl_ext.rollout.turns.turn_queue import Feed, converse
from pyrl_ext.rollout.turns.waiting_feed import Trajectory, WaitingFeed
from pyrl_ext.samples import Prompt, Sample, Sampling


class Trajectories:
    """What answers the policy in a run, or calls it."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def need_turns(self, engine: Engine, rank: int) -> None:
        """Raises ValueError if the engine of ``rank`` cannot answer turns."""
        name = self.plan.rollout.engine
        asked = name != "recorded" and self.plan.engine_of_rank[rank] is not None
        if asked and not engine.capabilities.turns:
            raise ValueError(
                f"turns.{self.plan.turns.kind}: the {name} engine answers no turns, expected one "
                "that does"
            )

    def ask(
        self, engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, counts: Counts
    ) -> Generator[EngineEvent]:
        """The trajectories of these prompts, or those that were recorded."""
        raise NotImplementedError

    def close(self) -> None:
        """End what answers or calls the policy; its worker processes are the source's."""


class Environments(Trajectories):
    """The environments of a run.

    Args:
        plan: names them
        source: makes them
    """

    def __init__(self, plan: Plan, source: PromptDataset):
        assert source.environments is not None  # the plan names it
        super().__init__(plan)
        self.config = ConversationConfig(
            pool=source.environments,
            environments=plan.environments,
            tokenizer=source.tokenizer,
            vocabulary=plan.sizes.vocab_size,
            stop_ids=source.stop_ids,
            turns=plan.turns,
            max_new_tokens=plan.rollout.max_new_tokens,
            in_waves=plan.rollout.engine == "hf",
        )

    def ask(
        self, engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, counts: Counts
    ) -> Generator[EngineEvent]:
        if self.plan.rollout.engine == "recorded":
            yield from recorded(engine, prompts, sampling, counts)
        else:
            yield from conversations(self.config, engine, prompts, sampling, counts)


def conversations(
    config: ConversationConfig,
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    counts: Counts,
) -> Generator[EngineEvent]:
    """The trajectories of an environment; ``counts`` takes the numbers of those that are over."""
    if prompts:
        config = replace(config, max_new_tokens=sampling.max_new_tokens)
        feed = Feed(prompts, sampling.samples_per_prompt, config)
        yield from trajectories_of(feed, engine, sampling, counts)


def trajectories_of[T: Trajectory](
    feed: WaitingFeed[T], engine: Engine, sampling: Sampling, counts: Counts
) -> Generator[EngineEvent]:
    """The trajectories of a feed; ``counts`` takes the numbers of those that are over."""
    try:
        with closing(converse(engine, feed, sampling)) as stream:
            for turn, over in stream:
                if turn is not None:
                    yield EngineEvent(turn.prompt_id, len(turn.response), None)
                for trajectory in over:
                    yield EngineEvent(trajectory.prompt.id, 0, trajectory.samples or [])
    finally:
        counts.add(feed.counts)


def recorded(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, counts: Counts
) -> Generator[EngineEvent]:
    """Trajectories that were recorded: those of a group that are missing were dropped."""
    groups: dict[int, dict[int, list[Sample]]] = {prompt.id: {} for prompt in prompts}
    with closing(engine.stream(prompts, sampling)) as stream:
        for sample in stream:
            groups[sample.prompt_id].setdefault(sample.index, []).append(sample)
    check_trajectories(s for group in groups.values() for part in group.values() for s in part)
    for prompt_id, group in groups.items():
        for index in range(sampling.samples_per_prompt):
            samples = group.get(index, [])
            yield EngineEvent(prompt_id, sum(map(sampled_tokens, samples)), samples)


def dropped_metrics(counts: Counts) -> dict[str, float]:
    """Metrics of a rollout with environments, and with reward functions in workers, from its
    counts."""
    dropped = {name: value for name, value in counts.items() if name.startswith("dropped/")}
    metrics: dict[str, float] = {}
    if counts["begun"]:
        metrics |= _turn_metrics(counts, dropped)
        dropped = {}  # rewards of sources drop no response
    if counts["responses"]:
        metrics |= _scoring_metrics(counts, dropped)
    return metrics


def _scoring_metrics(counts: Counts, dropped: dict[str, float]) -> dict[str, float]:
    calls = counts["responses"] + counts["reward_retries"]
    return {
        "scoring/calls_per_second": calls / max(counts["max_reward_busy"], 1e-9),
        "scoring/call_seconds": counts["reward_seconds"] / max(counts["reward_results"], 1),
        "scoring/wait_seconds": counts["max_reward_wait"],
        "scoring/retries": counts["reward_retries"],
        "scoring/dropped": sum(dropped.values()),
    } | {f"scoring/{name}": value for name, value in dropped.items()}


def _turn_metrics(counts: Counts, dropped: dict[str, float]) -> dict[str, float]:
    begun = counts["begun"]
    left = begun - sum(dropped.values())
    return {
        "turns/mean": counts["turns"] / max(left, 1),
        "turns/max": counts["max_turns"],
        "turns/forks": counts["forks"],
        "turns/dropped": begun - left,
        "turns/close_failed": counts["close_failed"],
        "turns/retries": counts["retries"],
        "turns/environment_seconds": counts["seconds"] / begun,
        "turns/waited_seconds": counts["max_waited"],
        "route/changed_rows": counts["changed_rows"],
    } | {f"turns/{name}": value for name, value in dropped.items()}
