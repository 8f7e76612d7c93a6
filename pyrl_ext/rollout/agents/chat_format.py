"""Chat messages as token ids, and completions as messages.

A conversation is rendered when it opens. What follows an assistant's turn is appended to the ids as
they were sampled, which are never rendered again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pyrl_ext.data.chat import check_known, encoded
from pyrl_ext.data.chat_template import TALK, ChatTemplate, Message, Tool, read_arguments
from pyrl_ext.data.files import Broken
from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.parallel.user_code import describe


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    Args:
        arguments: JSON text of an object
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """An assistant's message.

    Args:
        content: text; None: nothing but reasoning or tool calls
        reasoning: text before the answer; None: there is none
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


class ChatFormat:
    """How conversations of one model are written as token ids.

    Args:
        name: of the renderer
        renderer: of the package `renderers`; None: only the tokenizer's template is used
        proven: True if the renderer writes what the template writes
    """

    def __init__(self, tokenizer: Tokenizer, name: str, renderer: Any, proven: bool):
        self.name = name
        self._template = ChatTemplate(tokenizer)
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._proven = proven
        self._parser = renderer or _generic_parser(tokenizer)
        self._stops = self._template.stops()
        if renderer is not None:
            self._stops.update(renderer.get_stop_token_ids())

    @staticmethod
    def load(tokenizer: Tokenizer, name: str = "auto") -> ChatFormat:
        """The format of a tokenizer.

        Args:
            name: of a renderer; "default": the tokenizer's template; "auto": the first renderer
                that writes conversations as the template does, else "default"

        Raises:
            ValueError: the tokenizer has no chat template for texts, there is no such renderer, or
                it does not fit the tokenizer
        """
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template, expected one: agents chat")
        names = _names()
        if name == "auto":
            return _choose(tokenizer)
        if name == "default":
            return ChatFormat(tokenizer, name, None, True)
        if name not in names:
            raise ValueError(f"renderer {name!r}, expected auto or one of {', '.join(names)}")
        try:
            return ChatFormat(tokenizer, name, _renderer(tokenizer, name), False)
        except Exception as error:  # renderers assert what they need
            raise ValueError(
                f"renderer {name} does not fit the tokenizer: {describe(error)}; expected one that "
                "does, or auto"
            ) from error

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The ids of a whole conversation, up to where the assistant begins.

        Raises:
            Broken: arguments of a tool call are no object, or the template refuses the messages
        """
        named = _named(messages)
        if self._renderer is None:
            return self._template.open(named, tools)
        return self._rendered(named, tools)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """The ids of the next turn's whole context, up to where the assistant begins.

        Args:
            prompt_ids, completion_ids: of the assistant's turn; the result begins with them
            messages: up to the assistant's turn, which is the last
            new_messages: of users, tools or the system, after it; at least one

        Returns: None if the format rewrites earlier turns, so that the conversation has to be
        opened again.

        Raises:
            Broken: as in `open`
        """
        said, *new = _named([messages[-1], *new_messages])
        known = [*prompt_ids, *completion_ids]
        if self._renderer is not None:
            bridged = self._bridged(list(prompt_ids), list(completion_ids), new, tools)
            if bridged is not None and bridged[: len(known)] == known:
                return bridged
            if not self._proven:
                return None
        text = self._tokenizer.decode(list(completion_ids))
        thinks = _THINK in text or _THOUGHT in text
        added = self._template.added(said, new, tools, completion_ids[-1], thinks)
        return None if added is None else known + added

    def parse(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        tools: Sequence[Tool],
        calls: bool = True,
    ) -> Reply:
        """The message that a completion says.

        Args:
            completion_ids: with or without the token that ended the turn
            calls: False: tool calls stay text

        Returns: the tool calls that are complete. If any other is begun, the content is the whole
        text, behind the reasoning.
        """
        ids = list(completion_ids)
        if ids and ids[-1] in self._stops:
            ids.pop()
        text = self._tokenizer.decode(ids)
        before = self._tokenizer.decode(list(prompt_ids[-_TAIL:]))
        thinks = before.rstrip().endswith(_THINK)
        if self._parser is None:
            return _parse_text(text, thinks, calls)
        if self._renderer is None:  # the package looks for the assistant's header of one template
            prompt_ids = encoded(_THINK if thinks else "", self._tokenizer, False)
        try:
            options = {"tools": list(tools), "prompt_ids": list(prompt_ids)}
            parsed = self._parser.parse_response(ids, **options)
        except Exception:  # numbers of 5,000 digits, lists in 10,000 lists: JSON that is not read
            return _as_text(text, ())
        good = tuple(call for call in map(_read_call, parsed.tool_calls) if call is not None)
        if parsed.tool_calls and not calls:
            return _as_text(text, ())
        if len(good) < len(parsed.tool_calls):
            return _as_text(text, good)
        return _reply(parsed.content, parsed.reasoning_content, good)

    def _rendered(self, messages: list[Message], tools: Sequence[Tool]) -> list[int]:
        shaped = self._template.shaped(messages)
        try:
            options = {"tools": list(tools) or None, "add_generation_prompt": True}
            ids = list(self._renderer.render_ids(shaped, **options))
        except Exception as error:  # renderers raise what they like
            raise self._refused(error) from error
        self._check_known(shaped, ids)
        return ids

    def _bridged(
        self, prompt: list[int], completion: list[int], new: list[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        shaped = self._template.shaped(new)
        try:
            options = {"tools": list(tools) or None}
            bridge = self._renderer.bridge_to_next_turn(prompt, completion, shaped, **options)
        except Exception as error:  # renderers raise what they like
            raise self._refused(error) from error
        if bridge is None:
            return None
        self._check_known(shaped, bridge.token_ids[len(prompt) + len(completion) :])
        return list(bridge.token_ids)

    def _refused(self, error: Exception) -> Broken:
        return Broken(f"renderer {self.name}: {describe(error)}", "messages it can render")

    def _check_known(self, shaped: list[Message], ids: list[int]) -> None:
        text = "\n".join(message.get("content") or "" for message in shaped)
        check_known(text, ids, self._tokenizer)


def _named(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates know them: developers are the system, and results of tools have the
    tool's name, since clients send only the id of the call."""
    names = dict[str, str]()
    named = list[Message]()
    for message in messages:
        message = dict(message)
        for call in message.get("tool_calls", []):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message = {"name": names[message["tool_call_id"]], **message}
        named.append(message)
    return named


# the choice of a renderer

_TRIED = (
    "qwen3",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "minimax-m2",
    "deepseek-v3",
    "kimi-k2",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
    "llama-3",
)
"""gpt-oss is not among them: its renderer downloads a vocabulary."""

_PARSERS = {"<｜tool▁calls▁begin｜>": "deepseek-v3", "<arg_key>": "glm", "<function=": "qwen3.5"}
"""Parsers of `renderers`, by what templates of their models hold."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_PROBES: list[tuple[list[Message], list[Tool]]] = [
    ([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], []),
    (
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "user", "content": "p"},
        ],
        [],
    ),
    (TALK, [_TOOL]),
    ([*TALK, {"role": "assistant", "content": "a"}, {"role": "user", "content": "p"}], [_TOOL]),
]
"""Conversations that a renderer has to write as the template does."""


def _names() -> list[str]:
    try:
        from renderers import RendererConfig
    except ImportError as error:
        raise ValueError(
            "agents need the package renderers; pip install 'pyrl-ext[agents]'"
        ) from error
    variants, _ = get_args(RendererConfig)
    names = [variant.model_fields["name"].default for variant in get_args(variants)]
    return sorted(set(names) - {"auto", "custom"})


def _renderer(tokenizer: Any, name: str) -> Any:
    from renderers import config_from_name, create_renderer

    config: Any = config_from_name(name)
    return create_renderer(tokenizer, config)


def _choose(tokenizer: Tokenizer) -> ChatFormat:
    from renderers.base import MODEL_RENDERER_MAP

    template = ChatFormat(tokenizer, "default", None, True)
    mapped = MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
    for name in [mapped, *_TRIED] if mapped else _TRIED:
        try:
            chosen = ChatFormat(tokenizer, name, _renderer(tokenizer, name), True)
            if all(chosen.open(*probe) == template.open(*probe) for probe in _PROBES):
                return chosen
        except Exception:  # renderers assert what they need
            continue
    return template


def _generic_parser(tokenizer: Any) -> Any:
    """A parser of tool calls that are not JSON between tags; None: the template has no such."""
    from renderers import DefaultRendererConfig
    from renderers.default import DefaultRenderer

    template = tokenizer.get_chat_template()
    for mark, name in _PARSERS.items():
        if mark in template:
            config = DefaultRendererConfig(tool_parser=name, reasoning_parser="think")
            return DefaultRenderer(tokenizer, config)
    return None


# completions

_CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK = "<think>"
_THOUGHT = "</think>"
_TAIL = 16  # last tokens of a prompt; a template may open the reasoning in them


def _parse_text(text: str, thinks: bool, calls: bool) -> Reply:
    """The message of a text with calls as JSON between tags.

    Args:
        thinks: the prompt opened the reasoning
    """
    reasoning = None
    body = text
    if thinks or text.lstrip().startswith(_THINK):
        reasoning, closed, body = text.partition(_THOUGHT)
        reasoning = reasoning.lstrip().removeprefix(_THINK).strip()
        body = body.lstrip("\n")
        if not closed and _CALL in text:
            return _as_text(text, ())
    if _CALL not in body or not calls:
        return _reply(body, reasoning, ())
    found = [_read_json(written) for written in _CALLS.findall(body)]
    good = tuple(call for call in found if call is not None)
    if len(good) < body.count(_CALL):
        return _reply(body, reasoning, good)
    return _reply(body[: body.index(_CALL)].rstrip(), reasoning, good)


def _read_json(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    return _call(call.get("name"), call.get("arguments", {}))


def _read_call(parsed: Any) -> ToolCall | None:
    """A call that a renderer has found, if it is complete.

    The status of an argument that is no JSON, or of a tool that is not offered, does not matter.
    """
    if parsed.status not in ("ok", "invalid_json", "unknown_tool"):
        return None
    return _call(parsed.name, parsed.arguments)


def _call(name: Any, arguments: Any) -> ToolCall | None:
    if not isinstance(name, str) or not name:
        return None
    try:
        name.encode("utf-8")
        _, written = read_arguments(arguments)
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, written)


def _as_text(text: str, calls: tuple[ToolCall, ...]) -> Reply:
    reasoning, closed, body = text.partition(_THOUGHT)
    if closed:
        return _reply(body.lstrip("\n"), reasoning.lstrip().removeprefix(_THINK).strip(), calls)
    return _reply(text, None, calls)


def _reply(content: str, reasoning: str | None, calls: tuple[ToolCall, ...]) -> Reply:
    if content or (not reasoning and not calls):
        return Reply(content, reasoning or None, calls)
    return Reply(None, reasoning or None, calls)
