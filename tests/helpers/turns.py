"""A feed whose observations follow a script, and samples of turns to compare."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from pyrl_ext.rollout.engine import Engine
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn

# The next context of a sample's trajectory; None ends it.
Script = Callable[[Sample], Sequence[int] | None]


class ScriptedFeed:
    """Turns of trajectories whose environment is a script.

    Args:
        first: the first turns
        script: see `Script`; the next turn's budget is the first one's
        max_tokens: longest context and response together
        trajectories: that wait or run at once; None: as many as there are
        late: answers come once the engine has nothing else to do, in this process
        delay: until a script's answer comes [s]
    """

    def __init__(
        self,
        first: Iterable[Turn],
        script: Script,
        max_tokens: int = 128,
        trajectories: int | None = None,
        late: bool = False,
        delay: float = 0.0,
    ):
        self._new = list(first)
        self._changed = threading.Condition()
        self._turns = {(turn.prompt.id, turn.index): turn for turn in self._new}
        self._left = len(self._new)
        self.script = script
        self.max_tokens = max_tokens
        self.delay = delay
        self._late: list[Sample] | None = [] if late else None
        self.trajectories = trajectories or self._left
        self._event = os.eventfd(1)
        self.waits = 0  # calls of `take` that waited

    def take(self, wait: bool) -> list[Turn] | None:
        late = self._late if wait else None
        while late:
            self._reply(late.pop())
        with self._changed:
            self.waits += wait
            while wait and not self._new and self._left:
                self._changed.wait()
            if not self._new and not self._left:
                return None
            turns = self._new
            self._new = []
            if turns and self._left:
                os.eventfd_read(self._event)
            return turns

    def fileno(self) -> int:
        return self._event

    def reply(self, sample: Sample) -> None:
        """Lets the script see a sample; its answer comes after the delay."""
        if self._late is not None:
            self._late.append(sample)
        elif self.delay:
            threading.Timer(self.delay, self._reply, (sample,)).start()
        else:
            self._reply(sample)

    def _reply(self, sample: Sample) -> None:
        context = self.script(sample)
        with self._changed:
            if context is None:
                self._left -= 1
            else:
                turn = self._turns[sample.prompt_id, sample.index]
                prompt = replace(turn.prompt, tokens=tuple(context))
                turn = replace(turn, prompt=prompt, number=turn.number + 1)
                self._turns[sample.prompt_id, sample.index] = turn
                self._new.append(turn)
            if len(self._new) == 1 or not self._left:
                os.eventfd_write(self._event, 1)
            self._changed.notify()


def first_turns(prompts: Sequence[Prompt], group: int, budget: int) -> list[Turn]:
    return [Turn(prompt, index, 0, budget) for prompt in prompts for index in range(group)]


def ragged(turns: int, vocab: int, fork: bool = False) -> Script:
    """``turns`` turns of each trajectory; observations of 1 to 9 tokens, one trajectory's first of
    one token. ``fork``: the second context of every third trajectory forgets what was sampled."""

    def script(sample: Sample) -> Sequence[int] | None:
        if sample.turn == turns - 1:
            return None
        tokens = sample.tokens.tolist()
        number = 31 * sample.prompt_id + 7 * sample.index + sample.turn
        drawn = torch.Generator().manual_seed(number)
        seen = torch.randint(3, vocab, (1 + number % 9,), generator=drawn).tolist()
        if fork and sample.turn == 0 and number % 3 == 0:
            return tokens[: sample.prompt_len] + seen
        return tokens + seen

    return script


def answers(engine: Engine, feed: ScriptedFeed, sampling: Sampling) -> Iterator[Sample]:
    """The samples of a feed, each shown to its script."""
    with closing(engine.answer(feed, sampling)) as stream:
        for sample in stream:
            feed.reply(sample)
            yield sample


def by_turn(samples: Iterable[Sample]) -> dict[tuple[int, int, int], Sample]:
    found = {(s.prompt_id, s.index, s.turn): s for s in samples}
    return dict(sorted(found.items()))


def afresh(engine: Engine, sample: Sample, sampling: Sampling, **fields: Any) -> Sample:
    """The sample that `stream` draws for the turn's whole context."""
    context = tuple(sample.tokens[: sample.prompt_len].tolist())
    group = replace(sampling, samples_per_prompt=sample.index + 1)
    prompt = Prompt(sample.prompt_id, context, **fields)
    return engine.generate([prompt], group)[sample.index]
