"""Environments: code that answers what the policy writes, turn after turn.

An environment is one object a trajectory, made by a factory that the config names. Its methods may
be ordinary functions or ``async def``; they run in worker processes. What they return is checked
here, before anything is trained on it.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

from pyrl_ext.data.rewards import finite
from pyrl_ext.data.workers import CallFailed
from pyrl_ext.parallel.user_code import describe, load_callable, shown
from pyrl_ext.plan.schema.turns import ENVIRONMENTS, NamedEnvironment
from pyrl_ext.prompt import Prompt

MOST_IDS = 2**22  # of an observation that is read: contexts are far shorter
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


def load_environment(named: NamedEnvironment, **run: Any) -> Callable[[], Any]:
    """A function that makes an environment.

    Args:
        named: the environment
        run: passed to the class if it has a parameter of that name; a partial is called first

    Raises:
        ValueError: no such environment, it does not import, or does not take the options; a
            built-in one cannot use an option or the chat template
    """
    name, options, key, options_key = named
    path = ENVIRONMENTS.get(name, name)
    if not all(path.partition(":")):
        rule = f"one of {', '.join(ENVIRONMENTS)}, or package.module:Class"
        raise ValueError(f"{key}: {name!r}, expected {rule}")
    factory = load_callable(key, path)
    missing = [m for m in ("start", "step") if not callable(getattr(factory, m, None))]
    if inspect.isclass(factory) and missing:
        raise ValueError(
            f"{key}: {name!r} has no {' and no '.join(missing)}, expected a class with "
            "the methods start(prompt) and step(tokens, text)"
        )
    signature = inspect.signature(factory)
    arguments = {**options}
    for parameter, value in run.items():
        if parameter in signature.parameters and parameter not in options:
            arguments[parameter] = value() if isinstance(value, partial) else value
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{options_key}: {shown(options, _SHOWN)}: {describe(error)}, expected arguments of "
            f"{name}{signature}"
        ) from error
    if name in ENVIRONMENTS:
        try:
            factory(**arguments)  # it refuses options and chat templates that it cannot use
        except ValueError as error:
            raise ValueError(f"{options_key}: {error}") from error
    return partial(factory, **arguments)


class EnvironmentHost:
    """The environments of a worker process, one for each owner.

    Args:
        makes: source of prompts -> a function that makes an environment for a prompt of it
    """

    about = None
    at_once: int | None = None

    def __init__(self, makes: Mapping[str, Callable[[], Any]]):
        self._makes = makes
        self._environments: dict[int | None, Any] = {}

    @staticmethod
    def load(environments: Mapping[str, NamedEnvironment], **run: Any) -> EnvironmentHost:
        """The environments of all sources of prompts, as `load_environment` loads each."""
        makes = {source: load_environment(each, **run) for source, each in environments.items()}
        return EnvironmentHost(makes)

    def call(self, owner: int | None, method: str, *args: Any) -> Any:
        """Call a method of the owner's environment; "start" makes it, "forget" gives it up."""
        if method == "start":
            (prompt,) = args
            self._environments[owner] = self._makes[prompt.source]()
        elif method == "forget":
            self._environments.pop(owner, None)
        environment = self._environments.get(owner)
        if method in ("close", "forget") and not callable(getattr(environment, method, None)):
            return None
        return getattr(environment, method)(*args)

    def read(self, method: str, value: Any) -> Any:
        """The checked value, of plain types.

        Raises:
            CallFailed: it is something else
        """
        if method == "step":
            return read_step(value)
        return read_observation(value) if method == "start" else None


def read_step(value: object) -> StepResult:
    """The value that ``step`` returned, as a `StepResult` of plain types, without ``info``.

    Raises:
        CallFailed: it is something else
    """
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        rule = "StepResult(observation, reward, done) or a tuple of 3 or 4 like it"
        raise CallFailed("result", f"returned {shown(value, _SHOWN)}, expected {rule}")
    result = StepResult(*cast("tuple[Any, ...]", value))
    reward = finite(result.reward)
    if reward is None:
        text = f"returned the reward {shown(result.reward, _SHOWN)}, expected a finite number"
        raise CallFailed("reward", text)
    if result.done not in (True, False):
        text = f"returned done {shown(result.done, _SHOWN)}, expected True or False"
        raise CallFailed("result", text)
    observation = None if result.done else read_observation(result.observation)
    return StepResult(observation, reward, bool(result.done))


def read_observation(value: Any) -> Observation | None:
    """An observation without types and objects of the user.

    Raises:
        CallFailed: it is something else
    """
    if value is None or isinstance(value, str):
        return value and str(value)
    if isinstance(value, Context):
        return Context(_token_ids(value.tokens))
    return _token_ids(value)


def _token_ids(value: Any) -> list[int]:
    values = value.tolist() if hasattr(value, "tolist") else value
    is_sequence = isinstance(values, Sequence) and not isinstance(values, bytes)
    size = len(values) if is_sequence else 0
    if size > MOST_IDS:
        text = f"returned an observation of {size} token ids, expected at most {MOST_IDS}"
        raise CallFailed("observation", text)
    # no longer than it says
    ids = [int(x) for x in islice(values, size + 1) if _is_whole(x)] if is_sequence else []
    if not is_sequence or len(ids) != size:
        rule = "text, a sequence of token ids, or Context(tokens)"
        text = f"returned the observation {shown(value, _SHOWN)}, expected {rule}"
        raise CallFailed("result", text)
    return ids


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)
