"""One trajectory: an environment and what the policy answers it, turn after turn, as token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyrl_ext.data.environment import (
    Context,
    Dropped,
    Environment,
    Observation,
    Reader,
    read_step,
)
from pyrl_ext.plan.schema.turns import Turns
from pyrl_ext.rollout.turns.env_executor import Call, Calls
from pyrl_ext.rollout.turns.trajectory import samples_of
from pyrl_ext.samples import Prompt, Sample, Turn


@dataclass(frozen=True)
class ConversationConfig:
    """How all conversations of a run are held.

    Args:
        make: makes an environment
        reader: of observations
        decode: token ids -> text
        stop_ids: tokens that end a turn
        turns: section of the plan
        max_new_tokens: response budget of a turn
    """

    make: Callable[[], Environment]
    reader: Reader
    decode: Callable[[list[int]], str]
    stop_ids: tuple[int, ...]
    turns: Turns
    max_new_tokens: int


class Conversation:
    """A trajectory as it grows. It does nothing by itself: calls and turns are handed to it.

    Attributes:
        turns: what the engine sampled, a sample a turn
        forks: turns whose context did not begin with the turn before
        changed: rows whose routes two turns report differently
        seconds: in calls of the environment
        samples: of the trajectory, once it is done
        dropped: why there are none
        close_failed: why the environment did not close
    """

    def __init__(self, prompt: Prompt, index: int, manner: ConversationConfig):
        self.prompt = prompt
        self.index = index
        self.manner = manner
        self.turns: list[Sample] = []
        self.forks = self.changed = 0
        self.seconds = 0.0
        self.samples: list[Sample] | None = None
        self.dropped: Dropped | None = None
        self.close_failed: Dropped | None = None
        self._environment: Environment | None = None
        self._context = list(prompt.tokens)
        self._reward = 0.0
        self._closing = False

    @property
    def over(self) -> bool:
        """True if the trajectory is done or dropped."""
        return self.samples is not None or self.dropped is not None

    def begin(self, calls: Calls) -> None:
        """Make the environment and start it."""
        calls.begin(self, self._name("start"), self._start)

    def answered(self, sample: Sample, calls: Calls) -> None:
        """Hand what the engine sampled to the environment."""
        self.turns.append(sample)
        self._context = sample.tokens.tolist()
        tokens = sample.response
        last = tokens[-1] in self.manner.stop_ids
        text = self.manner.decode(tokens[:-1] if last else tokens)
        assert self._environment is not None
        calls.begin(self, self._name("step"), self._environment.step, tokens, text)

    def returned(self, call: Call, calls: Calls) -> Turn | None:
        """Take what a call returned; the next turn, or None: the trajectory is over."""
        if self._closing:
            self.close_failed = call.dropped
            return None
        self.seconds += call.seconds
        try:
            if call.dropped is not None:
                raise call.dropped
            try:
                turn = self._after_step(call.value) if self.turns else self._after_start(call.value)
            except Dropped as dropped:
                raise Dropped(dropped.reason, f"{call.name}: {dropped}") from dropped
        except Dropped as dropped:
            self.dropped = dropped
            turn = None
        if turn is None:
            self._close(calls)
        return turn

    def _name(self, method: str) -> str:
        where = f"prompt {self.prompt.id}, trajectory {self.index}"
        turn = f", turn {len(self.turns) - 1}" if self.turns else ""
        return f"{self.manner.turns.environment}.{method}({where}{turn})"

    def _start(self) -> Any:
        self._environment = self.manner.make()
        return self._environment.start(self.prompt)

    def _close(self, calls: Calls) -> None:
        close = getattr(self._environment, "close", None)
        if callable(close):
            self._closing = True
            calls.begin(self, self._name("close"), close)

    def _after_start(self, value: Observation | None) -> Turn:
        if isinstance(value, Context):
            tokens = self.manner.reader.ids(value.tokens)
            if self.prompt.images and tokens[: len(self._context)] != self._context:
                rule = "one that begins with the prompt, since its images have places there"
                raise Dropped("fork", f"returned a new context, expected {rule}")
            self._context = tokens
        elif value is not None:
            self._context += self.manner.reader.appended(value)
        if not self._room:
            raise Dropped(
                "room",
                f"{len(self._context)} tokens before the first turn, expected 1 to "
                f"{self.manner.turns.max_tokens - 1}, less than turns.max_tokens",
            )
        return self._turn()

    def _after_step(self, value: object) -> Turn | None:
        result = read_step(value)
        turns = self.manner.turns
        self._reward += result.reward
        if result.done:
            return self._end("stop")
        if len(self.turns) == turns.max_turns:
            rule = "expected done within turns.max_turns"
            raise Dropped("turns", f"not done after {len(self.turns)} turns, {rule}")
        self._observe(result.observation)
        return self._turn() if self._room else self._end("length")

    def _observe(self, observation: Observation | None) -> None:
        reader = self.manner.reader
        known = self._context
        if not isinstance(observation, Context):
            known += reader.appended(observation)
            return
        tokens = reader.ids(observation.tokens)
        if tokens[: len(known)] == known:
            known += reader.appended(tokens[len(known) :])
            return
        if not tokens:
            raise Dropped("empty", "returned an empty context, expected at least one token")
        if self.manner.turns.form == "concatenated" or self.prompt.images:
            at = next((i for i, (a, b) in enumerate(zip(tokens, known)) if a != b), len(tokens))
            raise Dropped(
                "fork",
                f"returned a context that differs from token {at} of {len(known)} on, expected one "
                "that continues what is there (turns.form concatenated, or images). Use turns.form "
                "stepwise to train such turns separately",
            )
        self.forks += 1
        self._context = tokens

    @property
    def _room(self) -> int:
        """Tokens that may still be sampled."""
        turns = self.manner.turns
        return max(0, turns.max_tokens - len(self._context)) if self._context else 0

    def _turn(self) -> Turn:
        prompt = replace(self.prompt, tokens=tuple(self._context))
        budget = min(self.manner.max_new_tokens, self._room)
        return Turn(prompt, self.index, len(self.turns), budget)

    def _end(self, finish_reason: str) -> None:
        turns = self.manner.turns
        samples, self.changed = samples_of(self.turns, turns.merges, turns.routes)
        self.samples = [
            replace(each, reward=self._reward, finish_reason=finish_reason) for each in samples
        ]
