"""The stock server of vLLM as `pyrl serve` starts it: weights, tokens, routes, keys.

Needs vLLM (`make .venv/.vllm`); `make test-vllm` runs it. One server for all tests.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
import torch
from torch import Tensor

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.sampling import processed_logprobs
from pyrl_ext.rollout.remote import protocol
from pyrl_ext.rollout.remote.auth import TABLE, Keys
from pyrl_ext.rollout.remote.canary import canary_of
from pyrl_ext.rollout.remote.changes import SentBuckets
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.holder import Run
from pyrl_ext.rollout.remote.identity import identity_of, shapes_of
from pyrl_ext.rollout.remote.protocol import Answer, Partial, Request
from pyrl_ext.rollout.remote.server_update import ServerUpdate
from pyrl_ext.rollout.remote.tls import certificate_of, trust_of
from pyrl_ext.rollout.remote.weight_sync import Published, Weights, publish, release
from pyrl_ext.samples import Sampling
from tests.helpers.certificates import Authority
from tests.helpers.configs import CONFIGS, hf_of
from tests.helpers.engines import GLM, checkpoint, plain, random_model
from tests.helpers.guarded import CALLERS, ODD, expected, key_folder, raw_call
from tests.helpers.tiny import CONFIG, tiny_plan
from tests.helpers.vllm_pair import (
    NEEDS_AMX,
    drafting_weights,
    random_weights,
    wide_enough,
    with_drafts,
)

pytestmark = pytest.mark.vllm

MODELS = {n: random_model(GLM, seed, std=0.1) for n, seed in {1: 0, 2: 1, 3: 1}.items()}
with torch.no_grad():
    for weight in MODELS[3].parameters():  # a step after the second
        weight.view(-1)[::100] *= 1.5
LAYERS = (1, 2, 3)


class Served:
    """The server, and the trainer's loop."""

    def __init__(self, folder: Path, *overrides: str, authority: Authority | None = None):
        scheme = "http" if authority is None else "https"
        with socket.create_server(("127.0.0.1", 0)) as door:
            place = f"127.0.0.1:{door.getsockname()[1]}"
        self.address = f"{scheme}://{place}"
        if authority is not None:
            overrides = (*overrides, *authority.options(authority.sign("engine", "IP:127.0.0.1")))
        keys = key_folder(folder)
        options = (f"rollout.servers=[{self.address}]", "rollout.engine=vllm", f"run={folder}")
        options = (*options, f"rollout.keys={keys}", *overrides)
        self.plan = tiny_plan(*options)
        self.log = folder / f"engine-{place.partition(':')[2]}.log"
        command = [sys.executable, "-m", "pyrl_ext.train.serve", str(CONFIG), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server = Server(self.address, keys=Keys.read(keys), tls=trust_of(self.plan))
        self.certificate = certificate_of(self.plan)
        self.canary = canary_of(self.plan)

    def answers(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            assert "started again" not in line, self.log.read_text()[-5000:]
            if "answers" in line:
                return
        raise AssertionError(self.log.read_text()[-5000:])

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def generate(self, request: Request) -> Answer:
        return self.run(self.server.generate(request, Partial(request)))

    def publish(self, version: int, broadcast: bool = False, **more: Any) -> Published:
        return self.publish_tensors(checkpoint(MODELS[version]), version, broadcast, **more)

    def publish_tensors(
        self,
        tensors: dict[str, Tensor],
        version: int,
        broadcast: bool = False,
        sent: SentBuckets | None = None,
        **more: Any,
    ) -> Published:
        shapes = shapes_of(self.plan)
        way = {"broadcast": broadcast, "sent": sent, "certificate": self.certificate}
        weights = Weights(tensors.items(), version, shapes, **way)
        options = {"canary": self.canary, "identity": identity_of(self.plan)} | more
        done = publish(self.loop, [self.server], weights, pause="abort", timeout=300, **options)
        done.failed |= done.wait()
        assert done.failed == {}, (done.failed, self.log.read_text()[-3000:])
        return done

    def processes(self) -> list[int]:
        """Everything that runs in the server's process group."""
        group = int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())
        entries = [each for each in Path("/proc").iterdir() if each.name.isdigit()]
        return [int(each.name) for each in entries if os.getpgid(int(each.name)) == group]

    def close(self) -> None:
        self.process.kill()  # then every process of the server ends, one after the other
        self.process.wait()
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    try:
        served.answers()
        yield served
    finally:
        processes = [os.pidfd_open(pid) for pid in served.processes()]
        served.close()
        assert len(processes) >= 3
        for each in processes:
            assert select.select([each], [], [], 60)[0]


def check(answer: Answer, request: Request, version: int) -> None:
    """The answer's log-probs and routes are those of transformers with that version."""
    tokens = torch.tensor((*request.token_ids, *answer.token_ids))
    logits, routes = plain(MODELS[version], tokens)
    start = len(request.token_ids)
    sampling = Sampling(1, temperature=request.temperature)
    logprobs = processed_logprobs(logits[start - 1 : -1], sampling)
    expected = logprobs.gather(1, tokens[start:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)
    assert answer.versions == ((0, len(answer.token_ids), version),)
    assert answer.routes is not None and not answer.routes[:, 0].any()
    for layer in LAYERS:
        found = torch.from_numpy(answer.routes[:, layer].astype("int64")).sort(-1).values
        wanted = routes[layer][request.routes_from : -1].sort(-1).values
        assert torch.equal(found, wanted), layer


def test_generate_equals_transformers_after_each_publish(served: Served):
    sent = SentBuckets()
    for version, broadcast in ((1, False), (2, True), (3, False)):
        done = served.publish(version, broadcast, sent=sent)
        assert done.seen.keys() == {served.address} and done.again == 0
        assert (done.saved > 10 * done.bytes) == (version == 3)
        for size, begin in ((1, 0), (7, 3), (33, 0)):
            context = tuple(range(3, 3 + size))
            request = Request(f"r{size}", context, 4, routes_from=begin, salt=str(version))
            answer = served.generate(request)
            assert answer.finish_reason == "length"
            check(answer, request, version)


def test_guard_serves_what_the_table_says(served: Served):
    place = urlsplit(served.address)
    assert place.hostname is not None and place.port is not None
    wrong = []
    # what a caller may call changes the engine; here it matters that it gets there
    skip = {protocol.PAUSE, protocol.START, protocol.FINISH}
    for path in [*TABLE, *ODD]:
        for caller, key in CALLERS.items():
            if path in skip and expected(path, caller):
                continue
            status = raw_call(place.hostname, place.port, path, key)
            if (status not in (401, 403, 405, 411, 413)) != expected(path, caller):
                wrong.append(f"{path} by {caller}: {status}")
    assert not wrong
    request = Request("after", (3, 4, 5), 2, salt="still 1")
    assert len(served.generate(request).token_ids) == 2


def test_server_of_another_model_is_refused(served: Served):
    other = identity_of(tiny_plan("model.config=tiny_qwen3/config.json", "model.family=qwen3_moe"))
    weights = Weights(checkpoint(MODELS[1]).items(), 9, shapes_of(served.plan))
    stranger = Server(served.address, keys=served.server.keys)  # who never published to it
    done = publish(served.loop, [stranger], weights, pause="abort", timeout=60, identity=other)
    assert "it may not join" in done.failed[served.address]
    ours, others = Run("1", "host:/ours"), Run("2", "host:/others")
    for run, name in ((ours, ""), (others, ours.name), (ours, "")):
        body = {"method": "claim", "args": run}
        assert served.run(stranger.control(protocol.RPC, body))["results"] == [name]
    served.run(release([stranger], ours))
    served.run(stranger.close())
    after = served.generate(Request("old", (3, 4, 5), 2, salt="still 3"))
    assert after.versions == ((0, 2, 3),)


class Unsalted(Server):
    """A client that does not name the weights."""

    async def generate(self, request: Request, part: Partial) -> Answer:
        return await super().generate(replace(request, salt=""), part)


def test_canary_finds_what_a_publish_without_reset_leaves_in_the_cache(served: Served):
    """Noise of 1e-4 on the weights, with salt and reset both taken out."""
    assert served.canary is not None
    first = checkpoint(MODELS[1])
    noise = torch.Generator().manual_seed(0)
    noisy = {n: w + 1e-4 * torch.randn(w.shape, generator=noise) for n, w in first.items()}
    server = Unsalted(served.address, keys=served.server.keys)

    async def without_reset(
        self: ServerUpdate, step: str, path: str, body: Any = None
    ) -> dict[str, Any]:
        if step == "reset":
            return {}
        path = f"{protocol.PAUSE}?mode=keep&clear_cache=false" if step == "pause" else path
        return await call(self, step, path, body)

    call = ServerUpdate._call
    found = list[dict[str, str]]()
    for version, named, patched in (
        (11, first, call),
        (12, noisy, without_reset),
        (13, noisy, call),
    ):
        weights = Weights(named.items(), version, shapes_of(served.plan))
        with patch.object(ServerUpdate, "_call", patched):
            options = {"canary": served.canary, "pause": "abort", "timeout": 300.0}
            done = publish(served.loop, [server], weights, **options)  # type: ignore
            found.append(done.failed | done.wait())
    served.run(server.close())
    assert found[0] == found[2] == {} and found[1].keys() == {served.address}
    assert "canary of version 12: through the cache" in found[1][served.address]


def test_publish_recovers_from_what_another_trainer_left(served: Served):
    """A start that nobody finished; and a finish without weights is refused, which stock backends
    take for new weights."""
    server = served.server
    served.run(server.control(f"{protocol.PAUSE}?mode=abort"))
    served.run(server.control(protocol.START))
    with pytest.raises(ServerFailed, match="a finish without weights"):
        served.run(server.control(protocol.FINISH, {"weight_version": "99"}))
    served.publish(2)
    request = Request("after", tuple(range(3, 20)), 4, salt="2")
    check(served.generate(request), request, 2)


def test_server_over_tls_equals_transformers(tmp_path: Path):
    served = Served(tmp_path, authority=Authority(tmp_path / "ca"))
    try:
        served.answers()
        for version in (1, 2):
            assert served.publish(version).seen.keys() == {served.address}
            request = Request(f"r{version}", tuple(range(3, 36)), 6, salt=str(version))
            check(served.generate(request), request, version)
    finally:
        served.close()


def test_server_that_drafts_equals_transformers(tmp_path: Path):
    """It gets the MTP layer too; a server without it holds other tensors, and is refused."""
    config = with_drafts(tmp_path, hf_of("tiny"))
    tokenizer = f"model.tokenizer={CONFIGS}/tiny"
    model = (f"model.config={config}/config.json", tokenizer, "model.mtp=true")
    served = Served(tmp_path, *model, "rollout.speculation=mtp")
    hf = HFEngine(config)
    try:
        served.answers()
        plain = tiny_plan(f"run={tmp_path}/plain", *model)
        with pytest.raises(AssertionError, match="its tensors is"):
            served.publish_tensors(drafting_weights(hf, config, 1), 1, identity=identity_of(plain))
        for version in (1, 2):
            weights = drafting_weights(hf, config, version)
            hf.load_weights(weights.items(), version)
            served.publish_tensors(weights, version)
            context = tuple(range(3, 36))
            request = Request(f"r{version}", context, 12, salt=str(version))
            answer = served.generate(request)
            tokens = torch.tensor((*context, *answer.token_ids))
            with torch.no_grad():
                logits = hf.model(tokens[None]).logits[0, len(context) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, tokens[len(context) :, None])[:, 0]
            found = torch.tensor(answer.logprobs)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            assert answer.routes is not None
            for layer, chosen in hf.routed.chosen.items():
                own = torch.from_numpy(answer.routes[:, layer].astype("int64"))
                wanted = chosen.view(len(tokens), -1)[:-1]
                assert torch.equal(own.sort(-1).values, wanted.sort(-1).values)
    finally:
        served.close()


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason=NEEDS_AMX)
def test_server_that_quantizes_refuses_a_trainer_without_quantization(tmp_path: Path):
    """And is near the model that it quantizes, through its cache as well (`canary`)."""
    config = wide_enough(tmp_path, "tiny")
    model = (f"model.config={config}/config.json", f"model.tokenizer={CONFIGS}/tiny")
    model = (*model, "rollout.dtype=bfloat16")
    served = Served(tmp_path, *model, "rollout.quantization=fp8")
    hf = HFEngine(config)
    try:
        served.answers()
        plain = tiny_plan(f"run={tmp_path}/plain", *model)
        weights = dict(random_weights(hf, 1))
        with pytest.raises(AssertionError, match="its quantization is 'fp8', expected 'none'"):
            served.publish_tensors(weights, 1, identity=identity_of(plain))
        for version in (1, 2):
            weights = dict(random_weights(hf, version))
            hf.load_weights(weights.items(), version)
            done = served.publish_tensors(weights, version)
            assert len(done.seen) == 1
            context = tuple(range(3, 36))
            answer = served.generate(Request(f"r{version}", context, 12, salt=str(version)))
            tokens = torch.tensor((*context, *answer.token_ids))
            with torch.no_grad():
                logits = hf.model(tokens[None]).logits[0, len(context) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, tokens[len(context) :, None])[:, 0]
            gap = (torch.tensor(answer.logprobs) - expected).abs().median()
            assert 0 < gap < 0.4, gap
    finally:
        served.close()
