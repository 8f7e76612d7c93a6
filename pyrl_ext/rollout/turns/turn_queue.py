"""The conversations of a rollout, as the feed from which an engine takes its turns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.turns.check import check_trajectory
from pyrl_ext.rollout.turns.conversation import Conversation, ConversationConfig
from pyrl_ext.rollout.turns.env_executor import Call, Calls
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn


class Feed:
    """Turns of all trajectories; see `rollout.engine.TurnFeed`.

    Conversations go on in `take`, in the thread of the engine; only calls of environments run
    beside it.

    Args:
        prompts: each begins ``size`` trajectories
        note: takes what is counted and a line of text, about the first of each kind

    Attributes:
        counts: numbers of the trajectories that are over, to be added up over ranks
        waited: seconds in which the engine had nothing else to do
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        size: int,
        manner: ConversationConfig,
        note: Callable[[str, str], None] | None = None,
    ):
        self.trajectories = len(prompts) * size
        self.max_tokens = manner.turns.max_tokens
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.waited = 0.0
        self._note = note
        self._calls = Calls(manner.turns.timeout, manner.turns.retries)
        self._open = {(p.id, i): Conversation(p, i, manner) for p in prompts for i in range(size)}
        self._over: list[Conversation] = []
        self._begun = False

    def fileno(self) -> int:
        """Readable as soon as a call of an environment is over."""
        if not self._begun:
            self._begin()
        return self._calls.fileno()

    def take(self, wait: bool) -> list[Turn] | None:
        """The turns that came since the last call; None: none will come any more."""
        if not self._begun:
            self._begin()
        turns: list[Turn] = []
        while True:
            if wait and not turns and self._open and not self._calls.under_way:
                raise RuntimeError(
                    f"Feed.take: the engine waits, and {len(self._open)} trajectories wait for "
                    "it, expected an answer to every turn"
                )
            waits = wait and not turns and bool(self._open)
            began = time.monotonic()
            calls = self._calls.ready(waits)
            self.waited += time.monotonic() - began if waits else 0.0
            turns += filter(None, map(self._returned, calls))
            if turns or not wait or not self._open:
                break
        return turns if turns or self._open else None

    def answered(self, sample: Sample) -> None:
        """Take what the engine sampled for a turn."""
        self._open[sample.prompt_id, sample.index].answered(sample, self._calls)

    def over(self) -> list[Conversation]:
        """The trajectories that are over since the last call."""
        over = self._over
        self._over = []
        for conversation in over:
            if conversation.samples is not None:
                check_trajectory(conversation.samples)
        return over

    def close(self) -> None:
        """Give up the environments that still run; those that close get until their time limit."""
        for call in self._closing():
            self._returned(call)
        self._calls.close()
        self.counts["retries"] = self._calls.retried
        self.counts["max_waited"] = self.waited

    def _closing(self) -> Generator[Call]:
        while not self._open and self._calls.under_way:
            yield from self._calls.ready(True)

    def _begin(self) -> None:
        self._begun = True
        for conversation in self._open.values():
            conversation.begin(self._calls)

    def _returned(self, call: Call) -> Turn | None:
        conversation: Conversation = call.key
        closing = conversation.over
        turn = conversation.returned(call, self._calls)
        if closing:
            if conversation.close_failed is not None:
                self._count_drop("close_failed", str(conversation.close_failed))
        elif turn is None:
            del self._open[conversation.prompt.id, conversation.index]
            self._over.append(conversation)
            self._count(conversation)
        return turn

    def _count(self, conversation: Conversation) -> None:
        counts = self.counts
        turns = len(conversation.turns)
        counts["begun"] += 1
        counts["seconds"] += conversation.seconds
        if conversation.dropped is not None:
            dropped = conversation.dropped
            self._count_drop(f"dropped/{dropped.reason}", f"{dropped}; the trajectory is dropped")
            return
        counts["turns"] += turns
        counts["max_turns"] = max(counts["max_turns"], turns)
        counts["forks"] += conversation.forks
        counts["changed_rows"] += conversation.changed

    def _count_drop(self, name: str, message: str) -> None:
        if not self.counts[name] and self._note is not None:
            self._note(name, message)
        self.counts[name] += 1


def converse(
    engine: Engine, feed: Feed, sampling: Sampling
) -> Generator[tuple[Sample | None, list[Conversation]]]:
    """Each turn as the engine sampled it, and the trajectories of ``feed`` that are over then; the
    last turn is None."""
    with closing(feed), closing(engine.answer(feed, sampling)) as stream:
        for sample in stream:
            feed.answered(sample)
            yield sample, feed.over()
        yield None, feed.over()
