"""The OpenAI-compatible interface as data: requests, answers and errors.

An argument that would change how tokens are drawn is refused unless it says what the run says: the
log-probs that are trained on belong to the run's distribution.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pyrl_ext.plan.language.errors import show

_NUMBERS = itertools.count()
_STARTED = f"{time.time_ns():x}"


class ApiError(Exception):
    """An error of a call.

    Args:
        status: of HTTP
        message: what, expected what
        code, param: as clients of OpenAI read them
        kind: the error's type
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
        """The answer's JSON."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": fields | {"code": self.code}}


@dataclass(frozen=True)
class Rules:
    """What the run's sampling allows.

    Args:
        model: the only one
        temperature, top_p, stop: of the run
        max_new_tokens: longest answer
        vocabulary: number of token ids that the model knows
    """

    model: str
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    max_new_tokens: int
    vocabulary: int


@dataclass(frozen=True)
class ChatRequest:
    """Messages to answer.

    Args:
        messages: role and content, and of the others only the keys that are set
        tools: that the messages' template shows
        calls: False: tool calls in the answer stay text
        max_tokens: longest answer; None: the run's
        stream: the answer is sent as events
        include_usage: the last event holds the number of tokens
        logprobs: of the answer's tokens
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
    """A text, or token ids, to continue; the rest as `ChatRequest`."""

    prompt: str | list[int]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool


@dataclass(frozen=True)
class Answer:
    """The answer of a trajectory to a call.

    Args:
        text: content; None: none
        reasoning: before it
        tool_calls: (id, name, arguments as JSON) of each
        prompt_tokens: number of tokens of its context
        token_texts: of the sampled tokens, where log-probs were asked for
        logprobs: of the sampled tokens
    """

    text: str | None
    reasoning: str | None
    tool_calls: tuple[tuple[str, str, str], ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]


# requests -----------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Function(_Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class _ToolCall(_Strict):
    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: _Function
    index: int | None = None


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what clients write back of an answer
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> _Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls, expected them in messages of the assistant alone")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("no tool_call_id, expected the id of the call that it answers")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("no content, expected text")
        return self

    def plain(self) -> dict[str, Any]:
        """Role, content, and the other keys that are set."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        found: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            calls = [
                call.model_dump(include={"id", "type", "function"}) for call in self.tool_calls
            ]
            found["tool_calls"] = calls
        for name in ("tool_call_id", "name", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return found


class _Schema(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: _Schema

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _ResponseFormat(_Strict):
    type: Literal["text"]


_Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]
_Limit = Annotated[int, Field(ge=1)]


class _Common(_Strict):
    """Arguments of both calls; those that change nothing may be anything."""

    model: str
    max_tokens: _Limit | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    frequency_penalty: Annotated[_Number, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[_Number, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None


class _Chat(_Common):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: _Limit | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: _ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None


class _Completion(_Common):
    prompt: str | list[Annotated[int, Field(ge=0)]] | Annotated[list[str], Field(max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


def read_chat(body: bytes, rules: Rules) -> ChatRequest:
    """The request of a body. Raises: ApiError."""
    found = _read(_Chat, body, rules)
    limits = {each for each in (found.max_tokens, found.max_completion_tokens) if each is not None}
    if len(limits) > 1:
        raise ApiError(
            400,
            f"max_completion_tokens {found.max_completion_tokens} with max_tokens "
            f"{found.max_tokens}, expected one of them",
            param="max_completion_tokens",
        )
    return ChatRequest(
        messages=[message.plain() for message in found.messages],
        tools=[tool.plain() for tool in found.tools or ()],
        calls=found.tool_choice != "none",
        max_tokens=next(iter(limits), None),
        stream=bool(found.stream),
        include_usage=_usage(found),
        logprobs=bool(found.logprobs),
    )


def read_completion(body: bytes, rules: Rules) -> CompletionRequest:
    """The request of a body. Raises: ApiError."""
    found = _read(_Completion, body, rules)
    prompt: Any = found.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        (prompt,) = prompt
    if not prompt:
        raise ApiError(400, "prompt: empty, expected a text or token ids", param="prompt")
    if not isinstance(prompt, str) and max(prompt) >= rules.vocabulary:
        rule = f"0 to {rules.vocabulary - 1}, the model's"
        raise ApiError(400, f"prompt: token id {max(prompt)}, expected {rule}", param="prompt")
    return CompletionRequest(
        prompt=prompt,
        max_tokens=found.max_tokens,
        stream=bool(found.stream),
        include_usage=_usage(found),
        logprobs=found.logprobs is not None,
    )


def _usage(found: _Common) -> bool:
    return found.stream_options is not None and bool(found.stream_options.include_usage)


def _read[T: _Common](kind: type[T], body: bytes, rules: Rules) -> T:
    try:
        tree = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        text = f"the body is no JSON: {type(error).__name__}: {error}, expected a JSON object"
        raise ApiError(400, text) from None
    if not isinstance(tree, dict):
        raise ApiError(400, f"the body is {show(tree)[:200]}, expected a JSON object")
    if unknown := [name for name in tree if name not in kind.model_fields]:
        text = f"Unrecognized request argument supplied: {unknown[0]}"
        raise ApiError(400, text, "unknown_parameter", unknown[0])
    try:
        found = kind.model_validate(tree)
    except (ValidationError, RecursionError) as error:
        raise _invalid(error) from None
    if found.model != rules.model:
        rule = f"expected {rules.model!r}, the policy that is trained"
        text = f"the model {found.model[:200]!r} does not exist, {rule}"
        raise ApiError(404, text, "model_not_found", "model")
    _need_sampling(found, rules)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name}, expected a finite number")


def _invalid(error: ValidationError | RecursionError) -> ApiError:
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply, expected plain messages")
    first = error.errors(include_url=False, include_context=False)[0]
    name = ""
    for place in first["loc"]:
        if isinstance(place, int):
            name += f"[{place}]"
        elif place.isidentifier():  # others name a type that pydantic tried
            name += f".{place}" if name else place
    text = f"{name}: {show(first['input'])[:200]}: {first['msg']}"
    if first["loc"][:1] == ("tool_choice",):
        text = (
            "tool_choice: a call cannot be enforced while tokens are sampled, expected auto or none"
        )
    return ApiError(400, text, "invalid_value", name or None)


def _need_sampling(found: _Common, rules: Rules) -> None:
    """Raises ApiError for an argument that would change the run's distribution."""
    stop = [found.stop] if isinstance(found.stop, str) else found.stop or []
    given = {"temperature": found.temperature, "top_p": found.top_p, "stop": stop or None}
    own = {"temperature": rules.temperature, "top_p": rules.top_p, "stop": [*rules.stop]}
    for name, value in given.items():
        if value is not None and value != own[name]:
            raise ApiError(
                400,
                f"{name}: {show(value)[:200]}, expected {own[name]}, as the run samples. Leave it "
                f"out, or set rollout.{name} in the config",
                "sampling",
                name,
            )


# answers ------------------------------------------------------------------------------------------


def chat_body(answer: Answer, model: str, logprobs: bool) -> dict[str, Any]:
    """A chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    message |= _more(answer)
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
    }
    choice["logprobs"] = _chat_logprobs(answer) if logprobs else None
    return _head("chatcmpl", "chat.completion", model) | {
        "choices": [choice],
        "usage": usage(answer),
    }


def chat_chunks(answer: Answer, model: str, request: ChatRequest) -> Iterator[dict[str, Any]]:
    """A chat completion as the events of a stream."""
    head = _head("chatcmpl", "chat.completion.chunk", model)
    delta = {"role": "assistant", "content": answer.text} | _more(answer)
    for place, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = place
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
    choice["logprobs"] = _chat_logprobs(answer) if request.logprobs else None
    yield head | {"choices": [choice]}
    yield head | {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]}
    if request.include_usage:
        yield head | {"choices": [], "usage": usage(answer)}


def completion_body(answer: Answer, model: str, logprobs: bool) -> dict[str, Any]:
    """A completion, also as the one event of a stream."""
    shown = None
    if logprobs:
        shown = {"tokens": [*answer.token_texts], "token_logprobs": [*answer.logprobs]}
    choice = {"index": 0, "text": answer.text or "", "finish_reason": answer.finish_reason}
    return _head("cmpl", "text_completion", model) | {
        "choices": [choice | {"logprobs": shown}],
        "usage": usage(answer),
    }


def models_body(model: str) -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [model_body(model)]}


def model_body(model: str) -> dict[str, Any]:
    """One model."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "pyrl_ext"}


def usage(answer: Answer) -> dict[str, int]:
    """Numbers of tokens."""
    prompt = answer.prompt_tokens
    sampled = len(answer.logprobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _more(answer: Answer) -> dict[str, Any]:
    """Reasoning and tool calls of a message, where there are any."""
    found: dict[str, Any] = {}
    if answer.reasoning:
        found["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        found["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in answer.tool_calls
        ]
    return found


def _chat_logprobs(answer: Answer) -> dict[str, Any]:
    tokens = [
        {"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for text, logprob in zip(answer.token_texts, answer.logprobs, strict=True)
    ]
    return {"content": tokens, "refusal": None}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{_STARTED}-{next(_NUMBERS)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
    }
