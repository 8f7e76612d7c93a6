"""The endpoint of agents: the official client on good paths, sockets on hostile ones."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.rollout.agents import endpoint as endpoint_module
from pyrl_ext.rollout.agents.endpoint import Endpoint
from pyrl_ext.rollout.agents.protocol import (
    MAX_BODY,
    Answer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Rules,
)
from tests.helpers.deadline import DEADLINE

RULES = Rules("org/policy", 0.7, 1.0, ("END",), 32, 100)
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
CHAT = {"model": "org/policy", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "org/policy", "prompt": "hi"}


def words(text: str | None, **fields: Any) -> Answer:
    """An answer with one token for each character."""
    tokens = tuple(text or "")
    logprobs = tuple(-0.5 * (place + 1) for place in range(len(tokens)))
    values: dict[str, Any] = {
        "text": text,
        "reasoning": None,
        "tool_calls": (),
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "token_texts": tokens,
        "logprobs": logprobs,
    }
    return Answer(**(values | fields))


CALLS = words(
    None,
    reasoning="hm",
    tool_calls=(("call_1", "add", '{"a": 1}'), ("call_2", "add", "{}")),
    finish_reason="tool_calls",
    token_texts=("x", "é", "\ufffd"),
    logprobs=(-0.1, -0.2, -0.3),
)


class Trajectory:
    """Says what it is asked, or the given answer, or raises.

    Args:
        waits: True if calls wait for `go`
    """

    def __init__(
        self,
        endpoint: Endpoint,
        answer: Answer | None = None,
        error: BaseException | None = None,
        waits: bool = False,
    ):
        self.endpoint = endpoint
        self.answer = answer
        self.error = error
        self.waits = waits
        self.requests: list[ChatRequest | CompletionRequest] = []
        self.lost: list[Answer] = []
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        self.was_lost = threading.Event()
        self._go = asyncio.Event()
        self.key = endpoint.add(self)

    def go(self) -> None:
        self.endpoint.loop.call_soon_threadsafe(self._go.set)

    async def chat(self, request: ChatRequest) -> Answer:
        return await self._call(request, str(request.messages[-1]["content"]))

    async def complete(self, request: CompletionRequest) -> Answer:
        return await self._call(request, str(request.prompt))

    async def _call(self, request: ChatRequest | CompletionRequest, text: str) -> Answer:
        self.requests.append(request)
        self.begun.set()
        try:
            if self.waits:
                await self._go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        return words(text) if self.answer is None else self.answer

    def undelivered(self, answer: Answer) -> None:
        self.lost.append(answer)
        self.was_lost.set()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(RULES)
    server.start()
    yield server
    server.close()


def client(endpoint: Endpoint, key: str, url: str | None = None) -> openai.AsyncOpenAI:
    session = openai.DefaultAsyncHttpxClient(trust_env=False)
    base = endpoint.url if url is None else url
    return openai.AsyncOpenAI(api_key=key, base_url=base, http_client=session, timeout=DEADLINE)


def address(endpoint: Endpoint) -> tuple[str, int]:
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


def connected(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(address(endpoint), timeout=DEADLINE)


def ask(
    endpoint: Endpoint,
    key: str | None,
    body: Any = None,
    path: str = "/v1/chat/completions",
    method: str = "POST",
) -> tuple[int, Any]:
    """Status and JSON of a reply.

    Args:
        body: bytes as they are, other values as JSON
    """
    connection = http.client.HTTPConnection(*address(endpoint), timeout=DEADLINE)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        connection.request(method, path, content, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def post(key: str, body: bytes, length: int | None = None) -> bytes:
    """A request as bytes."""
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def reset(connection: socket.socket) -> None:
    """Close at once, without sending or reading what is left."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    found = b""
    while mark not in found:
        part = connection.recv(1 << 16)
        assert part, f"the server closed after {found!r}"
        found += part
    return found


# the official client ------------------------------------------------------------------------------


async def test_chat(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    async with client(endpoint, trajectory.key) as api:
        messages: Any = [
            {"role": "developer", "content": [{"type": "text", "text": "be"}] * 2},
            {"role": "user", "content": "hi é", "name": "eve"},
        ]
        raw = await api.chat.completions.with_raw_response.create(
            model="org/policy", messages=messages, temperature=0.7, stop="END", max_tokens=99
        )
        again = await api.chat.completions.with_raw_response.create(
            model="org/policy", messages=messages, max_completion_tokens=3, user="me", store=True
        )
    reply = raw.parse()
    assert reply.choices[0].message.content == "hi é"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None
    assert reply.usage is not None
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
    }
    assert (reply.model, reply.object) == ("org/policy", "chat.completion")
    assert reply.system_fingerprint is None
    assert reply.id != again.parse().id
    assert raw.headers["x-request-id"] != again.headers["x-request-id"]
    normal = [
        {"role": "developer", "content": "bebe"},
        {"role": "user", "content": "hi é", "name": "eve"},
    ]
    assert trajectory.requests == [
        ChatRequest(normal, [], True, 32, False, False, False),  # 99 is above the run's 32
        ChatRequest(normal, [], True, 3, False, False, False),
    ]
    assert not trajectory.lost


async def test_messages_of_the_client_come_back(endpoint: Endpoint):
    """What an agent keeps of a reply, by model_dump, is a message of its next call."""
    trajectory = Trajectory(endpoint, CALLS)
    async with client(endpoint, trajectory.key) as api:
        user = {"role": "user", "content": "hi"}
        messages: list[Any] = [user]
        reply = await api.chat.completions.create(
            model="org/policy", messages=messages, tools=[TOOL], tool_choice="none"
        )
        message = reply.choices[0].message
        assert message.content is None
        assert reply.choices[0].finish_reason == "tool_calls"
        messages.append(message.model_dump())
        result = {"role": "tool", "content": "1", "tool_call_id": "call_1"}
        messages.append(result)
        await api.chat.completions.create(model="org/policy", messages=messages, tools=[TOOL])
    first, second = trajectory.requests
    assert isinstance(first, ChatRequest) and isinstance(second, ChatRequest)
    assert first.tools == second.tools == [TOOL]
    assert (first.calls, second.calls) == (False, True)
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    kept = {
        "role": "assistant",
        "content": None,
        "tool_calls": calls,
        "reasoning_content": "hm",
    }
    assert second.messages == [user, kept, result]


@pytest.mark.parametrize("answer", [words("one two"), CALLS], ids=["text", "calls"])
async def test_stream_equals_the_reply(endpoint: Endpoint, answer: Answer):
    """The client's own accumulation of a stream is the reply without a stream."""
    trajectory = Trajectory(endpoint, answer)
    async with client(endpoint, trajectory.key) as api:
        messages: Any = CHAT["messages"]
        whole = await api.chat.completions.create(
            model="org/policy", messages=messages, logprobs=True
        )
        async with api.chat.completions.stream(
            model="org/policy",
            messages=messages,
            logprobs=True,
            stream_options={"include_usage": True},
        ) as stream:
            streamed = await stream.get_final_completion()
    expected = whole.choices[0]
    found = streamed.choices[0]
    assert found.message.content == expected.message.content
    assert found.finish_reason == expected.finish_reason
    assert found.logprobs is not None and expected.logprobs is not None
    assert found.logprobs.content == expected.logprobs.content
    assert streamed.usage == whole.usage
    calls = [
        (call.id, call.function.name, call.function.arguments)
        for call in found.message.tool_calls or []
    ]
    assert calls == list(answer.tool_calls)
    reasoning = (found.message.model_extra or {}).get("reasoning_content")
    assert reasoning == answer.reasoning
    assert trajectory.requests[1].stream and trajectory.requests[1].include_usage


async def test_stream_in_openai_chunks(endpoint: Endpoint):
    trajectory = Trajectory(endpoint, words("ab"))
    async with client(endpoint, trajectory.key) as api:
        messages: Any = CHAT["messages"]
        stream = await api.chat.completions.create(
            model="org/policy", messages=messages, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "ab"}, {}]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]


async def test_logprobs(endpoint: Endpoint):
    chat = Trajectory(endpoint, CALLS)
    text = Trajectory(endpoint, words("ab"))
    async with client(endpoint, chat.key) as api:
        messages: Any = CHAT["messages"]
        reply = await api.chat.completions.create(
            model="org/policy", messages=messages, logprobs=True, top_logprobs=0
        )
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.content
    assert tokens is not None
    assert [(t.token, t.logprob, t.bytes, t.top_logprobs) for t in tokens] == [
        ("x", -0.1, [120], []),
        ("é", -0.2, [195, 169], []),
        ("\ufffd", -0.3, None, []),
    ]
    async with client(endpoint, text.key) as api:
        completion = await api.completions.create(model="org/policy", prompt="hi", logprobs=1)
    found = completion.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "b"]
    assert found.token_logprobs == [-0.5, -1.0]
    assert found.text_offset == [0, 1]
    assert found.top_logprobs is None


async def test_completions(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    async with client(endpoint, trajectory.key) as api:
        for prompt in ("hi", ["hi"], [5, 99], [[5, 99]]):
            reply = await api.completions.create(model="org/policy", prompt=prompt, max_tokens=4)
            assert (reply.object, reply.choices[0].finish_reason) == ("text_completion", "stop")
        stream = await api.completions.create(
            model="org/policy", prompt="abc", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    prompts = [
        request.prompt for request in trajectory.requests if isinstance(request, CompletionRequest)
    ]
    assert prompts == ["hi", "hi", [5, 99], [5, 99], "abc"]
    assert trajectory.requests[0] == CompletionRequest("hi", 4, False, False, False)
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["abc", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 10


async def test_models(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    async with client(endpoint, trajectory.key) as api:
        listed = [model.id async for model in api.models.list()]
        one = await api.models.retrieve("org/policy")
        with pytest.raises(openai.NotFoundError, match="model_not_found"):
            await api.models.retrieve("gpt-4")
    assert listed == [one.id] == ["org/policy"]
    assert one.object == "model"


async def test_key_in_the_url(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    url = endpoint.url.removesuffix("/v1") + f"/t/{trajectory.key}/v1"
    async with client(endpoint, "unused", url) as api:
        reply = await api.completions.create(model="org/policy", prompt="hi")
        assert [model.id async for model in api.models.list()] == ["org/policy"]
    assert reply.choices[0].text == "hi"


async def test_many_calls_at_once(endpoint: Endpoint):
    """Each of 64 calls reaches its own trajectory, which begin before any answers."""
    trajectories = [Trajectory(endpoint, words(str(i)), waits=True) for i in range(64)]
    clients = [client(endpoint, trajectory.key) for trajectory in trajectories]
    tasks = [
        asyncio.create_task(api.completions.create(model="org/policy", prompt="hi"))
        for api in clients
    ]
    for trajectory in trajectories:
        await asyncio.to_thread(trajectory.begun.wait, DEADLINE)
    for trajectory in reversed(trajectories):
        trajectory.go()
    replies = await asyncio.gather(*tasks)
    for api in clients:
        await api.close()
    assert [reply.choices[0].text for reply in replies] == [str(i) for i in range(64)]
    assert len({reply.id for reply in replies}) == 64


async def test_streams_say_that_they_wait(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint_module, "WAITING_S", 0.001)
    trajectory = Trajectory(endpoint, words("late"), waits=True)
    with connected(endpoint) as connection:
        connection.sendall(post(trajectory.key, json.dumps(CHAT | {"stream": True}).encode()))
        read_until(connection, b": waiting\n\n")
        trajectory.go()
        found = read_until(connection, b"data: [DONE]\n\n")
    assert b'"late"' in found

    trajectory = Trajectory(endpoint, words("late"), waits=True)
    async with client(endpoint, trajectory.key) as api:
        stream = await api.completions.create(model="org/policy", prompt="hi", stream=True)
        trajectory.go()
        assert [chunk.choices[0].text async for chunk in stream] == ["late", ""]


# errors -------------------------------------------------------------------------------------------

DISTRIBUTION = "the log-probs that are trained on belong to the run's distribution"


def set_rollout(name: str) -> str:
    return f"{DISTRIBUTION}. Leave it out, or set rollout.{name} in the config"


ARGUMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", 'model is null, expected the text "org/policy"'),
    (
        {"temperature": 0.2},
        "temperature",
        f"temperature is 0.2, expected the run's 0.7: {set_rollout('temperature')}",
    ),
    ({"top_p": True}, "top_p", f"top_p is true, expected the run's 1.0: {set_rollout('top_p')}"),
    ({"stop": []}, "stop", f'stop is [], expected the run\'s ["END"]: {set_rollout("stop")}'),
    ({"n": 2}, "n", "n is 2, expected 1: a call gets one answer. Leave it out"),
    ({"n": True}, "n", "n is true, expected 1: a call gets one answer. Leave it out"),
    (
        {"seed": 1},
        "seed",
        "seed is 1, expected none: the trainer draws by the run's seed. Leave it out",
    ),
    (
        {"frequency_penalty": 1},
        "frequency_penalty",
        f"frequency_penalty is 1, expected 0: {DISTRIBUTION}. Leave it out",
    ),
    (
        {"logit_bias": {"5": 1}},
        "logit_bias",
        f'logit_bias is {{"5": 1}}, expected {{}}: {DISTRIBUTION}. Leave it out',
    ),
    (
        {"tool_choice": "required"},
        "tool_choice",
        'tool_choice is "required", expected "auto" or "none": a call cannot be enforced while '
        "tokens are sampled. Leave it out",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        "tool_choice",
        'tool_choice is {"type": "function", "function": {"name": "add"}}, expected "auto" or '
        '"none": a call cannot be enforced while tokens are sampled. Leave it out',
    ),
    (
        {"parallel_tool_calls": False},
        "parallel_tool_calls",
        "parallel_tool_calls is false, expected true: the number of calls cannot be limited. "
        "Leave it out",
    ),
    (
        {"response_format": {"type": "json_object"}},
        "response_format",
        'response_format is {"type": "json_object"}, expected {"type": "text"}: a format cannot be '
        "enforced. Leave it out",
    ),
    (
        {"top_logprobs": 5},
        "top_logprobs",
        "top_logprobs is 5, expected 0: log-probs of sampled tokens are known, of others not. "
        "Leave it out",
    ),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, expected greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5, expected a whole number"),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        "max_tokens is 5, expected max_completion_tokens, 6. Leave one of them out",
    ),
    ({"stream": "yes"}, "stream", 'stream is "yes", expected true or false'),
    (
        {"stream_options": {}},
        "stream_options",
        "stream_options is given without stream, expected stream true. Leave it out",
    ),
    ({"top_k": 5}, "top_k", "Unrecognized request argument supplied: top_k"),
    (
        {"messages": [{"role": "user", "content": "a", "x": 1}]},
        "messages[0].x",
        "Unrecognized request argument supplied: messages[0].x",
    ),
    (
        {"messages": []},
        "messages",
        "messages is [], expected at least one item",
    ),
    ({"messages": 5}, "messages", "messages is 5, expected a list"),
    ({"messages": [5]}, "messages[0]", "messages[0] is 5, expected an object"),
    ({"messages": [[]]}, "messages[0]", "messages[0] is [], expected an object"),
    ({"user": 5}, "user", "user is 5, expected text"),
    (
        {"messages": [{"role": "bot", "content": "a"}]},
        "messages[0].role",
        "messages[0].role is \"bot\", expected 'system', 'developer', 'user', 'assistant' or "
        "'tool'",
    ),
    (
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "messages[0].content is null, expected text; only assistant messages with tool_calls or "
        "reasoning_content have none",
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "messages[0].content is 5, expected text or a list of text parts",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content[0].type",
        'messages[0].content[0].type is "image_url", expected "text": agents send text only, no '
        "images, audio or files",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
        "messages[0].tool_calls",
        'messages[0].tool_calls is set in a message of role "user", expected in assistant\'s only',
    ),
    (
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages[0].tool_call_id",
        "messages[0].tool_call_id is null, expected the id of a tool call in messages of role "
        "tool, and nowhere else",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
        "messages[0].tool_calls[0].function is missing, expected a value",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]},
        "messages[0].refusal",
        'messages[0].refusal is "no", expected null',
    ),
    (
        {"tools": [{"type": "web_search"}]},
        "tools[0].type",
        "tools[0].type is \"web_search\", expected 'function'",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        'tools[0].function.name is "a b", expected 1 to 64 letters, digits, _ or -',
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools[0].function.parameters",
        "tools[0].function.parameters is [], expected an object",
    ),
    (
        {"tools": [TOOL, TOOL]},
        "tools[1].function.name",
        'tools[1].function.name is "add", expected a name that no tool before has',
    ),
]


@pytest.mark.parametrize(("change", "param", "message"), ARGUMENTS)
def test_wrong_arguments(endpoint: Endpoint, change: dict[str, Any], param: str, message: str):
    trajectory = Trajectory(endpoint)
    status, reply = ask(endpoint, trajectory.key, CHAT | change)
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    assert (status, reply) == (400, {"error": error})
    assert not trajectory.requests


PROMPTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", 'prompt is "", expected text or a list of token ids, not empty'),
    (
        {"prompt": ["a", "b"]},
        "prompt",
        "prompt is a list of 2 prompts, expected one: a call gets one answer",
    ),
    ({"prompt": [5, 100]}, "prompt[1]", "prompt[1] is 100, expected a token id below 100"),
    ({"prompt": [True]}, "prompt[0]", "prompt[0] is true, expected a token id below 100"),
    ({"logprobs": 2}, "logprobs", "logprobs is 2, expected less than or equal to 1"),
    ({"echo": True}, "echo", "echo is true, expected false: a reply has sampled tokens only."),
    ({"best_of": 2}, "best_of", "best_of is 2, expected 1: a call gets one answer."),
    ({"suffix": "a"}, "suffix", 'suffix is "a", expected "": tokens are sampled at the end of'),
    ({"tools": []}, "tools", "Unrecognized request argument supplied: tools"),
]


@pytest.mark.parametrize(("change", "param", "message"), PROMPTS)
def test_wrong_prompts(endpoint: Endpoint, change: dict[str, Any], param: str, message: str):
    trajectory = Trajectory(endpoint)
    status, reply = ask(endpoint, trajectory.key, PROMPT | change, "/v1/completions")
    assert status == 400
    assert reply["error"]["param"] == param
    assert reply["error"]["message"].startswith(message)
    assert not trajectory.requests


DEEP = "more than 100 objects and lists within each other"
BODIES: list[tuple[bytes, str]] = [
    (b"", "the body is no valid JSON: Expecting value: line 1 column 1 (char 0)"),
    (b'{"model": ', "the body is no valid JSON: Expecting value: line 1 column 11 (char 10)"),
    (b"[]", "the body is a list, expected an object"),
    (b"5", "the body is 5, expected an object"),
    (b"[" * 1_000_000, f"the body is no valid JSON: {DEEP}"),
    (b'{"a": ' * 200 + b"1" + b"}" * 200, f"the body is no valid JSON: {DEEP}"),
    (b'{"a": NaN}', "the body is no valid JSON: NaN, expected a finite number"),
    (b'{"a": -Infinity}', "the body is no valid JSON: -Infinity, expected a finite number"),
    (b'{"a": 1e999}', "the body is no valid JSON: 1e999, expected a finite number"),
    (b'{"a": 1, "a": 2}', 'the key "a" occurs twice in an object, expected once'),
    (
        b'{"a": "\\ud800"}',
        "the body is no valid JSON: half of a surrogate pair, expected Unicode text",
    ),
    (
        b'{"a": "\xff"}',
        "the body is no valid JSON: 'utf-8' codec can't decode byte 0xff in position 7: invalid "
        "start byte",
    ),
]


@pytest.mark.parametrize(("body", "message"), BODIES, ids=range(len(BODIES)))
def test_malformed_bodies(endpoint: Endpoint, body: bytes, message: str):
    trajectory = Trajectory(endpoint)
    status, reply = ask(endpoint, trajectory.key, body)
    assert (status, reply["error"]["message"]) == (400, message)
    assert ask(endpoint, trajectory.key, b'{"a": ' + b"1" * 10_000 + b"}")[0] == 400
    assert not trajectory.requests


def test_large_bodies_are_not_read(endpoint: Endpoint):
    """Refused by their length before any byte came, and in chunks before the end came."""
    trajectory = Trajectory(endpoint)
    with connected(endpoint) as connection:
        connection.sendall(post(trajectory.key, b"", length=64 << 20))
        declared = read_until(connection, b"at most 16 MiB")
    assert declared.startswith(b"HTTP/1.1 413 ")
    head = post(trajectory.key, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with connected(endpoint) as connection:
        connection.sendall(head)
        for _ in range((MAX_BODY >> 20) + 1):
            connection.sendall(chunk)
        chunked = read_until(connection, b"at most 16 MiB")
    assert chunked.startswith(b"HTTP/1.1 413 ")
    status, reply = ask(endpoint, trajectory.key, b" " * (64 << 20))
    assert (status, reply["error"]["type"]) == (413, "invalid_request_error")
    largest = json.dumps(CHAT).encode()
    assert ask(endpoint, trajectory.key, largest + b" " * (MAX_BODY - len(largest)))[0] == 200


def test_compressed_bodies(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    large = gzip.compress(b" " * (64 << 20))
    for body, status in (
        (gzip.compress(json.dumps(CHAT).encode()), 200),
        (b"no", 400),
        (large, 413),
    ):
        head = post(trajectory.key, body).replace(b"Host:", b"Content-Encoding: gzip\r\nHost:")
        with connected(endpoint) as connection:
            connection.sendall(head)
            assert read_until(connection, b"}").startswith(f"HTTP/1.1 {status} ".encode())
    assert len(trajectory.requests) == 1


def test_keys(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    other = Trajectory(endpoint)
    removed = Trajectory(endpoint)
    assert ask(endpoint, removed.key, CHAT)[0] == 200
    endpoint.remove(removed.key)
    for key in (None, "", "wrong", "wröng", removed.key, trajectory.key[:-1], trajectory.key + "A"):
        header = None if key is None else key.encode().decode("latin-1")
        for path in ("/v1/chat/completions", "/v1/completions"):
            status, reply = ask(endpoint, header, CHAT, path)
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
            assert reply["error"]["type"] == "authentication_error"
        assert ask(endpoint, header, None, "/v1/models", "GET")[0] == 401
        assert ask(endpoint, header, None, "/v1/models/org/policy", "GET")[0] == 401
    path = f"/t/{removed.key}/v1/chat/completions"
    assert ask(endpoint, trajectory.key, CHAT, path)[0] == 401  # the URL's key counts
    with pytest.raises(KeyError):
        endpoint.remove(removed.key)
    assert len(removed.requests) == 1
    assert not trajectory.requests and not other.requests


def test_key_is_removed_while_the_body_comes(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    request = post(trajectory.key, json.dumps(CHAT).encode())
    with connected(endpoint) as connection:
        connection.sendall(request[:-5])
        assert ask(endpoint, trajectory.key, CHAT)[0] == 200
        endpoint.remove(trajectory.key)
        connection.sendall(request[-5:])
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 401 ")
    assert len(trajectory.requests) == 1


def test_routes(endpoint: Endpoint):
    key = Trajectory(endpoint).key
    status, reply = ask(endpoint, key, CHAT, "/v1/embeddings")
    assert (status, reply["error"]["code"]) == (404, "unknown_url")
    assert reply["error"]["message"] == (
        "POST /v1/embeddings is not served, expected POST /v1/chat/completions, POST "
        "/v1/completions, GET /v1/models or GET /v1/models/MODEL"
    )
    status, reply = ask(endpoint, key, None, method="GET")
    assert (status, reply["error"]["message"]) == (405, "GET, expected POST")
    status, reply = ask(endpoint, key, CHAT | {"model": "gpt-4"})
    assert (status, reply["error"]) == (
        404,
        {
            "message": 'the model "gpt-4" does not exist, expected "org/policy"',
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        },
    )


async def test_failures_of_a_trajectory(endpoint: Endpoint, capfd: pytest.CaptureFixture[str]):
    """Its own errors reach the client; others are a 500, printed once, that no client repeats."""
    told = Trajectory(endpoint, error=ApiError(400, "too long", "context_length_exceeded"))
    async with client(endpoint, told.key) as api:
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            await api.completions.create(model="org/policy", prompt="hi")
    for error in (ZeroDivisionError("secret"), ConnectionResetError(), asyncio.CancelledError()):
        name = type(error).__name__
        for stream in (False, True):
            failing = Trajectory(endpoint, error=error)
            async with client(endpoint, failing.key) as api:
                with pytest.raises(openai.InternalServerError) as caught:
                    await api.completions.create(model="org/policy", prompt="hi", stream=stream)
            assert caught.value.type == "server_error"
            assert f"the trainer failed with {name}, expected an answer" in caught.value.message
            assert "secret" not in caught.value.message
            assert len(failing.requests) == 1
            assert not failing.lost
            assert capfd.readouterr().err.count("Traceback (most recent call last)") == 1
    unwritable = Trajectory(endpoint, words("a", logprobs=(float("nan"),)))
    assert ask(endpoint, unwritable.key, CHAT | {"logprobs": True})[0] == 500
    assert len(unwritable.lost) == 1


async def test_failures_within_a_stream(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint_module, "WAITING_S", 0.001)
    trajectory = Trajectory(endpoint, error=ApiError(400, "too long"), waits=True)
    async with client(endpoint, trajectory.key) as api:
        stream = await api.completions.create(model="org/policy", prompt="hi", stream=True)
        trajectory.go()
        with pytest.raises(openai.APIError, match="too long"):
            async for _ in stream:
                pass


# clients that go away -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_while_it_waits(endpoint: Endpoint, stream: bool):
    trajectory = Trajectory(endpoint, waits=True)
    connection = connected(endpoint)
    connection.sendall(post(trajectory.key, json.dumps(CHAT | {"stream": stream}).encode()))
    assert trajectory.begun.wait(DEADLINE)
    connection.close()
    assert trajectory.cancelled.wait(DEADLINE)
    assert not trajectory.lost
    trajectory.go()
    assert ask(endpoint, trajectory.key, CHAT)[0] == 200


def test_client_leaves_while_it_sends(endpoint: Endpoint):
    trajectory = Trajectory(endpoint)
    connection = connected(endpoint)
    connection.sendall(post(trajectory.key, b'{"model"', length=1000))
    reset(connection)
    assert ask(endpoint, trajectory.key, CHAT)[0] == 200
    assert len(trajectory.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_during_the_answer(endpoint: Endpoint, stream: bool):
    """More than sockets hold is written, of which the client reads the beginning."""
    answer = words("a", token_texts=(), logprobs=(), reasoning="x" * (64 << 20))
    trajectory = Trajectory(endpoint, answer)
    connection = connected(endpoint)
    connection.sendall(post(trajectory.key, json.dumps(CHAT | {"stream": stream}).encode()))
    read_until(connection, b"xxx")
    reset(connection)
    assert trajectory.was_lost.wait(DEADLINE)
    assert trajectory.lost == [answer]
    assert not trajectory.cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_given_back_whose_client_has_gone_unseen(endpoint: Endpoint, stream: bool):
    gone = threading.Event()

    class Busy(Trajectory):
        async def chat(self, request: ChatRequest) -> Answer:
            self.begun.set()
            assert gone.wait(DEADLINE)  # meanwhile the event loop sees nothing of the client
            return words("late")

    trajectory = Busy(endpoint)
    connection = connected(endpoint)
    place = connection.getsockname()
    connection.sendall(post(trajectory.key, json.dumps(CHAT | {"stream": stream}).encode()))
    assert trajectory.begun.wait(DEADLINE)
    connection.close()
    end = time.monotonic() + DEADLINE
    while True:
        ends = [each for each in psutil.Process().net_connections("tcp4") if each.raddr == place]
        if ends and ends[0].status == psutil.CONN_CLOSE_WAIT:
            break
        assert time.monotonic() < end
        time.sleep(0.01)
    gone.set()
    assert trajectory.was_lost.wait(DEADLINE)
    assert trajectory.lost == [words("late")]


@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_was_read_is_kept(endpoint: Endpoint, stream: bool):
    trajectory = Trajectory(endpoint)
    for _ in range(100):
        connection = connected(endpoint)
        connection.sendall(post(trajectory.key, json.dumps(CHAT | {"stream": stream}).encode()))
        read_until(connection, b"[DONE]" if stream else b"finish_reason")
        connection.close()
    assert ask(endpoint, trajectory.key, CHAT)[0] == 200
    assert len(trajectory.requests) == 101 and trajectory.lost == []


def test_answer_of_a_cancelled_call_is_given_back(endpoint: Endpoint):
    """A trajectory may finish a call although its client went away."""

    class Stubborn(Trajectory):
        async def chat(self, request: ChatRequest) -> Answer:
            try:
                return await super().chat(request)
            except asyncio.CancelledError:
                return words("late")

    trajectory = Stubborn(endpoint, waits=True)
    connection = connected(endpoint)
    connection.sendall(post(trajectory.key, json.dumps(CHAT).encode()))
    assert trajectory.begun.wait(DEADLINE)
    connection.close()
    assert trajectory.was_lost.wait(DEADLINE)
    assert trajectory.lost == [words("late")]


async def test_close_answers_open_calls():
    before = set(threading.enumerate())
    endpoint = Endpoint(RULES)
    endpoint.start()
    trajectory = Trajectory(endpoint, waits=True)
    async with client(endpoint, trajectory.key) as api:
        call = asyncio.create_task(api.completions.create(model="org/policy", prompt="hi"))
        assert await asyncio.to_thread(trajectory.begun.wait, DEADLINE)
        await asyncio.to_thread(endpoint.close)
        with pytest.raises(openai.InternalServerError) as caught:
            await call
    assert caught.value.status_code == 503
    assert "the endpoint closes" in caught.value.message
    assert trajectory.cancelled.is_set()
    assert endpoint.loop.is_closed()
    started = set(threading.enumerate()) - before
    assert "agents endpoint" not in [thread.name for thread in started]
    with pytest.raises(ConnectionRefusedError):
        connected(endpoint)
    endpoint.close()


def test_close_without_a_start():
    endpoint = Endpoint(RULES, "::1") if socket.has_dualstack_ipv6() else Endpoint(RULES)
    endpoint.close()
    assert endpoint.loop.is_closed()


# anything -----------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KNOWN = st.sampled_from(
    [
        "temperature",
        "top_p",
        "stop",
        "n",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "response_format",
        "logit_bias",
        "metadata",
        "user",
    ]
)
MESSAGE_KEYS = st.sampled_from(
    [
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "refusal",
        "audio",
    ]
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
MESSAGES = st.lists(
    st.builds(
        lambda role, content, extra: {"role": role, "content": content} | extra,
        ROLES,
        st.text(max_size=5) | VALUES,
        st.dictionaries(MESSAGE_KEYS, VALUES, max_size=1),
    ),
    max_size=3,
)
REQUESTS = st.builds(
    lambda messages, extra: {"model": "org/policy", "messages": messages} | extra,
    MESSAGES,
    st.dictionaries(KNOWN, VALUES, max_size=2),
)


@given(body=VALUES | REQUESTS)
@settings(max_examples=300)
def test_any_json(body: Any, any_json: tuple[http.client.HTTPConnection, str]):
    """Every JSON gets an answer, or an error in OpenAI's form that is the client's fault."""
    connection, key = any_json
    headers = {"Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read()
    assert reply.status in (200, 400, 404), text
    if reply.status != 200:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["type"]


@pytest.fixture(scope="module")
def any_json() -> Iterator[tuple[http.client.HTTPConnection, str]]:
    """A connection and a key."""
    server = Endpoint(RULES)
    server.start()
    connection = http.client.HTTPConnection(*address(server), timeout=DEADLINE)
    yield connection, Trajectory(server).key
    connection.close()
    server.close()
