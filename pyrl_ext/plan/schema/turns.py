"""The section `turns` of the YAML: trajectories of several turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from pyrl_ext.plan.language.fields import Count, Positive, Rate, Section, Text

ENVIRONMENTS = {
    "guess": "pyrl_ext.data.guess:Guess",
    "tools": "pyrl_ext.data.chat_turns:Tools",
    "messages": "pyrl_ext.data.chat_turns:Messages",
}
"""Built-in environment -> its class."""

VERIFIERS = "verifiers:"
"""Begins the names of environments of the package verifiers."""
BY_SOURCE = "sources"
"""In turns.environment: sources of prompts name their environments."""


class NamedEnvironment(NamedTuple):
    """An environment as the config names it.

    Args:
        name: of a built-in environment, or ``package.module:Class``
        options: keyword arguments of its class
        key: of the config that holds the name
        options_key: of the config that holds the options
    """

    name: str
    options: dict[str, Any]
    key: str = "turns.environment"
    options_key: str = "turns.options"


REASONS = {
    "error": "the environment or the agent raised an error",
    "timeout": "a call, or an agent between two calls, exceeded turns.timeout",
    "lost": "its worker process ended, because of it or of another trajectory",
    "result": "a call returned something of a wrong type",
    "reward": "a reward was not a finite number",
    "empty": "an observation was empty though the trajectory was not done",
    "tokens": "an observation held tokens that the model does not know",
    "observation": "an observation was longer than turns.max_observation_tokens",
    "room": "the first context, or that of an agent's call, left no room for a response",
    "turns": "the trajectory was not done after turns.max_turns",
    "fork": "the context was rewritten with form concatenated",
    "calls": "the agent made no call that was answered",
}
"""Why a trajectory is dropped, by the word that metrics use."""


class Turns(Section):
    """An environment that answers the policy, or an agent that calls it: a trajectory has several
    turns."""

    environment: Text | None = None
    """built-in name, module:Class with start(prompt) and step(tokens, text), or verifiers:NAME, an
    environment of that package, which brings its prompts; sources: that of each source, in
    data.sources; null: none, every trajectory is one response"""
    agent: Text | None = None
    """module:function of an agent, ``async def run(client, prompt)`` -> reward, which calls the
    policy through an OpenAI client; null: none"""
    command: list[Text] = Field(default=[])
    """program and arguments of an agent that finds the policy at OPENAI_BASE_URL; the last line of
    its output is the reward; []: none"""
    options: dict[str, Any] = Field(default={})
    """keyword arguments of the environment's class, or of the agent; settings of a verifiers
    taskset"""
    reward: Text | None = None
    """module:function of (prompt, calls) that rewards the trajectory of an agent; null: the agent
    gives the reward"""
    renderer: Text = "auto"
    """name of the package renderers for messages of agents; auto: the one that renders as the
    tokenizer's chat template does, or the template itself"""
    form: Literal["concatenated", "stepwise"] = "concatenated"
    """samples of a trajectory. concatenated: one, observations outside the loss; stepwise: one a
    turn. An agent that begins several conversations, or rewrites one, needs stepwise"""
    merge: bool = True
    """a turn that continues the turn before becomes a part of its sample (stepwise)"""
    max_turns: Positive = 8
    """turns of a trajectory; one that is not done then is dropped. Further calls of an agent get an
    error"""
    max_tokens: Count = 0
    """longest trajectory, prompt and observations included [tokens]"""
    max_observation_tokens: Positive = 1024
    """longest observation of an environment; a trajectory with a longer one is dropped [tokens]"""
    timeout: Rate = 60.0
    """longest time that a call of the environment may take, or that an agent may take from one
    answer to its next call or its end [seconds]"""
    retries: Count = 0
    """calls that are made again after a call of the environment raised an error; trajectories of
    an agent that begin again after it raised one"""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """share of a step's trajectories that must be left; with fewer the step fails"""
    routes: Literal["first", "last"] = "first"
    """which turn's routes are trained where two turns report a row differently"""

    @property
    def kind(self) -> Literal["environment", "agent", "command"] | None:
        """Key of what answers the policy; None: nothing does."""
        if self.environment is not None:
            return "environment"
        if self.agent is not None:
            return "agent"
        return "command" if self.command else None

    @property
    def by_source(self) -> bool:
        """True if sources of prompts name their environments."""
        return self.environment == BY_SOURCE

    @property
    def rewards_all(self) -> bool:
        """True if one environment or agent rewards all prompts."""
        return self.kind is not None and not self.by_source

    @property
    def name(self) -> str:
        """Name of the environment, of the agent's function or of its program."""
        return self.environment or self.agent or " ".join(self.command[:1])

    @property
    def taskset(self) -> str | None:
        """Name of the environment of verifiers; None: it is no such environment."""
        if self.environment is None or not self.environment.startswith(VERIFIERS):
            return None
        return self.environment.removeprefix(VERIFIERS)

    @property
    def has_agent(self) -> bool:
        """True if what drives the trajectories calls the policy."""
        return self.kind in ("agent", "command") or self.taskset is not None

    @property
    def merges(self) -> bool:
        """True if a turn that continues the turn before is a part of its sample."""
        return self.form == "concatenated" or self.merge

    def most_sampled(self, each: int) -> int:
        """Tokens that the policy may sample in a trajectory whose turns may have ``each``."""
        return each if self.kind is None else min(self.max_turns * each, self.max_tokens)
