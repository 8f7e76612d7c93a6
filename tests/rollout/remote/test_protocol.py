"""Requests and answers of servers: JSON there and back, and every lie is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.rollout.remote.protocol import Answer, Partial, ProtocolError, Request
from pyrl_ext.samples import Sampling

INT64 = st.integers(-(2**63), 2**63 - 1)
TOKENS = st.lists(st.integers(0, 300_000), min_size=1, max_size=12).map(tuple)
LOGPROBS = st.floats(-8999, 0, allow_nan=False)


@st.composite
def requests(draw: st.DrawFn, max_tokens: int | None = None) -> Request:
    context = draw(TOKENS)
    most = max_tokens or draw(st.integers(1, 1000))
    return Request(
        draw(st.text(min_size=1, max_size=20)),
        context,
        most,
        random_stream=(draw(INT64), draw(INT64), draw(INT64)),
        salt=draw(st.text(max_size=5)),
        routes_from=draw(st.integers(0, len(context))),
        temperature=draw(st.just(0.0) | st.floats(1e-6, 10)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(0, 50)),
        stop_ids=draw(TOKENS),
        stop=tuple(draw(st.lists(st.text(min_size=1, max_size=4), max_size=2))),
        top=draw(st.integers(0, 20)),
        skips_cache=draw(st.booleans()),
    )


@st.composite
def answers(draw: st.DrawFn) -> tuple[Request, Answer]:
    count = draw(st.integers(1, 9))
    request = draw(requests(max_tokens=count + draw(st.integers(0, 1))))
    cuts = sorted(draw(st.sets(st.integers(1, count), max_size=3)) | {count})
    firsts = [0, *cuts[:-1]]
    version = draw(st.integers(0, 5))
    rows = len(request.token_ids) + count - 1 - request.routes_from
    shape = (rows, 2, 2)
    top = ((1, -0.5), (2, -1.5)) if request.top else ()
    return request, Answer(
        request.request_id,
        tuple(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))),
        tuple(draw(st.lists(LOGPROBS, min_size=count, max_size=count))),
        "length" if count == request.max_tokens else draw(st.sampled_from(("stop", "abort"))),
        tuple((b, e, version + n) for n, (b, e) in enumerate(zip(firsts, cuts))),
        np.arange(rows * 4, dtype=np.uint16).reshape(shape) if draw(st.booleans()) else None,
        draw(st.none() | st.integers(0, 9)),
        (top,) * count if request.top else (),
    )


def same(one: Answer, other: Answer) -> bool:
    names = [n for n in Answer.__slots__ if n != "routes"]
    equal = all(getattr(one, n) == getattr(other, n) for n in names)
    return equal and np.array_equal(one.routes, other.routes)  # type: ignore[arg-type]


def wire(body: object) -> bytes:
    return json.dumps(body).encode()


def answer_from(body: object, request: Request) -> Answer:
    part = Partial(request)
    part.add(wire(body))
    return part.answer()


@given(requests())
@settings(max_examples=200, deadline=None)
def test_request_crosses_json_unchanged(request: Request):
    assert Request.from_json(wire(request.to_json())) == request


@given(answers())
@settings(max_examples=200, deadline=None)
def test_answer_crosses_json_unchanged(pair: tuple[Request, Answer]):
    request, answer = pair
    assert same(answer_from(answer.message(0), request), answer)


@given(answers(), st.data())
@settings(max_examples=100, deadline=None)
def test_partial_of_messages_is_the_whole_answer(pair: tuple[Request, Answer], data: st.DataObject):
    request, answer = pair
    count = len(answer.token_ids)
    part = Partial(request)
    sent = 0
    while sent < count - 1 and data.draw(st.booleans()):
        until = data.draw(st.integers(sent + 1, count - 1))
        piece = Answer(
            answer.request_id,
            answer.token_ids[:until],
            answer.logprobs[:until],
            "",
            top=answer.top[:until],
        )
        part.add(wire(piece.message(sent, last=False)))
        sent = until
        assert tuple(part.token_ids) == answer.token_ids[:sent]
        with pytest.raises(ProtocolError, match="finish_reason"):
            part.answer()
    part.add(wire(answer.message(sent)))
    assert same(part.answer(), answer)


REQUEST = Request("r", (1, 2, 3), 4, routes_from=1)
ANSWER = Answer(
    "r",
    (5, 6, 7, 8),
    (-1.0, -2.0, 0.0, -0.5),
    "length",
    ((0, 2, 3), (2, 4, 4)),
    np.zeros((5, 2, 2), dtype=np.uint8),
)


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    body: Any = json.loads(wire(ANSWER.message(0)))
    at = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return body


CHOICE = ("choices", 0)
CONTENT = (*CHOICE, "logprobs", "content")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (changed(*CONTENT, 1, "logprob", value=-9999.0), "logprob is '-9999"),
        (changed(*CONTENT, 1, "logprob", value=0.5), "logprob is '0.5'"),
        (changed(*CONTENT, 1, "logprob", value=float("nan")), "logprob is 'nan'"),
        (changed(*CONTENT, 1, "logprob", value=None), "logprob is 'None'"),
        (changed(*CONTENT, 1, "logprob", value=10**400), "logprob is"),
        (changed(*CONTENT, 1, "token_id", value=9), "log-probs of tokens [5, 9"),
        (changed(*CONTENT, value=[]), "log-probs of tokens []"),
        (changed(*CHOICE, "logprobs", value=None), "log-probs of tokens []"),
        (changed(*CHOICE, "token_ids", value=[5, 6, 7, True]), "token_ids.3 is 'True'"),
        (changed(*CHOICE, "finish_reason", value=None), "an end after 4 tokens"),
        (changed(*CHOICE, "finish_reason", value="error"), "finish_reason is 'error'"),
        (changed(*CHOICE, "weight_versions", value=None), "versions ()"),
        (changed(*CHOICE, "weight_versions", 0, "end", value=1), "versions"),
        (changed(*CHOICE, "weight_versions", 0, "version", value="9"), "rising"),
        (
            changed(*CHOICE, "weight_versions", 0, "version", value="default"),
            "version is 'default'",
        ),
        (changed(*CHOICE, "weight_versions", 0, "version", value="9" * 5000), "'9999"),
        (changed(*CHOICE, "routed_experts", value="AAAA"), "routed_experts"),
        (changed("error", value={"message": "core died"}), "core died"),
        (changed("choices", value=[]), "finish_reason"),
        (changed("choices", value=[{}, {}]), "choices is"),
        ([], "expected an object"),
    ],
)
def test_answer_refuses(body: Any, says: str):
    with pytest.raises(ProtocolError) as caught:
        answer_from(body, REQUEST)
    assert says in str(caught.value)


def test_answer_refuses_rows_that_do_not_count():
    for rows in (4, 6):
        wrong = changed(*CHOICE, "routed_experts", value=None)
        short = Answer("r", (), (), "abort", routes=np.zeros((rows, 2, 2), dtype=np.uint8))
        wrong["choices"][0]["routed_experts"] = short.message(0)["choices"][0]["routed_experts"]
        with pytest.raises(ProtocolError, match=f"routes of {rows} tokens, expected of 5"):
            answer_from(wrong, REQUEST)


def test_answer_refuses_more_or_fewer_tokens_than_it_says():
    with pytest.raises(ProtocolError, match="4 tokens, expected at most 3"):
        answer_from(ANSWER.message(0), Request("r", (1, 2, 3, 3), 3, routes_from=1))
    with pytest.raises(ProtocolError, match="length after 4 tokens, expected 5"):
        answer_from(ANSWER.message(0), Request("r", (1, 2, 3), 5, routes_from=1))


@pytest.mark.parametrize("name", ["token_ids", "sampling_params", "request_id"])
def test_request_refuses_a_missing_field(name: str):
    body = {k: v for k, v in REQUEST.to_json().items() if k != name}
    with pytest.raises(ProtocolError, match=name):
        Request.from_json(wire(body))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", 1e-320),
        ("top_p", 0),
        ("top_k", 1.5),
        ("stop", [""]),
    ],
)
def test_request_refuses_sampling(name: str, value: object):
    body = REQUEST.to_json()
    body["sampling_params"][name] = value
    with pytest.raises(ProtocolError, match="request"):
        Request.from_json(wire(body))


def test_request_of_sampling_draws_as_it_says():
    sampling = Sampling(9, temperature=0.7, top_p=0.5, top_k=3, stop_ids=(4,), stop=("x",))
    made = Request.of(sampling, "r", [1], max_tokens=2)
    assert (made.temperature, made.top_p, made.top_k) == (0.7, 0.5, 3)
    assert (made.stop_ids, made.stop, made.max_tokens) == ((4,), ("x",), 2)
    greedy = Request.of(Sampling(9, greedy=True, top_k=3), "r", [1], max_tokens=2)
    assert (greedy.temperature, greedy.top_k) == (0.0, 0)


def test_seed_differs_by_stream_and_length():
    seeds = {
        Request("r", (1,) * n, 1, random_stream=(s, p, i)).seed
        for n in (1, 2)
        for s in (0, 1)
        for p in (0, 1)
        for i in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
