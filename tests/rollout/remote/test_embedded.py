"""The embedded engine behind HTTP, against the same engine in this process."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from pyrl_ext.plan import compile_plan
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import embedded, embedded_worker
from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.embedded import address_of
from pyrl_ext.rollout.remote.embedded_worker import MAX_BATCHES, TooBusy, Worker
from pyrl_ext.rollout.remote.identity import difference, make_identity
from pyrl_ext.rollout.remote.protocol import GENERATE, HEALTH, Answer, Request
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.deadline import DEADLINE
from tests.helpers.engines import CONFIGS, GLM, checkpoint, engine_of, prompts_of, random_model
from tests.helpers.servers import Gate, served
from tests.helpers.tiny import CONFIG as TINY
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess

MODEL = random_model(GLM)
SAMPLING = Sampling(12, 1.3, stop_ids=(*range(20, 28),), samples_per_prompt=3, seed=5)


def request_of(prompt: Prompt, index: int, sampling: Sampling = SAMPLING, **fields: Any) -> Request:
    fields = {"max_tokens": sampling.max_new_tokens, "salt": "3"} | fields
    stream = (sampling.seed, prompt.id, index)
    name = f"{prompt.id} {index}"
    return Request.of(sampling, name, prompt.tokens, random_stream=stream, **fields)


def same(answer: Answer, sample: Sample, layers: int = 4) -> None:
    """An answer has the tokens, log-probs and routes of an engine's sample."""
    assert list(answer.token_ids) == sample.response
    assert answer.finish_reason == sample.finish_reason
    assert answer.versions == ((0, len(answer.token_ids), sample.weight_version),)
    found = torch.tensor(answer.logprobs)
    torch.testing.assert_close(
        found, sample.rollout_logprobs[sample.prompt_len :], atol=1e-5, rtol=0
    )
    if sample.routes is None:
        assert answer.routes is None
        return
    assert answer.routes is not None and answer.routes.shape[1] == layers
    rows = torch.from_numpy(answer.routes[:, list(sample.layer_ids)])
    assert torch.equal(rows, sample.routes[:-1])
    dense = [layer for layer in range(layers) if layer not in sample.layer_ids]
    assert not answer.routes[:, dense].any()


@pytest.mark.parametrize("family", CONFIGS)
async def test_generate_equals_the_engine(family: str):
    """Several ways of drawing at once, each by its own random streams."""
    config = CONFIGS[family]
    model = random_model(config)
    prompts = prompts_of([1, 3, 7, 20], config["vocab_size"])
    ways = [SAMPLING, replace(SAMPLING, seed=6, stop_ids=()), replace(SAMPLING, greedy=True)]
    expected = [engine_of(model, config).generate(prompts, way) for way in ways]
    async with served(engine_of(model, config, max_num_seqs=16)) as client:
        answers = await asyncio.gather(
            *(
                client.generate(request_of(p, i, way))
                for way in ways
                for p in prompts
                for i in range(3)
            )
        )
        _, text = await client.get("/metrics")
    samples = [sample for way in expected for sample in way]
    for answer, sample in zip(answers, samples, strict=True):
        same(answer, sample, config["num_hidden_layers"])
    tokens = sum(len(a.token_ids) for a in answers)
    assert f"vllm:generation_tokens_total {tokens}\n" in text
    assert "vllm:num_requests_running 0\n" in text


async def test_generate_does_not_depend_on_an_abort_and_a_second_server():
    prompts = prompts_of([5, 9], GLM["vocab_size"])
    sampling = replace(SAMPLING, stop_ids=())
    expected = engine_of(MODEL, GLM).generate(prompts, sampling)
    first = engine_of(MODEL, GLM)
    gate = Gate(first)
    requests = [request_of(p, i, sampling) for p in prompts for i in range(3)]
    async with served(first) as one, served(engine_of(MODEL, GLM)) as other:
        begun = [asyncio.create_task(one.generate(each)) for each in requests]
        await gate.allow(5)
        pause = asyncio.create_task(one.post("/pause?mode=abort"))
        await one.blocked(1)
        gate.open()
        assert (await pause)[0] == 200
        parts = await asyncio.gather(*begun)
        assert all(0 < len(part.token_ids) < 12 for part in parts)
        assert {part.finish_reason for part in parts} == {"abort"}
        rest = [
            replace(
                request,
                token_ids=request.token_ids + part.token_ids,
                max_tokens=12 - len(part.token_ids),
                routes_from=len(request.token_ids) + len(part.token_ids) - 1,
            )
            for request, part in zip(requests, parts, strict=True)
        ]
        ends = await asyncio.gather(*(other.generate(each) for each in rest))
    for part, end, sample in zip(parts, ends, expected, strict=True):
        assert part.routes is not None and end.routes is not None
        whole = replace(
            end,
            token_ids=part.token_ids + end.token_ids,
            logprobs=part.logprobs + end.logprobs,
            versions=((0, 12, 3),),
            routes=np.concatenate([part.routes, end.routes]),
        )
        same(whole, sample)


async def test_pause_keeps_requests_and_their_caches_over_new_weights():
    """The second span is of the new weights."""
    other = random_model(GLM, seed=1)
    (prompt,) = prompts_of([9], GLM["vocab_size"])
    sampling = replace(SAMPLING, stop_ids=())
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    async with served(engine) as client:
        request = request_of(prompt, 0, sampling)
        task = asyncio.create_task(client.generate(request))
        await gate.allow(4)
        pause = asyncio.create_task(client.post("/pause?mode=keep"))
        await client.blocked(1)
        gate.open()
        assert (await pause)[0] == 200
        worker = client.server.worker
        await worker.call(worker.load, checkpoint(other), 4, None)
        late = asyncio.create_task(client.generate(replace(request, request_id="late")))
        await client.post("/resume")
        answer = await task
        assert {v for _, _, v in (await late).versions} == {4}
    (_, begin, before), (_, _, after) = answer.versions
    assert (before, after, len(answer.token_ids)) == (3, 4, 12)
    old = engine_of(MODEL, GLM).generate([prompt], replace(sampling, samples_per_prompt=1))
    assert list(answer.token_ids[:begin]) == old[0].response[:begin]
    assert list(answer.token_ids[begin:]) != old[0].response[begin:]


async def paused_while_running(
    client: Any, gate: Gate, prompt: Prompt
) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """A request that has two tokens, and a pause that waits for it."""
    request = request_of(prompt, 0, replace(SAMPLING, stop_ids=()))
    running = asyncio.create_task(client.generate(request))
    await gate.allow(2)
    pause = asyncio.create_task(client.post("/pause?mode=wait"))
    await client.blocked(1)
    return running, pause


async def test_pause_waits_for_what_runs_and_holds_what_comes():
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    one, two = prompts_of([4, 6], GLM["vocab_size"])
    async with served(engine) as client:
        first, pause = await paused_while_running(client, gate, one)
        second = asyncio.create_task(client.generate(request_of(two, 0)))
        await client.blocked(2)
        gate.open()
        assert (await pause)[0] == 200
        assert (await first).finish_reason in ("stop", "length")
        assert client.server.worker.state == "paused"
        assert not second.done()
        await client.post("/resume")
        assert (await second).finish_reason in ("stop", "length")


async def test_resume_answers_a_pause_that_still_waits():
    """The pause waits for a running request, which continues after `/resume`."""
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    (prompt,) = prompts_of([4], GLM["vocab_size"])
    async with served(engine) as client:
        running, pause = await paused_while_running(client, gate, prompt)
        resume = asyncio.create_task(client.post("/resume"))
        await client.blocked(2)
        await gate.allow(1)
        assert (await resume)[0] == 200
        assert (await pause)[0] == 200 and not running.done()
        assert client.server.worker.state == "runs"
        gate.open()
        assert len((await running).token_ids) == 12


async def test_generate_of_two_kinds_at_once_both_go_on():
    """A short greedy request ends while a long one that draws still runs."""
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    (prompt,) = prompts_of([4], GLM["vocab_size"])
    async with served(engine, 200) as client:
        long = request_of(prompt, 0, replace(SAMPLING, stop_ids=()), max_tokens=150)
        begun = asyncio.create_task(client.generate(long))
        await gate.allow(3)
        greedy = request_of(prompt, 0, replace(SAMPLING, greedy=True), max_tokens=5)
        short = asyncio.create_task(client.generate(greedy))
        await gate.allow(30)
        await short
        assert not begun.done()
        gate.open()
        assert len((await begun).token_ids) == 150


async def test_generate_aborts_for_a_client_that_goes_away():
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    one, two = prompts_of([4, 5], GLM["vocab_size"])
    request = request_of(one, 0, replace(SAMPLING, stop_ids=()))
    async with served(engine) as client:
        begun = asyncio.create_task(client.generate(request))
        await gate.allow(2)
        begun.cancel()
        while client.server.jobs:
            await asyncio.sleep(0.001)
        await client.blocked(1)
        gate.release(1)
        while client.server.worker.busy:
            await asyncio.sleep(0.001)
        gate.open()
        last = await client.generate(request_of(two, 0))
        assert not client.server.worker.busy
        assert client.server.worker.counts["answers"] == 2
        assert client.server.worker.counts["generation"] == 3 + len(last.token_ids)


async def test_generate_aborts_what_is_added_after_its_client_went_away():
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    one, two = prompts_of([4, 5], GLM["vocab_size"])
    endless = replace(SAMPLING, stop_ids=())
    async with served(engine, 200) as client:
        first = asyncio.create_task(client.generate(request_of(one, 0, endless)))
        await gate.allow(2)  # what comes now is added behind the forward
        second = asyncio.create_task(client.generate(request_of(two, 0, endless, max_tokens=150)))
        await client.blocked(1)
        second.cancel()
        await asyncio.sleep(0.2)
        gate.open()
        tokens = len((await first).token_ids)
        while client.server.worker.busy:
            await asyncio.sleep(0.001)
        assert client.server.worker.counts["generation"] < tokens + 150


async def test_wrong_calls_are_refused_with_a_reason():
    engine = HFEngine(GLM)
    (prompt,) = prompts_of([5], GLM["vocab_size"])
    request = request_of(prompt, 0).to_json()

    async def refused(path: str, body: Any, status: int, says: str) -> None:
        found, answer = await client.post(path, body)
        assert (found, says in answer["error"]["message"]) == (status, True), answer

    async with served(engine, 40) as client:
        await refused(GENERATE, request, 409, "no complete weights")
        engine.load_weights(checkpoint(MODEL).items(), 1)
        wrong = request | {"token_ids": [5, 10_000]}
        await refused(GENERATE, wrong, 400, "token id 10000")
        wrong = request | {"token_ids": list(range(3, 36))}
        await refused(GENERATE, wrong, 400, "at most 40 tokens")
        await refused(GENERATE, [1], 400, "expected an object")
        await refused("/pause?mode=never", {}, 400, "'never'")
        await refused("/start_weight_update", {}, 409, "expected it paused")
        await refused("/collective_rpc", {"method": "shutdown"}, 400, "weight_digests")
        await client.post("/pause")
        await refused("/update_weights", {"update_info": {}}, 500, "not started")
        await refused("/finish_weight_update", {"weight_version": "3"}, 500, "without weights")
        await client.post("/resume")
        async with client.http.post(client.url + GENERATE, data=b"{") as reply:
            assert reply.status == 400
        # a server goes on after all of it
        assert (await client.generate(request_of(prompt, 0))).versions[0][2] == 1
        names = ["model.norm.weight"]
        _, found = await client.post(
            "/collective_rpc", {"method": "weight_digests", "args": [names]}
        )
        assert found == {"results": [engine.checksums(names)]}


async def test_clients_of_the_generate_key_take_no_place_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
):
    """Many ways to sample, requests that no engine takes, and many requests."""
    engine = engine_of(MODEL, GLM, max_num_seqs=2)
    (prompt,) = prompts_of([5], GLM["vocab_size"])
    loop = asyncio.get_running_loop()
    worker = Worker(engine, 100)  # its thread does not run

    def asked(temperature: float, **fields: Any) -> Request:
        return request_of(prompt, 0, replace(SAMPLING, temperature=temperature), **fields)

    for wrong, says in (
        (asked(1.5, max_tokens=500), "at most 100 tokens"),
        (replace(asked(1.5), stop=("a",)), "without a tokenizer"),
    ):
        with pytest.raises(ValueError, match=says):
            worker.add(wrong, loop, is_trainers=False)
    assert not worker.batches
    first = [worker.add(asked(1 + n / 100), loop, is_trainers=False) for n in range(MAX_BATCHES)]
    with pytest.raises(TooBusy, match=f"{MAX_BATCHES} other ways to sample"):
        worker.add(asked(2.0), loop, is_trainers=False)
    worker.add(asked(3.0), loop, is_trainers=True)
    assert len(worker.batches) == MAX_BATCHES + 1
    shared = worker.batches[next(s for s in worker.batches if s.temperature == 1.0)]
    own = [worker.add(asked(1.0), loop, is_trainers=True) for _ in range(2)]
    assert [turn.index for turn in shared.waiting] == [j.turn.index for j in (*own, first[0])]
    monkeypatch.setattr(embedded_worker, "MAX_REQUESTS", MAX_BATCHES)
    with pytest.raises(TooBusy, match=f"{MAX_BATCHES} requests wait or run"):
        worker.add(asked(1.0), loop, is_trainers=False)
    worker.abort(first)
    assert worker.add(asked(1.0), loop, is_trainers=False)


async def test_a_client_without_a_place_is_told_when_to_try_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded_worker, "MAX_REQUESTS", 0)
    keys = Keys("g" * 32, "c" * 32)
    (prompt,) = prompts_of([5], GLM["vocab_size"])
    found = {}
    async with served(engine_of(MODEL, GLM), keys=keys) as client:
        for key in (keys.generate, keys.control):
            headers = {"Authorization": f"Bearer {key}"}
            body = request_of(prompt, 0).to_json()
            async with client.http.post(client.url + GENERATE, json=body, headers=headers) as reply:
                found[key] = reply.status, reply.headers.get("Retry-After"), await reply.text()
    assert found[keys.generate][:2] == (503, "5") and "try later" in found[keys.generate][2]
    assert found[keys.control][:2] == (200, None)


async def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch: pytest.MonkeyPatch):
    """Also one with half a head. Those of requests stay, also before their first token."""
    monkeypatch.setattr(embedded, "HEAD_S", 0.5)
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    async with served(engine) as client:
        place = urlsplit(client.url)
        silent = await asyncio.open_connection(place.hostname, place.port)
        half = await asyncio.open_connection(place.hostname, place.port)
        half[1].write(b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        asked = asyncio.create_task(client.generate(request_of(Prompt(0, (3, 4, 5)), 0)))
        await asyncio.to_thread(gate.waits.wait, DEADLINE)
        async with asyncio.timeout(DEADLINE):
            for reader, _ in (silent, half):
                with suppress(ConnectionResetError):
                    assert not await reader.read()
        assert not asked.done()
        gate.open()
        assert (await asked).finish_reason
        for _, writer in (silent, half):
            writer.close()


async def test_the_oldest_silent_connections_of_a_peer_with_many_are_closed(
    monkeypatch: pytest.MonkeyPatch,
):
    """Another peer's stays, and so does the one of a request."""
    monkeypatch.setattr(embedded, "MAX_RECENT", 4)
    engine = engine_of(MODEL, GLM)
    gate = Gate(engine)
    async with served(engine) as client:
        place = urlsplit(client.url)
        asked = asyncio.create_task(client.generate(request_of(Prompt(0, (3, 4, 5)), 0)))
        await asyncio.to_thread(gate.waits.wait, DEADLINE)
        other = await asyncio.open_connection(
            place.hostname, place.port, local_addr=("127.0.0.2", 0)
        )
        many = [await asyncio.open_connection(place.hostname, place.port) for _ in range(9)]
        async with asyncio.timeout(DEADLINE):
            for reader, _ in many[:5]:
                with suppress(ConnectionResetError):
                    assert not await reader.read()
        assert (await client.get(HEALTH))[0] == 200
        await asyncio.sleep(0)
        for reader, writer in (other, *many[6:]):  # the last call closed the sixth
            assert not reader.at_eof()
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert not asked.done()
        gate.open()
        assert (await asked).finish_reason
        for _, writer in (other, *many):
            writer.close()


async def test_the_engine_goes_on_after_a_call_that_fails(caplog: pytest.LogCaptureFixture):
    def planted() -> None:
        raise RuntimeError("planted")

    (prompt,) = prompts_of([5], GLM["vocab_size"])
    async with served(engine_of(MODEL, GLM)) as client:
        client.server.worker.post(planted)
        assert (await client.generate(request_of(prompt, 0))).token_ids
    assert "planted" in caplog.text and "other requests go on" in caplog.text


async def test_weights_that_make_nan_end_requests_with_an_error():
    engine = engine_of(MODEL, GLM)
    with torch.no_grad():
        engine.model.get_parameter("lm_head.weight").fill_(torch.nan)
    (prompt,) = prompts_of([5], GLM["vocab_size"])
    async with served(engine) as client:
        with pytest.raises(ValueError, match=r"an error, .*non-finite|logprob"):
            await client.generate(request_of(prompt, 0))


def test_address_of_is_that_of_the_plan_with_its_capitals():
    """A name is compared without them; an engine that did not know its address would answer for any
    name."""
    plan = tiny_plan("rollout.servers=[http://GPU-17:8000]", "rollout.keys=keys")
    assert address_of(plan, "gpu-17", 8000) == "http://GPU-17:8000"
    assert address_of(plan, "gpu-17", 8001) is None
    assert address_of(plan, "gpu-18", 8000) is None


def test_embedded_says_its_address_first_and_ends_with_its_parent(tmp_path: Path):
    """A parent starts it, learns the address, and is killed."""
    command = [sys.executable, "-m", "pyrl_ext.rollout.remote.embedded", str(TINY)]
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "os.environ['PYRL_PARENT'] = str(os.getpid())\n"
        "server = subprocess.Popen(sys.argv[1:])\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script), *command], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        server = os.pidfd_open(int(parent.stdout.readline()))
        address = parent.stdout.readline().strip()
        with urllib.request.urlopen(address + "/health") as reply:
            assert reply.status == 200
        body = json.dumps({"method": "identity"}).encode()
        with urllib.request.urlopen(address + "/collective_rpc", body) as reply:
            (found,) = json.load(reply)["results"]
        plan = compile_plan(TINY)
        shapes = HFEngine(plan.hf).shapes()
        mine = make_identity(plan.hf, shapes, "float32", plan.tokenizer_path)
        assert difference(mine, found) is None
    finally:
        parent.kill()
        parent.wait()
    assert select.select([server], [], [], 30)[0]
    os.close(server)
