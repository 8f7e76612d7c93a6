"""Conversations of messages as environments.

A conversation is rendered once, when it begins. Later messages are appended as the tokens that the
chat template adds behind an assistant's turn, so that what was sampled stays as it was sampled.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pyrl_ext.data.chat_template import ChatTemplate, Message, Tool
from pyrl_ext.data.environment import Context, StepResult
from pyrl_ext.data.rewards import exact_match, read_reward
from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.parallel.user_code import describe, load_callable
from pyrl_ext.prompt import Prompt

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


class ChatTurns:
    """A conversation that a chat template renders.

    Args:
        tokenizer: with a chat template
        tools: schemas that the template shows at the beginning
        role: of the messages that will follow an assistant's turn
        forks: a template that writes earlier turns differently once a message follows is accepted;
            the whole conversation is then rendered for every turn, as a fork

    Attributes:
        forgets: how the template does that; None: it keeps earlier turns as they are

    Raises:
        ValueError: the template does that, and ``forks`` is False
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool] = (),
        role: str = "user",
        forks: bool = False,
    ):
        self.tools = list(tools)
        self.forgets: str | None = None
        self._template = ChatTemplate(tokenizer)
        self._messages: list[Message] = []
        if not self._template.keeps_turns(role, self.tools):
            self.forgets = (
                "chat template: it writes an assistant's turn differently once a message of role "
                f"{role} follows, expected the same"
            )
        if self.forgets is not None and not forks:
            raise ValueError(
                f"{self.forgets}; every such turn would be a fork. Use a template that keeps "
                "earlier turns as they are, or turns.form stepwise, which trains them separately"
            )

    def opening(self, messages: Sequence[Message]) -> Context:
        """A conversation, up to where the assistant begins."""
        self._messages = [*messages]
        return Context(self._template.open(self._messages, self.tools))

    def after(
        self, tokens: Sequence[int], text: str, messages: Sequence[Message]
    ) -> list[int] | Context:
        """Tokens to append behind an assistant's turn, up to where it begins its next; the whole
        conversation if the template writes the turn differently.

        Args:
            tokens, text: of the assistant's turn
        """
        said: Message = {"role": "assistant", "content": text}
        whole = [*self._messages, said, *messages]
        added = None
        if self.forgets is None:
            added = self._template.added(said, messages, self.tools, tokens[-1])
        if added is None:
            return self.opening(whole)
        self._messages = whole
        return added


class Messages:
    """An environment that takes and gives messages of the form {"role": ..., "content": ...}.

    Args:
        environment: module:Class with reset() -> messages, or reset(prompt); and step(message) ->
            (messages, reward, done)
        options: its keyword arguments
        tokenizer, forks: of the run
    """

    role = "user"

    def __init__(
        self,
        environment: str,
        tokenizer: Tokenizer,
        options: Mapping[str, Any] | None = None,
        forks: bool = False,
    ):
        self.inner: Any = load_callable("environment", environment)(**(options or {}))
        self.chat = ChatTurns(tokenizer, role=self.role, forks=forks)

    def start(self, prompt: Prompt) -> Context:
        """The rendered messages of ``reset``; the prompt's tokens are not shown."""
        takes = inspect.signature(self.inner.reset).parameters
        return self.chat.opening(self.inner.reset(prompt) if takes else self.inner.reset())

    def step(self, tokens: list[int], text: str) -> StepResult:
        """Pass on the assistant's message, and append what is answered."""
        messages, reward, done = self.inner.step({"role": "assistant", "content": text})
        added = None if done else self.chat.after(tokens, text, messages)
        return StepResult(added, reward, done)


class Tools:
    """Python functions that the policy may call before it answers.

    A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; its result comes back as
    a message of role tool, an error as its text. A response without a call is the answer, which
    the reward scores; responses with calls earn nothing.

    Args:
        tools: functions as module:function; their type hints and docstrings become schemas
        reward: module:function of (prompt, text, tokens); null: 1 if the answer is the prompt's
        tokenizer, forks: of the run
    """

    role = "tool"

    def __init__(
        self,
        tools: Sequence[str],
        tokenizer: Tokenizer,
        reward: str | None = None,
        forks: bool = False,
    ):
        functions = [load_callable("tools", name) for name in tools]
        self.tools = {function.__name__: function for function in functions}
        self.reward = load_callable("reward", reward) if reward else exact_match
        schemas = [schema(function) for function in functions]
        self.chat = ChatTurns(tokenizer, schemas, self.role, forks)

    def start(self, prompt: Prompt) -> Context:
        """The prompt's text as the user's message, with the tools as the template shows them."""
        self.prompt = prompt
        return self.chat.opening([{"role": "user", "content": prompt.text}])

    def step(self, tokens: list[int], text: str) -> StepResult:
        """Run the calls of a response, or score it as the answer."""
        calls = _CALL.findall(text)
        if not calls:
            reward, _ = read_reward(self.reward(self.prompt, text, tokens))
            return StepResult(None, reward, True)
        results = [{"role": "tool", "content": self._call(call)} for call in calls]
        return StepResult(self.chat.after(tokens, text, results))

    def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
            name = call["name"]
            arguments = call.get("arguments", {})
            if name not in self.tools:
                return f"error: no tool {name!r}, expected one of {', '.join(self.tools)}"
            return str(self.tools[name](**arguments))
        except Exception as error:  # of the policy's text or of the tool: it reads which
            return f"error: {describe(error)}"


def check_template(environment: str, tokenizer: Tokenizer, forks: bool) -> None:
    """Check the chat template for a built-in environment of messages, before a run.

    A line on stderr says if every turn will be a fork.

    Raises:
        ValueError: it would be one, and ``forks`` is False
    """
    for kind in (Messages, Tools):
        if environment == kind.__name__.lower():
            chat = ChatTurns(tokenizer, role=kind.role, forks=forks)
            if chat.forgets is not None:
                print(f"{chat.forgets}; every turn is a fork, and a sample", file=sys.stderr)


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function, from its type hints and the first line of its docstring.

    Raises:
        ValueError: a parameter without a type that JSON has
    """
    hints = get_type_hints(function)
    properties = dict[str, Any]()
    required = list[str]()
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints.get(name)
        if get_origin(kind) is Literal:
            properties[name] = {"type": "string", "enum": list(get_args(kind))}
        elif (kind := get_origin(kind) or kind) in _TYPES:
            properties[name] = {"type": _TYPES[kind]}
        else:
            types = ", ".join(each.__name__ for each in _TYPES)
            raise ValueError(
                f"tools: {function.__name__}({name}): type {kind}, expected one of "
                f"{types}, or Literal texts"
            )
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    about = (inspect.getdoc(function) or "").partition("\n")[0]
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": about, "parameters": parameters}
    return {"type": "function", "function": described}
