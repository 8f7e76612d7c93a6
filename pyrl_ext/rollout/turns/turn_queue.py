"""The conversations of a rollout, as the feed from which an engine takes its turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from pyrl_ext.data.environment import StepResult
from pyrl_ext.data.workers import CallFailed
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.turns.check import check_trajectory
from pyrl_ext.rollout.turns.conversation import Conversation, ConversationConfig
from pyrl_ext.rollout.turns.waiting_feed import Trajectory, WaitingFeed
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn

_RULES = {
    "error": ", expected a result",
    "timeout": ", expected a result within turns.timeout",
    "lost": ", expected its worker to keep running",
}
# what calls return for a trajectory of one response, which has no environment
_ONE_RESPONSE = {"start": None, "step": StepResult(None, done=True), "close": None}


@dataclass(eq=False)
class _Call:
    """A call of an environment."""

    conversation: Conversation
    method: str
    args: tuple[Any, ...]
    retries: int
    future: Future[Any] = field(init=False)
    began: float = field(init=False)

    def __str__(self) -> str:
        prompt = self.conversation.prompt.id
        turns = len(self.conversation.turns)
        turn = f", turn {turns - 1}" if turns else ""
        environment = self.conversation.environment
        name = "" if environment is None else environment.name
        where = f"prompt {prompt}, trajectory {self.conversation.index}{turn}"
        return f"{name}.{self.method}({where})"

    def failure(self, failed: CallFailed) -> CallFailed:
        """The failure with the name of the call."""
        text = f"{self}: {failed.message}{_RULES.get(failed.reason, '')}"
        return CallFailed(failed.reason, text)


class Feed(WaitingFeed[Conversation]):
    """Turns of the trajectories of an environment.

    Conversations continue in `take`, in the thread of the engine; only environments run elsewhere.

    Args:
        prompts: each begins ``size`` trajectories
    """

    def __init__(self, prompts: Sequence[Prompt], size: int, config: ConversationConfig):
        trajectories = len(prompts) * size
        super().__init__("environment", trajectories, config.turns.max_tokens, config.noted)
        self._config = config
        self._open = {(p.id, i): Conversation(p, i, config) for p in prompts for i in range(size)}
        self._order = {key: place for place, key in enumerate(self._open)}
        self._begun = False
        self._sampling = 0  # turns that the engine works on
        self._running = 0  # calls that are not in `_ended`
        self._done = SimpleQueue[_Call]()
        self._ended: list[_Call] = []
        self._closings: list[_Call] = []

    def left(self) -> int:
        return len(self._open)

    def running(self) -> int:
        return self._running

    def answered(self, sample: Sample) -> None:
        self._sampling -= 1
        conversation = self._open[sample.prompt_id, sample.index]
        self._call(conversation, "step", *conversation.answered(sample))

    def over(self) -> Sequence[Conversation]:
        over = super().over()
        for conversation in over:
            if conversation.samples is not None:
                check_trajectory(conversation.samples)
        return over

    def close(self) -> None:
        """Give up the environments that still run; those that close get until their time limit."""
        for call in self._closings if not self._open else ():
            failure = call.future.exception()
            if isinstance(failure, CallFailed) and failure.reason != "lost":
                self.count_drop("close_failed", str(call.failure(failure)))
        for conversation in [*self._open.values(), *(call.conversation for call in self._closings)]:
            self._config.pool.release(conversation.owner)
        super().close()

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            for conversation in self._open.values():
                prompt = replace(conversation.prompt, images=())
                self._call(conversation, "start", prompt)

    def _call(self, conversation: Conversation, method: str, *args: Any) -> None:
        self._running += 1
        self._submit(_Call(conversation, method, args, self._config.turns.retries), self._finish)

    def _submit(self, call: _Call, finish: Callable[[_Call, Future[Any]], None]) -> None:
        call.began = time.monotonic()
        if call.conversation.environment is None:
            call.future = Future()
            call.future.set_result(_ONE_RESPONSE[call.method])
        else:
            owner = call.conversation.owner
            limit = self._config.turns.timeout
            (call.future,) = self._config.pool.submit(call.method, [call.args], limit, owner)
        call.future.add_done_callback(partial(finish, call))

    def _finish(self, call: _Call, future: Future[Any]) -> None:
        call.conversation.seconds += time.monotonic() - call.began
        self._done.put(call)
        self.wake()

    def ready(self) -> list[Turn]:
        """Continue the conversations whose calls are over; the turns that follow."""
        while not self._done.empty():
            call = self._done.get()
            failure = call.future.exception()
            if isinstance(failure, CallFailed) and failure.reason == "error" and call.retries:
                call.retries -= 1
                self.counts["retries"] += 1
                self._submit(call, self._finish)
            else:
                self._running -= 1
                self._ended.append(call)
        if self._config.in_waves and (self._running or self._sampling):
            return []
        ended = sorted(self._ended, key=self._place)
        self._ended = []
        turns = [turn for call in ended if (turn := self._continue(call)) is not None]
        self._sampling += len(turns)
        return turns

    def _place(self, call: _Call) -> int:
        return self._order[call.conversation.prompt.id, call.conversation.index]

    def _continue(self, call: _Call) -> Turn | None:
        """The turn after a call; None: the trajectory is over."""
        conversation = call.conversation
        turn = None
        try:
            value = call.future.result()
            turn = (conversation.stepped if conversation.turns else conversation.started)(value)
        except CallFailed as failure:
            conversation.dropped = call.failure(failure)
        if turn is None:
            del self._open[conversation.prompt.id, conversation.index]
            self.end(conversation)
            close = _Call(conversation, "close", (), 0)
            self._submit(close, lambda call, future: None)
            self._closings.append(close)
        return turn


def converse[T: Trajectory](
    engine: Engine, feed: WaitingFeed[T], sampling: Sampling
) -> Generator[tuple[Sample | None, Sequence[T]]]:
    """Each turn as the engine sampled it, and the trajectories of ``feed`` that are over then; the
    last turn is None."""
    with closing(feed), closing(engine.answer(feed, sampling)) as stream:
        for sample in stream:
            feed.answered(sample)
            yield sample, feed.over()
        yield None, feed.over()
