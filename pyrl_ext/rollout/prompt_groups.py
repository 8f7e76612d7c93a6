"""Groups of trajectories as they end, and what is counted of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from pyrl_ext.pack.index import sampled_tokens
from pyrl_ext.parallel.collective_errors import AgreedError
from pyrl_ext.plan.schema import REWARD_REASONS
from pyrl_ext.plan.schema.turns import REASONS
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.samples import Prompt, Sample, Sampling


class EngineEvent(NamedTuple):
    """Something that an engine did for a trajectory.

    Args:
        prompt_id: of the trajectory
        tokens: sampled since the event before
        samples: of the trajectory if it is over, none if it is dropped; None: it goes on
    """

    prompt_id: int
    tokens: int
    samples: list[Sample] | None


SECONDS = ("max_reward_busy", "max_reward_wait", "max_waited")  # of the slowest rank


class Counts(defaultdict[str, float]):
    """Numbers of a rollout by name, which add up over ranks; those that begin with "max" do not."""

    def __init__(self) -> None:
        super().__init__(float)

    def add(self, others: Mapping[str, float]) -> None:
        """Add the numbers of another rank."""
        for name, value in others.items():
            self[name] = max(self[name], value) if name[:3] == "max" else self[name] + value

    def add_round(self, others: Counts) -> None:
        """Add the numbers of a round that ran after these: seconds add up, too."""
        seconds = {name: self[name] + others[name] for name in SECONDS if name in others}
        self.add(others)
        self.update(seconds)


Wait = Callable[[Counts], list[Sample]]
"""Waits for the rewards of a group, and adds to the counts; the samples with their rewards."""

Score = Callable[[list[Sample]], Wait]
"""Begins to score a group."""


def as_they_are(samples: list[Sample]) -> Wait:
    """Keeps the rewards of samples."""
    return lambda _counts: samples


def sampled(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, counts: Counts
) -> Generator[EngineEvent]:
    """The trajectories of `Engine.stream`."""
    parts: list[Sample] = []
    with closing(engine.stream(prompts, sampling)) as stream:
        for sample in stream:
            parts.append(sample)
            if sample.last:
                yield EngineEvent(sample.prompt_id, sum(map(sampled_tokens, parts)), parts)
                parts = []


Ask = Callable[[Engine, Sequence[Prompt], Sampling, Counts], Generator[EngineEvent]]


def need_share(counts: Mapping[str, float], least: float) -> None:
    """Check that enough trajectories of all ranks are left.

    Raises: AgreedError with the number for each reason.
    """
    dropped = {n.removeprefix("dropped/"): v for n, v in counts.items() if n[:8] == "dropped/"}
    begun = counts.get("begun", 0)
    what = "trajectories are left"
    key = "turns.min_share"
    reasons = REASONS
    if not begun:
        begun = counts.get("responses", 0)
        what = "responses have a reward"
        key = "data.reward_min_share"
        reasons = REWARD_REASONS
    lost = sum(dropped.values())
    if begun and begun - lost < least * begun:
        shown = ", ".join(f"{reasons[why]} ({number:.0f})" for why, number in dropped.items())
        raise AgreedError(
            f"generate_on_ranks: {begun - lost:.0f} of {begun:.0f} {what}, expected at least "
            f"{key} {least:g} of them; for the others: {shown}. The first of each kind is named "
            "above"
        )


class Group(NamedTuple):
    """A complete group.

    Args:
        samples: that were generated
        scored: waits for their rewards
    """

    samples: list[Sample]
    scored: Wait


class Groups:
    """Groups as their trajectories end, until ``keep`` of them are complete."""

    def __init__(self, size: int, keep: int, score: Score):
        self.size = size
        self.keep = keep
        self.score = score
        self.begun: defaultdict[int, list[list[Sample]]] = defaultdict(list)
        self.kept: list[Group] = []
        self.complete = self.finished = self.dropped = self.tokens = 0

    def add(self, event: EngineEvent) -> None:
        """Take an event."""
        self.tokens += event.tokens
        if event.samples is None:
            return
        self.finished = self.finished + 1
        self.dropped = self.dropped + (not event.samples)
        self.begun[event.prompt_id].append(event.samples)
        if len(self.begun[event.prompt_id]) == self.size:
            self.close(event.prompt_id)

    def close(self, prompt_id: int) -> None:
        """Begin to score the group of a prompt."""
        group = [sample for trajectory in self.begun.pop(prompt_id) for sample in trajectory]
        score = self.score if group else as_they_are
        self.kept.append(Group(group, score(group)))
        self.complete += 1

    def progress(self, seconds: float) -> str:
        """A line of text."""
        done = f"{self.finished} samples"
        if self.dropped:
            done = f"{self.finished} trajectories, {self.dropped} of them dropped"
        groups = f"{self.complete} of {self.keep} groups"
        return f"{done}, {groups}, {self.tokens / max(seconds, 1e-9):,.0f} tokens/s"


def without_overlong(score: Score, samples: list[Sample]) -> Wait:
    """Scores samples, without loss tokens in trajectories that ran out of room."""
    return partial(_without_overlong, score(samples))


def _without_overlong(scored: Wait, counts: Counts) -> list[Sample]:
    samples = scored(counts)
    cut = {s.index for s in samples if s.last and s.finish_reason == "length"}
    return [
        replace(
            sample,
            loss_mask=torch.zeros_like(sample.loss_mask),
            rollout_logprobs=torch.zeros_like(sample.rollout_logprobs),
        )
        if sample.index in cut
        else sample
        for sample in samples
    ]
