"""Requests, replies and errors of the endpoint that agents call, in OpenAI's JSON.

An argument that the endpoint cannot obey is refused, never ignored: tokens that were drawn from
another distribution than the agent asked for would be trained on without anyone knowing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

MAX_BODY = 16 << 20  # of a request [bytes]
MAX_DEPTH = 100  # of objects and lists within each other
SHOWN = 200  # characters of a wrong value in a message


class ApiError(Exception):
    """An error that the client is told.

    Args:
        status: of HTTP
        message: what is wrong, what is expected and what to do
        code: OpenAI's name of the error, `invalid_api_key` for example
        param: name of the wrong argument, `messages[0].content` for example
        kind: OpenAI's type of the error
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


@dataclass(frozen=True)
class Rules:
    """Sampling parameters of the run, which requests cannot change.

    Args:
        model: name that requests use
        temperature, top_p, stop: of the run; a request cannot change them
        max_new_tokens: most tokens of one answer
        vocabulary: number of token ids
    """

    model: str
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    max_new_tokens: int
    vocabulary: int


@dataclass(frozen=True)
class ChatRequest:
    """A call of /v1/chat/completions.

    Args:
        messages: with role, content (text or None), and those of tool_calls, tool_call_id, name
            and reasoning_content that are set
        tools: function tools as the client wrote them
        calls: True if the policy may call the tools
        max_tokens: maximum number of tokens of the answer; None: the run's maximum
        stream: True if the reply is a stream of events
        include_usage: True if the stream ends with the numbers of tokens
        logprobs: True if the reply has the log-probs of the sampled tokens
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    calls: bool
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool


@dataclass(frozen=True)
class CompletionRequest:
    """A call of /v1/completions.

    Args:
        prompt: text, or token ids
        max_tokens, stream, include_usage, logprobs: as in `ChatRequest`
    """

    prompt: str | list[int]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool


@dataclass(frozen=True)
class Answer:
    """The answer of a trajectory to a call.

    Args:
        text: None: the policy only called tools or reasoned
        reasoning: text before the answer; None: there is none
        tool_calls: (id, name, arguments as JSON text) of each
        finish_reason: why it ended
        prompt_tokens: number of tokens before the sampled ones
        token_texts: text of each sampled token, where log-probs were asked for
        logprobs: of each sampled token, in the run's distribution
    """

    text: str | None
    reasoning: str | None
    tool_calls: tuple[tuple[str, str, str], ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]


# JSON ---------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    """A value in a message, as the client wrote it."""
    text = json.dumps(value)
    if len(text) <= SHOWN:
        return text
    return text[:SHOWN] + "..."


def _wrong(param: str, value: Any, expected: str) -> ApiError:
    return ApiError(400, f"{param} is {_shown(value)}, expected {expected}", param=param)


def _unreadable(reason: str) -> ApiError:
    return ApiError(400, f"the body is no valid JSON: {reason}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ApiError(
                400, f"the key {_shown(name)} occurs twice in an object, expected once", param=name
            )
        found[name] = value
    return found


def _no_number(text: str) -> float:
    raise _unreadable(f"{text}, expected a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _no_number(text[:SHOWN])
    return number


def _require_shallow(value: Any) -> None:
    """Raises: ApiError for more than MAX_DEPTH objects and lists within each other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            inner += [item for item in values if isinstance(item, dict | list)]
        if not inner:
            return
        level = inner
    raise _unreadable(f"more than {MAX_DEPTH} objects and lists within each other")


def _arguments(body: bytes) -> dict[str, Any]:
    """The object in a body. Raises: ApiError."""
    try:
        text = body.decode()
        arguments = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
        )
    except RecursionError:
        raise _unreadable(f"more than {MAX_DEPTH} objects and lists within each other") from None
    except ValueError as error:
        raise _unreadable(str(error)) from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"the body is {_shown_kind(arguments)}, expected an object")
    _require_shallow(arguments)
    if "\\u" in text:
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _unreadable("half of a surrogate pair, expected Unicode text") from None
    return arguments


def _shown_kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else _shown(value)


# Arguments that the run decides -------------------------------------------------------------------


@dataclass(frozen=True)
class _Neutral:
    """An argument that may only be given without effect.

    Args:
        values: that may be given, next to null
        reason: why no others
    """

    values: tuple[Any, ...]
    reason: str


_ONE_ANSWER = "a call gets one answer"
_DISTRIBUTION = "the log-probs that are trained on belong to the run's distribution"

_NEUTRAL_IN_BOTH = {
    "n": _Neutral((1,), _ONE_ANSWER),
    "seed": _Neutral((), "the trainer draws by the run's seed"),
    "frequency_penalty": _Neutral((0,), _DISTRIBUTION),
    "presence_penalty": _Neutral((0,), _DISTRIBUTION),
    "logit_bias": _Neutral(({},), _DISTRIBUTION),
}
_NEUTRAL_IN_CHATS = _NEUTRAL_IN_BOTH | {
    "tool_choice": _Neutral(("auto", "none"), "a call cannot be enforced while tokens are sampled"),
    "parallel_tool_calls": _Neutral((True,), "the number of calls cannot be limited"),
    "response_format": _Neutral(({"type": "text"},), "a format cannot be enforced"),
    "top_logprobs": _Neutral((0,), "log-probs of sampled tokens are known, of others not"),
}
_NEUTRAL_IN_COMPLETIONS = _NEUTRAL_IN_BOTH | {
    "best_of": _Neutral((1,), _ONE_ANSWER),
    "echo": _Neutral((False,), "a reply has sampled tokens only"),
    "suffix": _Neutral(("",), "tokens are sampled at the end of the prompt"),
}


def _equal(value: Any, other: Any) -> bool:
    """True if two values are the same JSON; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _take_neutral(arguments: dict[str, Any], table: dict[str, _Neutral]) -> None:
    """Remove the arguments of a table. Raises: ApiError for one that would have an effect."""
    for name, neutral in table.items():
        value = arguments.pop(name, None)
        if value is None or any(_equal(value, other) for other in neutral.values):
            continue
        expected = " or ".join(_shown(other) for other in neutral.values) or "none"
        raise _wrong(name, value, f"{expected}: {neutral.reason}. Leave it out")


def _take_sampling(arguments: dict[str, Any], rules: Rules) -> None:
    """Remove temperature, top_p and stop. Raises: ApiError for others than the run's."""
    for name, of_run in (("temperature", rules.temperature), ("top_p", rules.top_p)):
        value = arguments.pop(name, None)
        if value is not None and not _equal(value, of_run):
            raise _wrong_sampling(name, value, of_run)
    stop = arguments.pop("stop", None)
    texts = [stop] if isinstance(stop, str) else stop
    if texts is not None and texts != list(rules.stop):
        raise _wrong_sampling("stop", stop, list(rules.stop))


def _wrong_sampling(name: str, value: Any, of_run: Any) -> ApiError:
    return _wrong(
        name,
        value,
        f"the run's {_shown(of_run)}: {_DISTRIBUTION}. Leave it out, or set rollout.{name} in the "
        "config",
    )


def _require_model(arguments: dict[str, Any], rules: Rules) -> None:
    model = arguments.get("model")
    if not isinstance(model, str):
        raise _wrong("model", model, f"the text {_shown(rules.model)}")
    require_model(model, rules)


def require_model(model: str, rules: Rules) -> None:
    """Raises: ApiError for another model than the run's."""
    if model != rules.model:
        message = f"the model {_shown(model)} does not exist, expected {_shown(rules.model)}"
        raise ApiError(404, message, "model_not_found", "model", "not_found_error")


# Arguments of the client --------------------------------------------------------------------------


def _parts(content: Any) -> Any:
    """Content as a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise PydanticCustomError("content", "text or a list of text parts")
    return content


def _text_only(kind: Any) -> Any:
    if kind != "text":
        raise PydanticCustomError(
            "part", '"text": agents send text only, no images, audio or files'
        )
    return kind


def _null_if_empty(value: Any) -> Any:
    return None if value in ("", [], {}) else value


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}\z")]
Nothing = Annotated[None, BeforeValidator(_null_if_empty)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Part(_Strict):
    type: Annotated[str, BeforeValidator(_text_only)]
    text: str


Parts = Annotated[list[_Part], Field(min_length=1)]
Content = Annotated[Parts | None, BeforeValidator(_parts)]


class _Called(_Strict):
    name: str
    arguments: str


class _ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: _Called
    index: int | None = None  # of streams, where clients keep it


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # the client writes these into messages that it got
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None

    @property
    def text(self) -> str | None:
        if self.content is None:
            return None
        return "".join(part.text for part in self.content)

    def normal(self) -> dict[str, Any]:
        """The message as in `ChatRequest`."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            calls: list[dict[str, Any]] = []
            for call in self.tool_calls:
                calls.append(_call(call.id, call.function.name, call.function.arguments))
            message["tool_calls"] = calls
        for key in ("tool_call_id", "name", "reasoning_content"):
            value = getattr(self, key)
            if value is not None:
                message[key] = value
        return message


class _Function(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Arguments(_Strict):
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # accepted without effect
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class _ChatArguments(_Arguments):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None


class _CompletionArguments(_Arguments):
    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


# What pydantic says in Python's terms, by the type of its error.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "none_required": "null",
    "string_pattern_mismatch": "1 to 64 letters, digits, _ or -",
    "string_type": "text",
    "too_short": "at least one item",
}


def _param(path: tuple[int | str, ...]) -> str:
    """The name of a place in the arguments, `messages[0].content` for example."""
    name = ""
    for step in path:
        if isinstance(step, int):
            name += f"[{step}]"
        else:
            name += f".{step}" if name else step
    return name


def _checked[T: BaseModel](kind: type[T], arguments: dict[str, Any]) -> T:
    """Raises: ApiError for the first wrong argument."""
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
    param = _param(wrong["loc"])[:SHOWN]
    if wrong["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
        raise ApiError(400, message, param=param)
    if wrong["type"] == "missing":
        raise ApiError(400, f"{param} is missing, expected a value", param=param)
    expected = _EXPECTED.get(wrong["type"], wrong["msg"].removeprefix("Input should be "))
    raise _wrong(param, wrong["input"], expected)


def _budget(arguments: _Arguments, completion: int | None, rules: Rules) -> int | None:
    """The most tokens of an answer, at most the run's; None: it is not asked for."""
    asked = arguments.max_tokens
    if asked is not None and completion is not None and asked != completion:
        expected = f"max_completion_tokens, {completion}. Leave one of them out"
        raise _wrong("max_tokens", asked, expected)
    asked = completion if asked is None else asked
    return None if asked is None else min(asked, rules.max_new_tokens)


def _require_stream(arguments: _Arguments) -> None:
    if arguments.stream_options is not None and not arguments.stream:
        message = "stream_options is given without stream, expected stream true. Leave it out"
        raise ApiError(400, message, param="stream_options")


def _require_role_keys(message: _Message, where: str) -> None:
    """Raises: ApiError for keys that a message of this role lacks or cannot have."""
    role = _shown(message.role)
    if message.role != "assistant":
        for key in ("tool_calls", "reasoning_content"):
            if getattr(message, key) is not None:
                param = f"{where}.{key}"
                text = f"{param} is set in a message of role {role}, expected in assistant's only"
                raise ApiError(400, text, param=param)
    if (message.role == "tool") != (message.tool_call_id is not None):
        param = f"{where}.tool_call_id"
        expected = "the id of a tool call in messages of role tool, and nowhere else"
        raise _wrong(param, message.tool_call_id, expected)
    says_nothing = not message.tool_calls and message.reasoning_content is None
    if message.content is None and (message.role != "assistant" or says_nothing):
        expected = "text; only assistant messages with tool_calls or reasoning_content have none"
        raise _wrong(f"{where}.content", None, expected)


def _require_distinct(tools: list[_Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            raise _wrong(f"tools[{index}].function.name", name, "a name that no tool before has")
        names.add(name)


def read_chat(body: bytes, rules: Rules) -> ChatRequest:
    """The request in the body of a POST to /v1/chat/completions. Raises: ApiError."""
    arguments = _arguments(body)
    _require_model(arguments, rules)
    calls = arguments.get("tool_choice") != "none"
    _take_neutral(arguments, _NEUTRAL_IN_CHATS)
    _take_sampling(arguments, rules)
    checked = _checked(_ChatArguments, arguments)
    _require_stream(checked)
    _require_distinct(checked.tools or [])
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(checked.messages):
        _require_role_keys(message, f"messages[{index}]")
        messages.append(message.normal())
    return ChatRequest(
        messages,
        arguments.get("tools") or [],
        calls,
        _budget(checked, checked.max_completion_tokens, rules),
        bool(checked.stream),
        checked.include_usage,
        bool(checked.logprobs),
    )


def _prompt(prompt: Any, rules: Rules) -> str | list[int]:
    """Text or token ids, also as the only item of a list. Raises: ApiError."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            text = f"prompt is a list of {len(prompt)} prompts, expected one: {_ONE_ANSWER}"
            raise ApiError(400, text, param="prompt")
        prompt = prompt[0]
    if not isinstance(prompt, str | list) or not prompt:
        raise _wrong("prompt", prompt, "text or a list of token ids, not empty")
    if isinstance(prompt, str):
        return prompt
    for index, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < rules.vocabulary:
            raise _wrong(f"prompt[{index}]", token, f"a token id below {rules.vocabulary}")
    return prompt


def read_completion(body: bytes, rules: Rules) -> CompletionRequest:
    """The request in the body of a POST to /v1/completions. Raises: ApiError."""
    arguments = _arguments(body)
    _require_model(arguments, rules)
    _take_neutral(arguments, _NEUTRAL_IN_COMPLETIONS)
    _take_sampling(arguments, rules)
    checked = _checked(_CompletionArguments, arguments)
    _require_stream(checked)
    return CompletionRequest(
        _prompt(checked.prompt, rules),
        _budget(checked, None, rules),
        bool(checked.stream),
        checked.include_usage,
        checked.logprobs is not None,
    )


# Replies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """Fields that all replies to a call have.

    Args:
        id: of the call
        created: time [s since 1970]
        model: name
    """

    id: str
    created: int
    model: str

    def reply(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }


def model_entry(model: str, created: int) -> dict[str, Any]:
    """An entry of /v1/models."""
    return {"id": model, "object": "model", "created": created, "owned_by": "pyrl_ext"}


def _call(name_of_call: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": name_of_call, "type": "function", "function": function}


def _usage(answer: Answer) -> dict[str, int]:
    sampled = len(answer.logprobs)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
    }


def _chat_logprobs(answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for text, logprob in zip(answer.token_texts, answer.logprobs, strict=True):
        # a token that ends within a character has no bytes here
        data = None if "\ufffd" in text else list(text.encode())
        content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _completion_logprobs(answer: Answer) -> dict[str, Any]:
    offsets: list[int] = []
    length = 0
    for text in answer.token_texts:
        offsets.append(length)
        length += len(text)
    return {
        "tokens": list(answer.token_texts),
        "token_logprobs": list(answer.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def message_of(answer: Answer) -> dict[str, Any]:
    """The assistant's message, as in `ChatRequest`."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [_call(*call) for call in answer.tool_calls]
    return message


def chat_reply(answer: Answer, request: ChatRequest, head: Head) -> dict[str, Any]:
    """The reply to a chat."""
    choice = {
        "index": 0,
        "message": message_of(answer) | {"refusal": None},
        "logprobs": _chat_logprobs(answer) if request.logprobs else None,
        "finish_reason": answer.finish_reason,
    }
    return head.reply("chat.completion", [choice]) | {"usage": _usage(answer)}


def chat_chunks(answer: Answer, request: ChatRequest, head: Head) -> list[dict[str, Any]]:
    """The events of a chat's stream; log-probs are in the last one before the finish reason."""
    content = None if answer.text is None else ""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": content}]
    if answer.reasoning is not None:
        deltas.append({"reasoning_content": answer.reasoning})
    if answer.text is not None:
        deltas.append({"content": answer.text})
    for index, call in enumerate(answer.tool_calls):
        deltas.append({"tool_calls": [{"index": index} | _call(*call)]})
    choices: list[dict[str, Any]] = []
    for delta in deltas:
        choices.append({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})
    if request.logprobs:
        choices[-1]["logprobs"] = _chat_logprobs(answer)
    finish = answer.finish_reason
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish})
    return _chunks("chat.completion.chunk", choices, answer, request, head)


def completion_reply(answer: Answer, request: CompletionRequest, head: Head) -> dict[str, Any]:
    """The reply to a prompt."""
    choice = {
        "index": 0,
        "text": answer.text or "",
        "logprobs": _completion_logprobs(answer) if request.logprobs else None,
        "finish_reason": answer.finish_reason,
    }
    return head.reply("text_completion", [choice]) | {"usage": _usage(answer)}


def completion_chunks(
    answer: Answer, request: CompletionRequest, head: Head
) -> list[dict[str, Any]]:
    """The events of a prompt's stream: one with the text, one with the finish reason."""
    logprobs = _completion_logprobs(answer) if request.logprobs else None
    finish = answer.finish_reason
    choices: list[dict[str, Any]] = [
        {"index": 0, "text": answer.text or "", "logprobs": logprobs, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": finish},
    ]
    return _chunks("text_completion", choices, answer, request, head)


def _chunks(
    kind: str,
    choices: list[dict[str, Any]],
    answer: Answer,
    request: ChatRequest | CompletionRequest,
    head: Head,
) -> list[dict[str, Any]]:
    chunks = [head.reply(kind, [choice]) for choice in choices]
    if request.include_usage:
        for chunk in chunks:
            chunk["usage"] = None
        chunks.append(head.reply(kind, []) | {"usage": _usage(answer)})
    return chunks
