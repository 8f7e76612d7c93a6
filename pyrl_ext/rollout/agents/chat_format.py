"""Chat messages as token ids, and completions as messages.

A conversation is rendered when it opens. What follows an assistant's turn is appended to the ids as
they were sampled, which are never rendered again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict, get_args

from pydantic import TypeAdapter, ValidationError

from pyrl_ext.data.chat import check_known, encoded
from pyrl_ext.data.files import Broken, cut
from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.parallel.user_code import describe

Message = dict[str, Any]
"""In OpenAI's format: role, content (text or None), tool_calls, tool_call_id, name and
reasoning_content."""

Tool = Mapping[str, Any]
"""In OpenAI's format: {"type": "function", "function": {"name", "description", "parameters"}}."""


class FormatError(ValueError):
    """Messages cannot be rendered."""


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
        self._template = _Template(tokenizer)
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
            FormatError: the messages or tools are malformed, or the template refuses them
        """
        checked = _name_results(_check(messages))
        _validated("tools", _TOOLS, tools)
        if self._renderer is None:
            return self._template.open(checked, tools)
        return self._rendered(checked, tools)

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
            new_messages: of users, tools or the system, after it

        Returns: None if the format rewrites earlier turns, so that the conversation has to be
        opened again.

        Raises:
            FormatError: the messages are malformed, or the template refuses them
        """
        said = _check(messages[-1:])[0]
        if said["role"] != "assistant":
            raise FormatError(f"messages end with role {said['role']}, expected the assistant's")
        new = _check(new_messages, "new messages")
        if any(message["role"] == "assistant" for message in new):
            return None
        said, *new = _name_results([said, *new])
        known = [*prompt_ids, *completion_ids]
        if self._renderer is not None:
            bridged = self._bridged(list(prompt_ids), list(completion_ids), new, tools)
            if bridged is not None and bridged[: len(known)] == known:
                return bridged
            if not self._proven:
                return None
        added = self._template.added(list(completion_ids), said, new, tools)
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
            raise FormatError(f"renderer {self.name}: {describe(error)}") from error
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
            raise FormatError(f"renderer {self.name}: {describe(error)}") from error
        if bridge is None:
            return None
        self._check_known(shaped, bridge.token_ids[len(prompt) + len(completion) :])
        return list(bridge.token_ids)

    def _check_known(self, shaped: list[Message], ids: list[int]) -> None:
        text = "\n".join(message.get("content") or "" for message in shaped)
        try:
            check_known(text, ids, self._tokenizer)
        except Broken as broken:
            raise FormatError(str(broken)) from None


_ASKED: Message = {"role": "user", "content": "@asked@"}
_SAID = "@said@"
_STUB: Message = {"role": "assistant", "content": _SAID}
_CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK = "<think>"
_THOUGHT = "</think>"
_TAIL = 16  # last tokens of a prompt; a template may open the reasoning in them


class _Template:
    """The tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._arguments_as_text = False
        self._no_content: str | None = ""
        self._find_shape()
        said = self._text([_ASKED, _STUB], (), False)
        if _SAID not in said:
            raise ValueError(
                f"the chat template writes an assistant's text {_SAID!r} as {cut(said)}, expected "
                "one that takes content as text"
            )
        self._end = said.rpartition(_SAID)[2]
        thinking = {**_STUB, "reasoning_content": "@thought@"}
        self._takes_reasoning = "@thought@" in self._text([_ASKED, thinking], (), False)

    def open(self, messages: list[Message], tools: Sequence[Tool]) -> list[int]:
        """The ids of a conversation, up to where the assistant begins. Raises: FormatError."""
        return self._ids(self._text(messages, tools, True))

    def added(
        self, completion: list[int], said: Message, new: list[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Token ids that the ``new`` messages add after a completion.

        It is read from a short conversation with a message like ``said``, and without the history.

        Returns: None if the template writes the assistant's turn differently once they follow.

        Raises: FormatError.
        """
        stub = {**said, "content": _SAID}
        stub.pop("reasoning_content", None)
        text = self._tokenizer.decode(completion)
        if _THINK in text or _THOUGHT in text:
            if self._takes_reasoning:
                stub["reasoning_content"] = _SAID
            else:
                stub["content"] = f"{_THINK}\n{_SAID}\n{_THOUGHT}\n\n{_SAID}"
        behind = self._behind(stub, new, tools)
        if behind is None:
            return None
        ids = self._ids(behind)
        if completion and ids and completion[-1] == ids[0]:  # the end of the turn was sampled
            ids = ids[1:]
        return ids

    def stops(self) -> set[int]:
        """The tokens that end an assistant's turn, as far as the template shows them."""
        found = {self._tokenizer.eos_token_id}
        for role in ("user", "tool"):
            try:
                behind = self._behind(_STUB, [{**_ASKED, "role": role}], ())
            except FormatError:  # the template has no such role
                continue
            found.update(encoded(behind or self._end, self._tokenizer, False)[:1])
        return found

    def shaped(self, messages: list[Message]) -> list[Message]:
        """The messages as the template takes them; arguments of tool calls are objects."""
        shaped = list[Message]()
        for message in messages:
            message = dict(message)
            if message["content"] is None:
                message["content"] = self._no_content
            if self._arguments_as_text and "tool_calls" in message:
                calls = [_with_text(call) for call in message["tool_calls"]]
                message["tool_calls"] = calls
            shaped.append(message)
        return shaped

    def _find_shape(self) -> None:
        """Templates write a call's arguments from an object or from its text, and differ in whether
        a message without content has None or an empty text."""
        for text in (False, True):
            for no_content in (None, ""):
                self._arguments_as_text = text
                self._no_content = no_content
                try:
                    written = self._text(_TALK, (), True)
                except FormatError:
                    continue
                if "Paris" in written and "{'" not in written and "None" not in written:
                    return
        self._arguments_as_text = False

    def _behind(self, stub: Message, new: list[Message], tools: Sequence[Tool]) -> str | None:
        opening = self._text([_ASKED], tools, True)
        known = self._text([_ASKED, stub], tools, False)
        whole = self._text([_ASKED, stub, *new], tools, True)
        if not known.endswith(self._end) or (_THOUGHT in stub["content"] and _THOUGHT not in known):
            return None
        known = known.removesuffix(self._end)
        if known.startswith(opening) and whole.startswith(known):
            return whole[len(known) :]
        # an empty thought before the last turn alone, which was not sampled
        known = opening + known[known.rindex(_SAID) :]
        if stub["content"] == _SAID and "reasoning_content" not in stub and whole.startswith(known):
            return whole[len(known) :]
        return None

    def _text(self, messages: list[Message], tools: Sequence[Tool], generate: bool) -> str:
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            return self._tokenizer.apply_chat_template(
                self.shaped(messages), tokenize=False, add_generation_prompt=generate, **options
            )
        except Exception as error:  # templates raise what they like
            raise FormatError(f"chat template: {describe(error)}") from error

    def _ids(self, text: str) -> list[int]:
        try:
            ids = encoded(text, self._tokenizer, add_special_tokens=False)
            check_known(text, ids, self._tokenizer)
        except Broken as broken:
            raise FormatError(str(broken)) from None
        return ids


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
_TALK: list[Message] = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00000",  # some templates want nine characters
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Paris"}},
            }
        ],
    },
    {"role": "tool", "content": "sun", "tool_call_id": "call00000", "name": "weather"},
]
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
    (_TALK, [_TOOL]),
    ([*_TALK, {"role": "assistant", "content": "a"}, {"role": "user", "content": "p"}], [_TOOL]),
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
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode("utf-8")
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


# messages


class _Part(TypedDict):
    type: Literal["text"]
    text: str


class _Function(TypedDict):
    name: str
    arguments: str | dict[str, Any]


class _ChatCall(TypedDict, total=False):
    id: str
    type: Literal["function"]
    function: Required[_Function]


class _ChatMessage(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | list[_Part] | None
    tool_calls: list[_ChatCall] | None
    tool_call_id: str | None
    name: str | None
    reasoning_content: str | None


_MESSAGES = TypeAdapter(list[_ChatMessage])


class _Named(TypedDict):
    name: str


class _ChatTool(TypedDict):
    type: Literal["function"]
    function: _Named


_TOOLS = TypeAdapter(list[_ChatTool])


def _check(messages: Sequence[Message], name: str = "messages") -> list[Message]:
    """The messages with text as content, objects as arguments, and without fields that are null.

    Raises: FormatError.
    """
    if not messages:
        raise FormatError(f"no {name}, expected at least one")
    taken: Any = _validated(name, _MESSAGES, messages)
    checked = list[Message]()
    for place, message in enumerate(taken):
        where = f"{name}[{place}]"
        given: Message = {key: value for key, value in message.items() if value not in (None, [])}
        role = "system" if message["role"] == "developer" else message["role"]
        given["role"] = role
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        given["content"] = content
        if content is None and role != "assistant":
            raise FormatError(f"{where} of role {role} without content, expected text")
        if "tool_calls" in given:
            given["tool_calls"] = [_with_object(call, where) for call in given["tool_calls"]]
        checked.append(given)
    return checked


def _name_results(messages: list[Message]) -> list[Message]:
    """The messages with the tool's name in each result: clients send only the id of the call."""
    names = dict[str, str]()
    named = list[Message]()
    for message in messages:
        for call in message.get("tool_calls", []):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        called = message.get("tool_call_id")
        if message["role"] == "tool" and called in names:
            message = {"name": names[called], **message}
        named.append(message)
    return named


def _validated(name: str, adapter: TypeAdapter[Any], given: Any) -> Any:
    given = list(given)
    try:
        json.dumps(given, ensure_ascii=False).encode("utf-8")
        return adapter.validate_python(given, strict=True)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise FormatError(f"{name} with {half!r}, half a character; expected UTF-8") from None
    except ValidationError as error:
        raise FormatError(_explain(name, given, error)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{name}: {describe(error)}, expected JSON") from None


def _explain(name: str, given: Any, error: ValidationError) -> str:
    """The deepest of the faults, with its place; others are of kinds that the value is not of."""
    fault = max(error.errors(), key=lambda each: len(each["loc"]))
    found = given
    for key in fault["loc"]:
        if isinstance(found, list) and isinstance(key, int):
            name += f"[{key}]"
            found = found[key]
        elif isinstance(found, dict) and key in found:
            name += f".{key}"
            found = found[key]
    if fault["type"] == "missing":
        return f"{name} {cut(found)} without {fault['loc'][-1]}, expected one"
    rule = fault["msg"].removeprefix("Input should be ")
    return f"{name} {cut(found)}, expected {rule}"


def _with_object(call: Message, where: str) -> Message:
    """A call of a message with its arguments as an object. Raises: FormatError."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
            json.dumps(arguments, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        shown = cut(function["arguments"])
        raise FormatError(f"{where}: arguments {shown} of a tool call, expected a JSON object")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _with_text(call: Message) -> Message:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
