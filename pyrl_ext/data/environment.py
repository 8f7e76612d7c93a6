"""Environments: code that answers what the policy writes, turn after turn.

An environment is one object a trajectory, made by a factory that ``turns.environment`` names. Its
methods may be ordinary functions or ``async def``. What they return is checked here, before
anything is trained on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from pyrl_ext.data.chat import Tokenizer, check_known, check_size
from pyrl_ext.data.files import Broken
from pyrl_ext.data.rewards import finite
from pyrl_ext.parallel.user_code import describe, load_callable, shown
from pyrl_ext.plan.schema.turns import ENVIRONMENTS, REASONS
from pyrl_ext.samples import Prompt

_SHOWN = 200  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Context:
    """An observation that replaces everything the policy has seen: the whole context as tokens.

    If it begins with what is there already, the trajectory continues, else it forks.
    """

    tokens: Sequence[int]


Observation = str | Sequence[int] | Context
"""Text or token ids, appended after what was sampled; or the whole context."""


class StepResult(NamedTuple):
    """The environment's answer to a turn. A plain tuple of as many values serves as well.

    Args:
        observation: read before the next turn; not read when ``done``
        reward: of this turn; the rewards of a trajectory add up
        done: whether the trajectory ends here
        info: anything, for the environment's users; it is not kept
    """

    observation: Observation | None
    reward: float = 0.0
    done: bool = False
    info: Any = None


class Environment(Protocol):
    """One trajectory's environment. It may have a method ``close()``, called at the end."""

    def start(self, prompt: Prompt) -> Observation | Awaitable[Observation | None] | None:
        """Begin; the observation follows the prompt, None: the prompt is the first context."""
        ...

    def step(self, tokens: list[int], text: str) -> StepResult | Awaitable[StepResult]:
        """Answer a turn.

        Args:
            tokens: that the policy sampled, a stop token included
            text: the same, decoded, without a stop token at its end
        """
        ...


class Dropped(Exception):
    """A trajectory cannot be trained on.

    Args:
        reason: one of `plan.schema.turns.REASONS`
        message: which call, with the value found and the rule
    """

    def __init__(self, reason: str, message: str):
        assert reason in REASONS
        super().__init__(message)
        self.reason = reason


def load_environment(name: str, options: Mapping[str, Any], **given: Any) -> Callable[[], Any]:
    """A function that makes an environment.

    Args:
        name: of a built-in environment, or ``package.module:Class``
        options: keyword arguments of the class
        given: passed to the class if it has a parameter of that name

    Raises:
        ValueError: no such environment, it does not import, or does not take the options; a
            built-in one cannot use an option or the chat template
    """
    path = ENVIRONMENTS.get(name, name)
    if not all(path.partition(":")):
        rule = f"one of {', '.join(ENVIRONMENTS)}, or package.module:Class"
        raise ValueError(f"turns.environment: {name!r}, expected {rule}")
    factory = load_callable("turns.environment", path)
    missing = [m for m in ("start", "step") if not callable(getattr(factory, m, None))]
    if inspect.isclass(factory) and missing:
        raise ValueError(
            f"turns.environment: {name!r} has no {' and no '.join(missing)}, expected a class with "
            "the methods start(prompt) and step(tokens, text)"
        )
    try:
        signature = inspect.signature(factory)
        takes = {k: v for k, v in given.items() if k in signature.parameters and k not in options}
        signature.bind(**options, **takes)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"turns.options: {shown(dict(options), _SHOWN)}: {describe(error)}, expected arguments "
            f"of {name}{_signature(factory, given)}"
        ) from error
    if name in ENVIRONMENTS:
        factory(**options, **takes)  # it refuses options and chat templates that it cannot use
    return lambda: factory(**options, **takes)


def _signature(factory: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """``: a, b = 1``, what a factory takes in addition to ``given``; empty if that is not known."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return ""
    taken = ", ".join(str(each) for name, each in parameters.items() if name not in given)
    return f": {taken}" if taken else ""


def read_step(value: object) -> StepResult:
    """The value that ``step`` returned, as a `StepResult` with a finite reward.

    Raises:
        Dropped: it is something else
    """
    rule = "StepResult(observation, reward, done) or a tuple of 3 or 4 like it"
    if not isinstance(value, tuple):
        raise Dropped("result", f"returned {shown(value, _SHOWN)}, expected {rule}")
    fields = cast("tuple[Any, ...]", value)
    if not isinstance(value, StepResult) and len(fields) not in (3, 4):
        raise Dropped("result", f"returned a tuple of {len(fields)}, expected {rule}")
    result = StepResult(*fields)
    reward = finite(result.reward)
    if reward is None:
        found = shown(result.reward, _SHOWN)
        raise Dropped("reward", f"returned the reward {found}, expected a finite number")
    if not isinstance(result.done, bool | np.bool_):
        found = shown(result.done, _SHOWN)
        raise Dropped("result", f"returned done {found}, expected True or False")
    return result._replace(reward=reward, done=bool(result.done))


@dataclass(frozen=True)
class Reader:
    """Turns observations into token ids.

    Args:
        tokenizer: of the model
        vocabulary: token ids that the model knows
        max_tokens: of an observation that is appended
    """

    tokenizer: Tokenizer
    vocabulary: int
    max_tokens: int

    def appended(self, observation: object) -> list[int]:
        """The ids of a text, or ids, to be appended.

        Raises:
            Dropped: another type, empty, too long, or with tokens that the model does not know
        """
        if isinstance(observation, str):
            tokens = self._encoded(observation)
        else:
            tokens = self.ids(observation)
        if not tokens:
            found = shown(observation, _SHOWN)
            rule = "at least one token while the trajectory is not done"
            raise Dropped("empty", f"returned the observation {found}, expected {rule}")
        if len(tokens) > self.max_tokens:
            raise Dropped(
                "observation",
                f"returned an observation of {len(tokens)} tokens, expected at most "
                f"turns.max_observation_tokens {self.max_tokens}",
            )
        return tokens

    def ids(self, observation: object) -> list[int]:
        """Token ids as a list. Raises: Dropped."""
        rule = "text, a sequence of token ids, or Context(tokens)"
        if isinstance(observation, bytes | Mapping | set) or not hasattr(observation, "__len__"):
            found = shown(observation, _SHOWN)
            raise Dropped("result", f"returned the observation {found}, expected {rule}")
        values = list(cast("Sequence[Any]", observation))
        for value in values:
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole:
                found = shown(value, _SHOWN)
                raise Dropped("result", f"returned an observation with {found}, expected {rule}")
            if not 0 <= value < self.vocabulary:
                rule = f"0 to {self.vocabulary - 1}, the model's"
                raise Dropped("tokens", f"returned the token id {value}, expected {rule}")
        return [int(value) for value in values]

    def _encoded(self, text: str) -> list[int]:
        limit = "turns.max_observation_tokens"
        try:
            check_size(text, self.tokenizer, self.max_tokens, limit)
        except Broken as broken:
            raise Dropped("observation", f"returned an observation: {broken}") from None
        try:
            tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            check_known(text, tokens, self.tokenizer)
        except Broken as broken:
            raise Dropped("tokens", f"returned an observation: {broken}") from None
        except Exception as error:  # lone surrogates
            raise Dropped(
                "tokens",
                f"returned the observation {shown(text, _SHOWN)}: {describe(error)}, expected text "
                "that the tokenizer encodes",
            ) from error
        return tokens
