"""The engine of a rank over small servers: samples, turns, publishes, and what is counted."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from pyrl_ext.metrics.rollout_metrics import SERVER_METRICS
from pyrl_ext.parallel.buckets import KeptBuckets
from pyrl_ext.rollout.engine import in_order
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.cuts import CUT_S
from pyrl_ext.rollout.remote.engine import ServersEngine, build_servers_engine
from pyrl_ext.rollout.remote.holder import salt_of
from pyrl_ext.rollout.remote.model import ServedModel
from pyrl_ext.rollout.remote.protocol import encode_routes
from pyrl_ext.rollout.remote.weight_sync import Publisher
from pyrl_ext.rollout.versions import spans_of
from pyrl_ext.samples import Image, Prompt, Sample, Sampling, Turn
from tests.helpers.deadline import DEADLINE, until
from tests.helpers.http_engine import (
    EXPERTS,
    LAYERS,
    VOCAB,
    HttpEngine,
    K,
    logprob_of,
    rows_of,
    token_at,
)
from tests.helpers.tiny import tiny_plan
from tests.helpers.turns import ScriptedFeed, answers, by_turn, first_turns
from tests.helpers.versions import Versions

ROUTED = (1, 2, 3)
MODEL = ServedModel(VOCAB, LAYERS, ROUTED, EXPERTS, K)
PROMPTS = [Prompt(10 + i, tuple(range(5, 7 + i % 3))) for i in range(8)]
SAMPLING = Sampling(max_new_tokens=10, samples_per_prompt=3, seed=5)


class Waiting(Versions):
    """It waits until it may go on; version 3 reaches nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.goes_on = threading.Event()

    def __call__(
        self, servers: Sequence[Server], named: Iterable[Any], version: int, *_: Any
    ) -> Mapping[str, str]:
        self.begun.set()
        assert self.goes_on.wait(DEADLINE)
        if version == 3:
            raise RuntimeError("no way to any server")
        return super().__call__(servers, named, version)


class Slow(Versions):
    """Version 2 does not come as long as the first server is connected."""

    def __call__(
        self, servers: Sequence[Server], named: Iterable[Any], version: int, *_: Any
    ) -> Mapping[str, str]:
        if version != 2:
            return super().__call__(servers, named, version)
        call = servers[0].control("/slow", timeout=DEADLINE)
        try:
            asyncio.run_coroutine_threadsafe(call, self.loop).result()
        except ServerFailed as error:
            return {servers[0].address: str(error)}
        raise AssertionError("expected the engine closed before")


class OneByOne(Versions):
    """It keeps what runs; servers get the version one after the other."""

    def __call__(
        self, servers: Sequence[Server], named: Iterable[Any], version: int, *_: Any
    ) -> Mapping[str, str]:
        async def give() -> None:
            for each in servers:
                await each.control("/pause?mode=keep")
            for each in servers:
                await each.control("/finish_weight_update", {"weight_version": str(version)})
                await each.control("/resume")
                await asyncio.sleep(0.3)  # requests end on those that have it

        asyncio.run_coroutine_threadsafe(give(), self.loop).result()
        return self.failing


@contextmanager
def over(
    engines: Sequence[HttpEngine], publish: Versions | None = None, **options: Any
) -> Iterator[ServersEngine]:
    """An engine over the servers."""
    servers = [Server(each.address) for each in engines]
    publisher = cast(Publisher, publish or Versions())
    with closing(ServersEngine(servers, MODEL, publisher, patience=10.0, **options)) as engine:
        yield engine


@contextmanager
def loaded(
    engines: Sequence[HttpEngine], publish: Versions | None = None
) -> Iterator[ServersEngine]:
    """An engine over the servers, with weights of version 1."""
    with over(engines, publish) as engine:
        engine.load_weights([], 1)
        yield engine


@pytest.fixture
def engines():
    with ExitStack() as stack:
        yield [stack.enter_context(HttpEngine()) for _ in range(2)]


def assert_right(sample: Sample, seed: int = 5) -> None:
    """The sample is that of its random stream, with log-probs and routes of its tokens."""
    tokens = sample.tokens.tolist()
    start = sample.prompt_len
    stream = (seed, sample.prompt_id, sample.index)
    assert tokens[start:] == [token_at(stream, place) for place in range(start, len(tokens))]
    expected = torch.tensor([0.0] * start + list(map(logprob_of, tokens[start:])))
    assert torch.equal(sample.rollout_logprobs, expected)
    rows = torch.from_numpy(rows_of(tokens, 0, len(tokens) - 1))[:, list(ROUTED)]
    assert sample.routes is not None and torch.equal(sample.routes[:-1], rows)
    assert sample.layer_ids == ROUTED and sample.routes.dtype == torch.uint8
    assert sample.route_mask.tolist() == [True] * (len(tokens) - 1) + [False]


def test_engine_streams_samples(engines: list[HttpEngine]):
    with loaded(engines) as engine:
        found = engine.generate(PROMPTS, SAMPLING)
        assert [(s.prompt_id, s.index) for s in found] == [
            (p.id, i) for p in PROMPTS for i in range(3)
        ]
        for sample in found:
            assert_right(sample)
            assert sample.finish_reason == "length" and sample.weight_version == 1
            assert not sample.version_spans and len(sample.response) == 10
        assert engine.capabilities.concurrent and engine.capabilities.turns
    for each in engines:
        assert {r.temperature for r in each.asked} == {1.0} and each.asked


def test_engine_asks_as_sampling_says(engines: list[HttpEngine]):
    engines[0].stops = engines[1].stops = 4
    sampling = Sampling(6, 0.5, 0.9, 7, (3, 4), seed=2**70 % 2**63)
    with loaded(engines) as engine:
        (sample,) = engine.generate(PROMPTS[:1], sampling)
        assert sample.finish_reason == "stop" and len(sample.response) == 4
        engine.generate(PROMPTS[1:2], Sampling(6, 0.5, 0.9, greedy=True))
        with pytest.raises(ValueError, match="kept sets, expected none"):
            engine.generate(PROMPTS[:1], Sampling(6, top_k=2, sampling_mask=True))
        image = Image(0, 1, (1, 1, 1), torch.zeros(1, 1, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"prompt 1\): images, expected text"):
            engine.generate([Prompt(1, (5, 6), images=(image,))], SAMPLING)
    first, second = (r for each in engines for r in each.asked)
    if first.temperature == 0:
        first, second = second, first
    assert (first.temperature, first.top_p, first.top_k, first.stop_ids) == (0.5, 0.9, 7, (3, 4))
    assert first.random_stream == (2**70 % 2**63, 10, 0) and first.max_tokens == 6
    assert (second.temperature, second.top_p, second.top_k) == (0.0, 1.0, 0)


def script(sample: Sample) -> list[int] | None:
    """Three turns; the second of one trajectory forgets the first."""
    if sample.turn == 2:
        return None
    tokens = sample.tokens.tolist()
    fork = sample.turn == 0 and (sample.prompt_id, sample.index) == (11, 1)
    return (tokens[: sample.prompt_len] if fork else tokens) + [20 + sample.turn, 21]


@pytest.mark.parametrize("late", [False, True])
def test_engine_answers_turns_and_asks_for_new_routes_only(engines: list[HttpEngine], late: bool):
    feed = ScriptedFeed(first_turns(PROMPTS[:4], 2, 6), script, late=late)
    with loaded(engines) as engine:
        found = by_turn(answers(engine, feed, SAMPLING))
    assert len(found) == 4 * 2 * 3
    for sample in found.values():
        assert_right(sample)
    for each in engines:
        for request in each.asked:
            _, prompt, index = request.random_stream
            turn = int(request.request_id.split("-")[3])
            before = found.get((prompt, index, turn - 1))
            goes_on = before is not None and (prompt, index, turn) != (11, 1, 1)
            assert request.routes_from == (len(before.tokens) - 1 if goes_on and before else 0)
    held = [{request.random_stream[1] for request in each.asked} for each in engines]
    assert not held[0] & held[1] and all(held)


class GivenUp(ScriptedFeed):
    """The second turn of each trajectory is given up; a third one begins anew at once."""

    def take(self, wait: bool) -> list[Turn] | None:
        turns = super().take(wait)
        second = [turn for turn in turns or () if turn.number == 1]
        third = [
            replace(turn, number=2, prompt=replace(turn.prompt, tokens=(5, 6, 7)))
            for turn in second
        ]
        return None if turns is None else turns + third

    def reply(self, sample: Sample) -> None:
        if sample.turn < 2:
            super().reply(sample)


def test_engine_answers_several_turns_of_one_conversation_at_once(engines: list[HttpEngine]):
    def goes_on(sample: Sample) -> list[int] | None:
        return None if sample.turn else [*sample.tokens.tolist(), 20]

    feed = GivenUp(first_turns(PROMPTS[:4], 2, 6), goes_on)
    with loaded(engines) as engine:
        found = by_turn(answers(engine, feed, SAMPLING))
    assert len(found) == 4 * 2 * 3
    for sample in found.values():
        assert_right(sample)
    asked = [request for each in engines for request in each.asked]
    assert sum(request.routes_from > 0 for request in asked) == 4 * 2


def test_engine_goes_on_with_what_is_left_and_loses_nothing(engines: list[HttpEngine]):
    engines[0].dies = 60
    with loaded(engines) as engine:
        for sample in engine.generate(PROMPTS, SAMPLING):
            assert_right(sample)
        engine.load_weights([], 2)
        metrics = engine.metrics()
        assert metrics.keys() - {"publish/seconds"} == {
            metric.name for metric in SERVER_METRICS if metric.name.startswith("servers/")
        }
        assert metrics["servers/used"] == 1 and metrics["servers/resent"] > 0
        assert metrics["servers/requests"] == 24 and metrics["servers/seconds"] > 0
        assert metrics["servers/prompts_asked"] == metrics["servers/prompts_returned"] == 8
        engine.load_weights([], 3)
        assert engine.metrics()["servers/requests"] == 0


def test_engine_stops_when_too_few_servers_are_left(engines: list[HttpEngine]):
    engines[0].dies, engines[1].dies = 60, 90
    with loaded(engines) as engine:
        with pytest.raises(RuntimeError, match="0 of 2 servers are left, expected at least 1"):
            engine.generate(PROMPTS, SAMPLING)
        with pytest.raises(RuntimeError, match="0 of 2 servers"):
            engine.load_weights([], 2)


def test_engine_keeps_several_streams_open_through_a_publish(engines: list[HttpEngine]):
    """Two threads generate while a third publishes; no request begins meanwhile."""
    for each in engines:
        each.seconds = 0.01
    found: dict[int, list[Sample]] = {}

    with loaded(engines) as engine:

        def generate(seed: int) -> None:
            sampling = Sampling(300, samples_per_prompt=2, seed=seed)
            found[seed] = engine.generate(PROMPTS, sampling)

        threads = [threading.Thread(target=generate, args=(seed,)) for seed in (5, 6)]
        for thread in threads:
            thread.start()
        for version in (2, 3):
            wanted = sum(each.generated for each in engines) + 300
            until(lambda wanted=wanted: sum(each.generated for each in engines) >= wanted)
            engine.load_weights([], version)
        metrics = engine.metrics()
        ends = ("returned", "aborted", "failed", "in_flight")
        counts = {end: metrics.get(f"servers/prompts_{end}", 0) for end in ends}
        assert counts["in_flight"] == sum(counts.values()) == metrics["servers/prompts_asked"]
        for each in engines:
            each.seconds = 0.0
        for thread in threads:
            thread.join()
        engine.load_weights([], 4)
        metrics = engine.metrics()
        assert metrics["servers/prompts_in_flight"] == 0
        assert metrics["servers/prompts_returned"] == metrics["servers/prompts_asked"]
    versions: set[int] = set()
    for seed in (5, 6):
        assert len(found[seed]) == 16
        for sample in found[seed]:
            assert_right(sample, seed)
            versions |= (spans := {version for _, _, version in spans_of(sample)})
            assert len(sample.version_spans) in (0, len(spans))
            assert sample.weight_version == min(spans)
    assert versions >= {1, 2}
    salts = {request.salt for each in engines for request in each.asked}
    assert salts == {salt_of("a run", version) for version in (1, 2, 3)}


def test_engine_gives_up_what_a_closed_stream_asked_for(engines: list[HttpEngine]):
    engines[1].seconds = 1.0
    with loaded(engines) as engine:
        with closing(engine.stream(PROMPTS, Sampling(2, samples_per_prompt=1, seed=5))) as stream:
            samples = [next(stream)]
        until(lambda: not any(each.running for each in engines))
        engines[1].seconds = 0.0
        engine.load_weights([], 2)
        metrics = engine.metrics()
        assert metrics["servers/prompts_returned"] + metrics["servers/prompts_aborted"] == 8
        assert metrics["servers/prompts_aborted"] >= 1
        samples += engine.generate(PROMPTS, SAMPLING)
        assert len(in_order(samples, PROMPTS)) == 25


def test_engine_takes_answers_of_servers_that_have_new_weights_before_others(
    engines: list[HttpEngine],
):
    for each in engines:
        each.seconds = 0.01
    sampling = Sampling(30, samples_per_prompt=2, seed=5)
    with loaded(engines, OneByOne()) as engine:
        with ThreadPoolExecutor(1) as pool:
            came = pool.submit(engine.generate, PROMPTS, sampling)
            until(lambda: sum(each.generated for each in engines) >= 200)
            engine.load_weights([], 2)
            samples = came.result()
        metrics = engine.metrics()
    assert {version for sample in samples for *_, version in spans_of(sample)} == {1, 2}
    assert metrics["servers/used"] == 2 and metrics["servers/resent"] == 0


def test_engine_gives_no_routes_of_earlier_weights_to_a_turn_of_new_ones(
    engines: list[HttpEngine],
):
    """The turn is asked for while the new weights are on their way."""
    publish = Waiting()
    publish.goes_on.set()
    with loaded(engines, publish) as engine:
        publish.begun.clear()
        publish.goes_on.clear()
        loader = threading.Thread(target=engine.load_weights, args=([], 2))

        def script(sample: Sample) -> list[int] | None:
            if sample.turn == 1:
                return None
            loader.start()
            assert publish.begun.wait(DEADLINE)
            threading.Timer(0.2, publish.goes_on.set).start()
            return [*sample.tokens.tolist(), 20, 21]

        feed = ScriptedFeed([Turn(PROMPTS[0], 0, 0, 6)], script)
        turns = [*by_turn(answers(engine, feed, Sampling(10, seed=5))).values()]
        loader.join()
    first, second = turns
    old = len(first.tokens) - 1
    assert [first.weight_version, second.weight_version] == [1, 2]
    assert (
        second.route_mask.nonzero().flatten().tolist() == [*range(old, len(second.tokens) - 1)]
        and second.masked == old
    )


def test_engine_ends_open_streams_when_it_closes(engines: list[HttpEngine]):
    for each in engines:
        each.seconds = 0.2
    with loaded(engines) as engine, ThreadPoolExecutor(1) as pool:
        came = pool.submit(engine.generate, PROMPTS, Sampling(1000, seed=5))
        until(lambda: any(each.running for each in engines))
        engine.close()
        with pytest.raises(RuntimeError, match="closed, expected no open streams"):
            came.result(DEADLINE)


def test_engine_gives_its_servers_back(engines: list[HttpEngine]):
    """Those that answer."""
    with loaded(engines) as engine:
        engines[1].close()
        engine.close()
    assert [each.controls["/collective_rpc"] for each in engines] == [1, 0]


def open_events() -> int:
    """Number of eventfds that this process holds."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and "eventfd" in os.readlink(link) for link in links)


def test_engine_opens_no_stream_when_it_is_closed(engines: list[HttpEngine]):
    """A stream that ends after the engine leaves no open file."""
    before = open_events()
    engines[1].hangs_after = 3
    with loaded(engines) as engine:
        stream = engine.stream(PROMPTS, SAMPLING)
        next(stream)
        engine.close()
        with pytest.raises(RuntimeError, match="closed, expected no open streams"):
            list(stream)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.generate(PROMPTS, SAMPLING)
    assert open_events() == before


def test_engine_closes_while_a_server_has_not_answered(
    engines: list[HttpEngine], capfd: pytest.CaptureFixture[str]
):
    """The end of a request's connection sends it to no other server, and leaves no task."""
    engines[1].silent = True
    with loaded(engines) as engine:
        stream = engine.stream(PROMPTS, SAMPLING)
        next(stream)
        until(lambda: engines[1].asked)
        engine.close()
        assert not asyncio.all_tasks(engine.loop)
        with pytest.raises(RuntimeError, match="closed, expected no open streams"):
            list(stream)
    assert not capfd.readouterr().err


def test_engine_closes_while_a_server_reads_nothing():
    """The engine drops the part of a request's body that is not sent yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "http://127.0.0.1:{1}".format(*server.getsockname())
        engine = ServersEngine([Server(address)], MODEL, cast(Publisher, Versions()))
        call = engine.router.states[0].server.control("/long", "a" * (64 << 20))
        came = asyncio.run_coroutine_threadsafe(call, engine.loop)
        until(lambda: multiprocessing.connection.wait([server], 0))
        engine.close()
        assert came.cancelled()


def test_engine_blames_no_server_for_the_end_of_its_connections(
    engines: list[HttpEngine], capsys: pytest.CaptureFixture[str]
):
    """It closes in the middle of a publish."""
    with over(engines, Slow(), keep=KeptBuckets(1 << 10)) as engine:
        for version in (1, 2):
            engine.load_weights([("a", torch.ones(2))], version)
        until(lambda: engines[0].controls["/slow"])
    assert not capsys.readouterr().err


def test_engine_gathers_no_weights_when_too_few_servers_are_left(engines: list[HttpEngine]):
    """All ranks know it before; one that gathers alone would wait for the others forever."""
    read = list[int]()
    with loaded(engines) as engine:
        for each in engine.router.states:
            engine.loop.call_soon_threadsafe(engine.router.take_out, each, "it is lost")
        with pytest.raises(RuntimeError, match="0 of 2 servers are left"):
            engine.load_weights(((str(n), read.append(n)) for n in range(5)), 2)  # type: ignore
    assert not read


def test_engine_syncs_weights_in_background(engines: list[HttpEngine]):
    """Requests wait for the new version, and end with a publish that fails."""
    publish = Waiting()
    with over(engines, publish, keep=KeptBuckets(1 << 10)) as engine:
        for version in (1, 2):
            engine.load_weights([("a", torch.ones(2))], version)
            assert publish.begun.wait(DEADLINE)
            with ThreadPoolExecutor(1) as pool:
                came = pool.submit(engine.generate, PROMPTS, SAMPLING)
                assert not came.done()
                publish.goes_on.set()
                assert {sample.weight_version for sample in came.result()} == {version}
            assert not engine.samples_stale() and engine.metrics()["publish/wait_seconds"] >= 0
            publish.begun.clear()
            publish.goes_on.clear()
        engine.load_weights([], 3)
        publish.goes_on.set()
        for call in (lambda: engine.generate(PROMPTS, SAMPLING), engine.samples_stale):
            with pytest.raises(RuntimeError, match="no way to any server"):
                call()


@pytest.mark.parametrize("when", ["in it", "after it"])
def test_engine_takes_out_servers_that_fail_a_publish(engines: list[HttpEngine], when: str):
    reasons: dict[str, str] = {}
    publish = Versions()
    if when == "in it":
        publish.failing = reasons
    else:
        publish.wrong = reasons
    with loaded(engines, publish) as engine:
        reasons[engines[1].address] = "its digest differs"
        engine.load_weights([], 2)
        assert engine.samples_stale() == (when == "after it") and not engine.samples_stale()
        assert [state.used for state in engine.router.states] == [True, False]
        for sample in engine.generate(PROMPTS, SAMPLING):
            assert_right(sample)
        assert not engines[1].asked
        reasons.clear()
        until(lambda: engine.router.states[1].there)
        engine.load_weights([], 3)
        assert engine.metrics()["servers/used"] == 2
        engine.generate(PROMPTS, SAMPLING)
        assert engines[1].asked


def test_engine_trusts_no_weights_whose_digests_differ(engines: list[HttpEngine]):
    """The check runs while servers generate; what it finds is raised before samples are used."""

    def differ() -> None:
        raise RuntimeError("1 of 16 tensors differ in the engine")

    with loaded(engines) as engine:
        engine.verify_weights(lambda: None)
        assert not engine.samples_stale()
        engine.load_weights([], 2)
        engine.verify_weights(differ)
        with pytest.raises(RuntimeError, match="1 of 16 tensors differ in the engine"):
            engine.samples_stale()


def test_engine_sends_a_part_to_who_has_the_rest_alone(engines: list[HttpEngine]):
    """A server that was lost waits for a publish of all tensors."""
    with loaded(engines) as engine:
        engine.run(lost(engine))
        until(lambda: engine.router.states[1].there)
        for version, only, used in ((2, ["a"], False), (3, ["a"], False), (4, None, True)):
            engine.load_weights([], version, only)
            assert [state.used for state in engine.router.states] == [True, used]
            assert (engines[0].version, engines[1].version) == (version, version if used else 1)
    says = pytest.raises(RuntimeError, match="only some are sent, expected a load_weights")
    with over(engines) as engine, says:
        engine.load_weights([], 1, ["a"])


async def lost(engine: ServersEngine) -> None:
    engine.router.take_out(engine.router.states[1], "it is lost")


def with_routes(value: Any) -> Any:
    def twist(request: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages[-1]["choices"][0]["routed_experts"] = value
        return messages

    return twist


def test_engine_checks_routes_and_tokens_against_the_model(engines: list[HttpEngine]):
    rows = rows_of([5] * 30, 0, 11)
    messages = {
        "no routes": with_routes(None),
        "experts 0 to 9": with_routes(encode_routes(rows % 2 * 9)),
        r"routes \(11, 3, 2\)": with_routes(encode_routes(rows[:, :3])),
    }
    for message, twist in messages.items():
        engines[1].twist = twist
        with loaded(engines) as engine:
            for sample in engine.generate([Prompt(p.id, (5, 6)) for p in PROMPTS], SAMPLING):
                assert_right(sample)
            assert not engine.router.states[1].used
            assert re.search(message, engine.router.states[1].server.reason or "")


def test_engine_samples_the_last_tokens_again_where_a_stop_string_may_begin(
    engines: list[HttpEngine],
):
    """The server of the second part looks for stop strings in its own tokens alone."""
    engines[0].dies = 5  # four are kept, of which two may be of a stop string of three bytes
    with loaded(engines) as engine:
        (sample,) = engine.generate(PROMPTS[:1], Sampling(10, seed=5, stop=("abc",)))
        assert_right(sample)
        assert len(engines[1].asked[0].token_ids) == 2 + 4 - 2
        assert not engine.router.states[0].used


def test_build_servers_engine_gives_its_servers_the_limits_of_the_plan():
    where = "rollout.servers=[http://127.0.0.1:9, http://127.0.0.1:10]"
    plan = tiny_plan(where, "rollout.request_timeout=7")
    with closing(build_servers_engine(plan, torch.device("cpu"))) as engine:
        servers = [state.server for state in engine.router.states]
        assert [server.address for server in servers] == list(plan.addresses)
        assert {(server.silence, server.patience) for server in servers} == {(7.0, CUT_S)}
