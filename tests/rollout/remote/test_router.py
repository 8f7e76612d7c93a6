"""The router over small servers: nothing is lost, whatever a server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyrl_ext.parallel.waiting import NotYet
from pyrl_ext.rollout.remote.client import Refused, Server
from pyrl_ext.rollout.remote.holder import salt_of
from pyrl_ext.rollout.remote.parts import Parts
from pyrl_ext.rollout.remote.protocol import Answer, Partial, ProtocolError, Request
from pyrl_ext.rollout.remote.router import Router, ServerState
from tests.helpers.deadline import DEADLINE
from tests.helpers.http_engine import (
    HttpEngine,
    Messages,
    logprob_of,
    request_of,
    rows_of,
    tokens_of,
)


def nothing(answer: Answer) -> None:
    """No check beyond the protocol's."""


@asynccontextmanager
async def route(
    engines: Sequence[HttpEngine],
    limit: int = 64,
    least: int = 1,
    check: Callable[[Answer], None] = nothing,
    silence: float = 60.0,
) -> AsyncIterator[Router]:
    """A router over the servers, which have weights of version 1."""
    servers = [Server(each.address, silence=silence) for each in engines]
    router = Router(servers, limit, least, check, "rank 0", "test")
    try:
        await ready(router)
        release(router, engines, 1)
        yield router
    finally:
        await router.close()


async def ready(router: Router) -> list[ServerState]:
    """The servers of the next publish, once there are enough."""
    while True:
        with suppress(NotYet):
            return await router.look()
        await asyncio.sleep(0.01)


def release(router: Router, engines: Sequence[HttpEngine], version: int) -> None:
    """All servers have the version."""
    router.release(version, dict.fromkeys((each.address for each in engines), None))


async def all_of(router: Router, requests: Sequence[Request]) -> list[Parts]:
    """The responses; requests of one prompt are a group."""
    return await asyncio.gather(*(router.answer(r.random_stream[1], r) for r in requests))


def assert_whole(requests: Sequence[Request], found: Sequence[Parts]) -> None:
    """Every response is that of a server that nothing disturbed, token by token."""
    assert len(requests) == len(found)
    for request, parts in zip(requests, found, strict=True):
        tokens = tokens_of(request)
        assert parts.token_ids == tokens and parts.finish_reason == "length"
        assert parts.logprobs == list(map(logprob_of, tokens))
        whole = [*request.token_ids, *tokens]
        expected = rows_of(whole, request.routes_from, len(whole) - 1)
        assert parts.routes is not None and np.array_equal(parts.routes, expected)
        assert len(parts.routes) == parts.rows
        ends = [0, *(end for _, end, _ in parts.versions)]
        assert ends == [*(begin for begin, _, _ in parts.versions), len(tokens)]


@pytest.fixture
def engines():
    with ExitStack() as stack:
        yield [stack.enter_context(HttpEngine()) for _ in range(3)]


GROUPS = [request_of(prompt, index) for prompt in range(24) for index in range(4)]


async def test_router_keeps_groups_together_and_spreads_them(engines: list[HttpEngine]):
    async with route(engines) as router:
        assert_whole(GROUPS, await all_of(router, GROUPS))
    held = [{request.random_stream[1] for request in each.asked} for each in engines]
    assert sum(map(len, held)) == len(set.union(*held)) == 24
    assert min(map(len, held)) >= 6


async def test_router_keeps_the_turns_of_a_trajectory_with_one_server(engines: list[HttpEngine]):
    async with route(engines) as router:

        async def trajectory(prompt: int) -> None:
            for turn in range(3):
                await router.answer(prompt, request_of(prompt, turn))

        await asyncio.gather(*map(trajectory, range(12)))
        router.forget(range(12))
    held = [{request.random_stream[1] for request in each.asked} for each in engines]
    assert sum(map(len, held)) == len(set.union(*held)) == 12


async def test_router_gives_a_server_no_more_than_its_limit(engines: list[HttpEngine]):
    for each in engines:
        each.seconds = 0.01  # a token: requests overlap
    async with route(engines, limit=5) as router:
        assert_whole(GROUPS, await all_of(router, GROUPS))
        assert router.traffic.queue_max >= 96 - 3 * 5 and router.traffic.queue_seconds > 0
    assert max(each.most_running for each in engines) == 5


def lie(request: Request, messages: Messages) -> Messages:
    messages[6]["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    return messages


# how a server fails, and what the message says
FAULTS: dict[str, tuple[str, Any, str]] = {
    "dies": ("dies", 100, "connection ended"),
    "hangs": ("hangs_after", 5, "no token for"),
    "hangs at once": ("hangs_after", 0, "no token for"),
    "lies": ("twist", lie, "logprob is '-9999.0'"),
    "serves others' weights": ("version", 9, "weights of version 9"),
    "serves old weights": ("version", 0, "weights of version 0"),
    "fails at once": ("status", 500, "500"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_router_gives_the_requests_of_a_failed_server_to_others(
    engines: list[HttpEngine], fault: str, capsys: pytest.CaptureFixture[str]
):
    attribute, value, reason = FAULTS[fault]
    setattr(engines[1], attribute, value)
    async with route(engines, silence=6.0) as router:
        assert_whole(GROUPS, await all_of(router, GROUPS))
        assert [state.used for state in router.states] == [True, False, True]
        assert reason in (router.states[1].server.reason or "")
        assert router.traffic.resent > 0
    assert (
        f"{engines[1].address}" in (said := capsys.readouterr().err)
        and "2 of 3 servers are left" in said
    )
    kept = {len(r.token_ids) - 3 for each in (engines[0], engines[2]) for r in each.asked}
    if fault == "hangs":  # others went on from the tokens that were there
        assert max(kept) == 4
    elif fault != "dies":  # what it sent is nothing that one could trust
        assert kept == {0}


async def test_router_checks_answers_before_it_uses_them(engines: list[HttpEngine]):
    def check(answer: Answer) -> None:
        if answer.request_id in {r.request_id for r in engines[2].asked}:
            raise ProtocolError("token 900, expected one of the vocabulary")

    async with route(engines, check=check) as router:
        assert_whole(GROUPS, await all_of(router, GROUPS))
        assert "token 900" in (router.states[2].server.reason or "")


async def test_router_stops_when_too_few_servers_are_left(engines: list[HttpEngine]):
    for engine in engines[:2]:
        engine.dies = 100
    async with route(engines, least=2) as router:
        with pytest.raises(RuntimeError) as caught:
            await all_of(router, GROUPS)
        message = str(caught.value)
        assert "1 of 3 servers are left, expected at least 2" in message
        for engine in engines[:2]:
            assert f"\n  {engine.address}/inference/v1/generate: the connection" in message
        with pytest.raises(RuntimeError, match="1 of 3 servers"):
            await router.answer(1, request_of(1))


async def test_router_names_servers_that_have_not_come(engines: list[HttpEngine]):
    engines[0].close()
    router = Router([Server(e.address) for e in engines], 8, 3, nothing)
    found = NotYet("")
    while "connection refused" not in str(found):
        with pytest.raises(NotYet) as caught:
            await router.look()
        found = caught.value
        await asyncio.sleep(0.01)
    assert str(found) == f"{engines[0].address}: connection refused" and not found.at_once
    await router.close()


async def test_router_goes_on_after_an_abort_with_the_new_weights(engines: list[HttpEngine]):
    """As in a publish with pause abort: held, aborted, and released with another version."""
    for engine in engines:
        engine.seconds = 0.01
    requests = [request_of(prompt, budget=30) for prompt in range(12)]
    async with route(engines) as router:
        task = asyncio.ensure_future(all_of(router, requests))
        while sum(each.generated for each in engines) < 100:
            await asyncio.sleep(0.005)
        assert router.hold(2) == {}
        late = asyncio.ensure_future(router.answer(99, request_of(99)))
        for state in router.states:
            await state.server.control("/pause?mode=abort")
        while any(each.running for each in engines):
            await asyncio.sleep(0.005)
        asked = sum(len(each.asked) for each in engines)
        await asyncio.sleep(0.05)
        assert sum(len(each.asked) for each in engines) == asked == 12
        for state in router.states:
            await state.server.control("/finish_weight_update", {"weight_version": "2"})
            await state.server.control("/resume")
        release(router, engines, 2)
        found = await task
        assert (await late).versions == [(0, 12, 2)]
        assert router.traffic.aborted_parts == 12 and router.traffic.resent == 0
    assert_whole(requests, found)
    for parts in found:
        assert [version for _, _, version in parts.versions] == [1, 2]
    salts = {(r.salt, len(r.token_ids) > 3) for each in engines for r in each.asked}
    first, second = (salt_of("test", version) for version in (1, 2))
    assert salts == {(first, False), (second, True), (second, False)}


async def test_router_drops_tokens_of_unknown_weights(engines: list[HttpEngine]):
    """Requests that were kept through a publish, on a server that dies afterwards."""
    for engine in engines:
        engine.seconds = 0.01
    requests = [request_of(prompt, budget=30) for prompt in range(6)]
    async with route(engines) as router:
        task = asyncio.ensure_future(all_of(router, requests))
        while sum(each.generated for each in engines) < 50:
            await asyncio.sleep(0.005)
        router.hold(2)
        for engine in engines:
            engine.version = 2
        release(router, engines, 2)
        engines[1].dies = 3
        found = await task
    assert_whole(requests, found)
    again = [r for each in engines for r in each.asked if r.request_id.endswith("-2")]
    assert again and all(len(r.token_ids) == 3 for r in again)
    spans = [[version for _, _, version in parts.versions] for parts in found]
    assert [2] in spans and [1, 2] in spans


async def test_router_takes_a_server_back_that_has_the_weights(
    engines: list[HttpEngine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pyrl_ext.rollout.remote.router.PROBE_S", DEADLINE)  # the test asks itself
    async with route(engines) as router:
        engines[1].status = 500
        await all_of(router, GROUPS)
        engines[1].status = None
        for publish in (2, 3):  # not in the first: it was not seen again yet
            reasons = router.hold(publish)
            found = await ready(router)
            assert len(found) == publish and len(reasons) == 1
            used = {state.server.address for state in found}
            for engine in engines:
                engine.version = publish
            router.release(
                publish,
                {e.address: None if e.address in used else "it had failed" for e in engines},
            )
            for engine in engines:
                engine.asked.clear()
            router.forget(range(24))
            await all_of(router, GROUPS)
            assert bool(engines[1].asked) == (publish == 3)
            await router._probe_unused()


async def test_router_takes_out_a_server_that_aborts_without_a_publish(engines: list[HttpEngine]):
    def aborts(request: Request, messages: Messages) -> Messages:
        last = messages[-1]["choices"][0]
        last |= {"token_ids": [], "logprobs": None, "finish_reason": "abort"}
        return [{"choices": [last | {"weight_versions": None, "routed_experts": None}]}]

    engines[1].twist = aborts
    async with route(engines) as router:
        assert_whole(GROUPS, await asyncio.wait_for(all_of(router, GROUPS), 60))
        reason = router.states[1].server.reason
        assert reason is not None and "an abort without a new token" in reason


async def test_router_raises_what_no_server_would_take(engines: list[HttpEngine]):
    for engine in engines:
        engine.status = 400
    async with route(engines) as router:
        with pytest.raises(Refused, match="400"):
            await router.answer(1, request_of(1))
        assert all(state.used for state in router.states)


async def test_router_leaves_nothing_behind_of_streams_that_were_closed(engines: list[HttpEngine]):
    for engine in engines:
        engine.seconds = 0.01
    async with route(engines, limit=10) as router:
        for _ in range(3):
            tasks = [asyncio.ensure_future(router.answer(r.random_stream[1], r)) for r in GROUPS]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            router.forget(range(24))
        assert [state.load for state in router.states] == [0, 0, 0]
        assert not router._bound and not router._waiting
        while any(each.running for each in engines):
            await asyncio.sleep(0.01)


def answer_of(request: Request, count: int, finish: str, version: int = 1) -> Answer:
    tokens = tokens_of(request)[:count]
    whole = [*request.token_ids, *tokens]
    return Answer(
        request.request_id,
        tuple(tokens),
        tuple(map(logprob_of, tokens)),
        finish,
        ((0, count, version),) if count else (),
        rows_of(whole, request.routes_from, len(whole) - 1) if count else None,
    )


@pytest.mark.parametrize("first", range(13))
@pytest.mark.parametrize("died", [False, True])
def test_parts_put_a_response_together(first: int, died: bool):
    request = request_of(4, routes_from=2)
    parts = Parts(request)
    asked = parts.rest("1")
    if died:
        part = Partial(asked)
        part.token_ids += tokens_of(asked)[:first]
        part.logprobs += map(logprob_of, part.token_ids)
        parts.keep(part, 1)
    else:
        parts.add(answer_of(asked, first, "abort"))
    asked = parts.rest("2")
    assert asked.max_tokens >= 1 and asked.request_id == "4-0-2"
    parts.add(answer_of(asked, asked.max_tokens, "length", 2))
    assert_whole([request], [parts])
    assert parts.versions[0][0] == 0 and parts.versions[-1][1:] == (12, 2)


@pytest.mark.parametrize("count", [0, 1])
def test_parts_drop_routes_before_the_first_token(count: int):
    """No span would say that they are of earlier weights."""
    request = request_of(4, budget=1)
    parts = Parts(request)
    context = rows_of(request.token_ids, 0, len(request.token_ids))
    parts.add(replace(answer_of(parts.rest("1"), count, "abort"), routes=context))
    assert parts.routes is None and parts.rest("2").routes_from == request.routes_from


@pytest.mark.parametrize("count", range(1, 12))
def test_parts_are_cut(count: int):
    request = request_of(4, routes_from=1)
    parts = Parts(request)
    parts.add(answer_of(parts.rest("1"), 5, "abort"))
    parts.add(answer_of(parts.rest("2"), 7, "length", 2))
    parts.cut(count)
    assert parts.token_ids == tokens_of(request)[:count] and len(parts.logprobs) == count
    assert parts.versions[-1][1] == count and (len(parts.versions) == 2) == (count > 5)
    assert parts.routes is not None and len(parts.routes) >= parts.rows
