"""Weights for several servers at once: each has them, proved, or is out; faults by name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.engine import ScoreCanaries
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.canary import prove
from pyrl_ext.rollout.remote.changes import SentBuckets
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.embedded import EmbeddedServer
from pyrl_ext.rollout.remote.holder import Run
from pyrl_ext.rollout.remote.identity import (
    Identity,
    difference,
    make_identity,
)
from pyrl_ext.rollout.remote.protocol import RPC, Partial, Request
from pyrl_ext.rollout.remote.weight_sync import Published, release
from pyrl_ext.samples import Sample
from tests.helpers.deadline import DEADLINE, until
from tests.helpers.engines import GLM, checkpoint, plain, random_model
from tests.helpers.publishing import CANARY, REQUEST, Trainer
from tests.helpers.servers import Client, running
from tests.helpers.wrong_routes import NoSuchExpert, StaleRoutes, server_of

pytestmark = pytest.mark.multiprocess

MODELS = random_model(GLM), random_model(GLM, seed=1)
FIRST, SECOND = map(checkpoint, MODELS)


def noisy(weights: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {n: w + size * torch.randn(w.shape, generator=g) for n, w in weights.items()}


Kind = Callable[[HFEngine, int], EmbeddedServer]


class Bench(Trainer):
    """Servers of embedded engines without weights, in this process, and their trainer.

    Args:
        kinds: of the servers
    """

    def __init__(self, stack: ExitStack, *kinds: Kind):
        self.clients: list[Client] = []
        for kind in kinds:
            engine = HFEngine(GLM, max_num_seqs=16)
            self.clients.append(stack.enter_context(running(engine, 500, kind)))
        super().__init__(stack, [client.url for client in self.clients])

    def paused(self, number: int) -> bool:
        return self.clients[number].server.worker.state == "paused"

    def engine(self, number: int) -> HFEngine:
        return self.clients[number].server.engine


@contextmanager
def bench(*kinds: Kind) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, *kinds)


def digests(engine: HFEngine) -> dict[str, int]:
    return engine.checksums(None)


def test_publish_gives_every_server_the_weights_and_proves_it():
    with bench(EmbeddedServer, EmbeddedServer) as both:
        for server in both.servers:
            with pytest.raises(ServerFailed, match="no complete weights"):
                both.generate(server)
        for version, weights in ((1, FIRST), (2, SECOND), (3, noisy(SECOND, 1e-4))):
            done = both.publish(weights, version)
            assert done.failed == {}
            assert done.seen.keys() == {server.address for server in both.servers}
            expected = HFEngine(GLM)
            expected.load_weights(weights.items(), version)
            for number, server in enumerate(both.servers):
                assert digests(both.engine(number)) == digests(expected)
                answer = both.generate(server, replace(REQUEST, salt=str(version)))
                assert answer.versions == ((0, 4, version),)
            through = [*done.seen.values()]
            assert through[0].token_ids == through[1].token_ids
            assert done.bytes > sum(w.nbytes for w in weights.values())
            assert {"pause", "start", "transfer", "finish", "reset", "resume", "canary"} == {
                *done.seconds
            }


def test_publish_takes_no_server_from_another_run(tmp_path: Path):
    """Until it ends; the run itself comes back, also from another process."""
    ours, others = (Run.of(tmp_path / name) for name in ("ours", "others"))
    with bench(EmbeddedServer) as one:
        assert one.publish(FIRST, 1, run=ours).failed == {}
        done = one.publish(SECOND, 1, run=others)
        (reason,) = done.failed.values()
        assert f"it serves another run, {ours.name}, expected none. End that run" in reason
        assert not one.paused(0)  # it still generates for the first run
        assert one.generate(one.servers[0]).versions == ((0, 4, 1),)
        one.run(release(one.servers, others))  # which does not have it
        assert one.publish(SECOND, 1, run=others).failed.keys() == done.failed.keys()
        assert one.publish(SECOND, 2, run=ours._replace(name="resumed elsewhere")).failed == {}
        one.run(release(one.servers, ours))
        assert one.publish(FIRST, 1, run=others).failed == {}
        with pytest.raises(ServerFailed, match=r"400 .*claim\.args\.0"):
            body = {"method": "claim", "args": ["a" * 1001, ""]}
            one.run(one.servers[0].control(RPC, body))


def test_Run_is_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    alone = Run.of("run")
    (tmp_path / "run").mkdir()
    run = Run.of("run")
    assert run == Run.of(tmp_path / "run") and run.name == f"{socket.gethostname()}:{tmp_path}/run"
    (tmp_path / "run").rename("before")
    (tmp_path / "run").mkdir()  # as on another machine: the same path, another folder
    assert len({alone.id, run.id, Run.of("run").id, Run.of(tmp_path).id}) == 4


@pytest.mark.parametrize("pause", ["finish", "keep", "abort"])
def test_publish_pauses_what_runs(pause: str):
    """With requests under way in each of the ways; they end with spans of both versions."""
    with bench(EmbeddedServer) as one:
        one.publish(FIRST, 1)
        requests = [
            Request(f"r{i}", tuple(range(3, 9)), 200, random_stream=(0, i, 0)) for i in range(4)
        ]
        parts = [Partial(request) for request in requests]
        running = [
            asyncio.run_coroutine_threadsafe(one.servers[0].generate(request, part), one.loop)
            for request, part in zip(requests, parts, strict=True)
        ]
        until(lambda: all(len(part.token_ids) > 3 for part in parts))
        done = one.publish(SECOND, 2, pause=pause)
        assert done.failed == {}
        answers = [each.result(DEADLINE) for each in running]
        ends = {answer.finish_reason for answer in answers}
        versions = {v for answer in answers for _, _, v in answer.versions}
        assert ends == ({"abort"} if pause == "abort" else {"length"})
        assert versions == ({1, 2} if pause == "keep" else {1})


def score_of(model: Any) -> ScoreCanaries:
    """The scores of a trainer that holds ``model``, by a plain forward of transformers."""

    def score(samples: Sequence[Sample]) -> list[tuple[float, Mapping[int, float]]]:
        found: list[tuple[float, Mapping[int, float]]] = []
        for sample in samples:
            logits, routes = plain(model, sample.tokens)
            start = sample.prompt_len
            apart = dict[int, float]()
            chosen = sample.tokens[start:, None]
            own = logits[start - 1 : -1].log_softmax(-1).gather(1, chosen)[:, 0]
            assert sample.routes is not None
            for slot, layer in enumerate(sample.layer_ids):
                mine = routes[layer][:-1]
                its = sample.routes[:-1, slot].long()
                apart[layer] = 1 - float((mine[:, :, None] == its[:, None]).float().mean()) * 2
            found.append((float((own - sample.rollout_logprobs[start:]).abs().mean()), apart))
        return found

    return score


def test_prove_finds_old_routes_beside_right_keys_and_values():
    with bench(EmbeddedServer, server_of(StaleRoutes), EmbeddedServer) as three:
        for version, weights, model in ((1, FIRST, MODELS[0]), (2, SECOND, MODELS[1])):
            done = three.publish(weights, version)
            assert done.failed == {}  # a server's answers agree with each other
            failed = prove(CANARY, done.seen, version, score_of(model))
            if version == 1:
                assert failed == {}
        stale = three.servers[1].address
        assert failed.keys() == {stale} and len(CANARY.groups(done.seen)) == 2
        assert "canary of version 2" in failed[stale] and "of layer 1 differ" in failed[stale]
        noise = random_model(GLM)
        noise.load_state_dict(noisy(MODELS[1].state_dict(), 1e-4))
        failed = prove(CANARY, done.seen, 2, score_of(noise))
        assert failed.keys() == {server.address for server in three.servers}
        assert "log-probs differ from the trainer's" in failed[three.servers[0].address]


def test_publish_takes_out_who_answers_the_canary_with_nonsense():
    with bench(EmbeddedServer, server_of(NoSuchExpert)) as two:
        done = two.publish(FIRST, 1)
        lies = two.servers[1].address
        assert done.failed.keys() == {lies} and done.seen.keys() == {two.servers[0].address}
        assert "canary with experts 200 to 200, expected 0 to 7" in done.failed[lies]


def identity(**changes: Any) -> Identity:
    given = {"config": GLM, "shapes": HFEngine(GLM).shapes(), "dtype": "float32", "tokenizer": None}
    return make_identity(**(given | changes))


def of_other(**changes: Any) -> Kind:
    """A server that says so of itself."""
    return lambda engine, most: EmbeddedServer(engine, most, identity(**changes))


def test_publish_lets_nobody_join_who_serves_something_else(tmp_path: Path):
    """Another model, dtype, tokenizer, scale of adapters, quantization, or tensors; and who is
    refused keeps what it has."""
    shapes = HFEngine(GLM).shapes()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
    tokenizer = {"tokenizer": tmp_path / "a"}
    wrong = {
        "model": {"config": GLM | {"rms_norm_eps": 1e-5}},
        "dtype": {"dtype": "bfloat16"},
        "tokenizer": {"tokenizer": tmp_path / "b"},
        "tensors": {"shapes": dict(list(shapes.items())[1:])},
        "alpha": {"lora": Lora(rank=8, alpha=16)},
        "quantization": {"quantization": "fp8"},
    }
    kinds = [of_other(**(tokenizer | change)) for change in ({}, *wrong.values())]
    with bench(*kinds) as seven:
        done = seven.publish(FIRST, 1, identity=identity(**tokenizer))
        good, *others = seven.servers
        assert done.failed.keys() == {other.address for other in others}
        for other, name in zip(others, wrong, strict=True):
            assert f"its {name} is" in done.failed[other.address]
        assert done.seen.keys() == {good.address}
        assert all(seven.engine(number).version is None for number in range(1, 7))
        assert not any(map(seven.paused, range(1, 7)))  # they may be other trainers'
        seven.clients[0].server.identity = identity(**tokenizer | wrong["model"])
        done = seven.publish(
            SECOND, 2, [good], identity=identity(**tokenizer)
        )  # another came there
        assert "its model is" in done.failed[good.address] and seven.engine(0).version == 1
        same_notes = {**GLM, "transformers_version": "5", "use_cache": False}
        assert identity(config=same_notes) == identity()
        assert difference(identity(), identity(**tokenizer)) is None  # it has none itself


def test_publish_leaves_a_server_that_fails_paused_with_its_old_weights():
    """Its transfer fails, or it is asked for what it cannot do; others get theirs."""
    with bench(EmbeddedServer, EmbeddedServer) as both:
        both.publish(FIRST, 1)
        before = digests(both.engine(1))
        both.clients[1].server.staged.wanted.pop("lm_head.weight")
        done = both.publish(SECOND, 2)
        bad = both.servers[1]
        assert done.failed.keys() == {bad.address}
        assert (
            "'lm_head.weight', expected a tensor that the engine holds" in done.failed[bad.address]
        )
        assert both.paused(1) and both.engine(1).version == 1
        assert digests(both.engine(1)) == before != digests(both.engine(0))
        both.clients[1].server.staged.wanted["lm_head.weight"] = (128, 64)
        assert both.publish(SECOND, 3).failed == {}  # it joins again
        assert digests(both.engine(1)) == digests(both.engine(0)) and not both.paused(1)


def test_publish_by_broadcast_sends_every_byte_once():
    """A server that fails among others costs only itself: those that miss them are sent the weights
    a second time."""
    with bench(EmbeddedServer, EmbeddedServer, EmbeddedServer) as three:
        done = three.publish(FIRST, 1, broadcast=True)
        size = sum(w.nbytes for w in FIRST.values())
        assert done.failed == {} and done.again == 0 and size < done.bytes < 1.2 * size
        expected = digests(three.engine(0))
        assert digests(three.engine(1)) == digests(three.engine(2)) == expected
        three.clients[1].server.staged.wanted.pop("lm_head.weight")
        done = three.publish(SECOND, 2, broadcast=True)
        first, bad, last = three.servers
        assert done.failed.keys() == {bad.address} and done.again in {2, 3}
        assert "'lm_head.weight', expected a tensor" in done.failed[bad.address]
        assert done.seen.keys() == {first.address, last.address}
        assert digests(three.engine(0)) == digests(three.engine(2)) != expected
        assert digests(three.engine(1)) == expected and three.paused(1)


@pytest.mark.parametrize("broadcast", [False, True])
def test_publish_of_changes_gives_every_server_the_same_weights(broadcast: bool):
    """All bytes are sent first, when a server joins, after a failure, and to one that missed what
    the others got."""
    how = {"sent": SentBuckets(), "broadcast": broadcast, "canary": None}
    whole = sum(w.nbytes for w in FIRST.values())
    to = 1 if broadcast else 2
    current = {name: weight.clone() for name, weight in FIRST.items()}
    with bench(EmbeddedServer, EmbeddedServer) as both:
        good, other = both.servers

        def publish(version: int, servers: Sequence[Server] | None = None) -> Published:
            for weight in current.values():
                weight.view(-1)[version::200] += version  # a half percent
            done = both.publish(current, version, servers, **how)
            expected = HFEngine(GLM)
            expected.load_weights(current.items(), version)
            for number, server in enumerate(both.servers):
                if server.address not in done.failed and server in (servers or both.servers):
                    assert digests(both.engine(number)) == digests(expected)
            return done

        assert (done := publish(1)).failed == {} and done.saved == 0 and done.bytes > to * whole
        for version in (2, 3):
            done = publish(version)
            assert done.failed == {} and done.bytes < 0.2 * to * whole
            assert done.bytes + done.saved > to * whole
        assert publish(4, [good]).bytes < 0.2 * whole
        done = publish(5)  # the other has the bytes of version 3
        assert done.failed == {} and done.saved == 0 and done.bytes > to * whole
        assert publish(6).saved > 0

        staged = both.clients[1].server.staged
        staged.wanted.pop("lm_head.weight")
        done = publish(7)
        assert done.failed.keys() == {other.address}
        assert both.engine(1).version == 6 and both.engine(0).version == 7
        staged.wanted["lm_head.weight"] = (128, 64)
        done = publish(8)
        assert done.failed == {} and done.saved == 0
        assert publish(9).saved > 0

        held = next(iter(both.clients[0].server.staged._buckets.values()))
        held[100] ^= 1  # memory that changed by itself
        done = publish(10)
        assert done.failed == {}  # everything is sent to whoever misses something
        assert done.again == (2 if broadcast else 1)
        assert (done := publish(11)).failed == {} and done.saved > 0
        run = Run("1", "run")
        both.run(both.servers[0].control(RPC, {"method": "claim", "args": run}))
        both.run(release(both.servers[:1], Run("2", "another")))
        assert both.clients[0].server.staged.kept
        both.run(release(both.servers[:1], run))
        assert not both.clients[0].server.staged.kept
        assert (done := publish(12)).failed == {} and done.saved == 0
        with pytest.raises(RuntimeError, match="were not sent"):
            both.publish({n: w for n, w in current.items() if n != "lm_head.weight"}, 13, **how)
        assert (done := publish(13)).failed == {} and done.saved == 0
        assert both.publish(current, 14, **how | {"sent": None}).failed == {}
        assert not any(client.server.staged._buckets for client in both.clients)


def test_publish_of_a_part_replaces_the_version_before_alone():
    """A server that missed the publish before keeps what it has until it gets all tensors."""
    part = {n: w + 1 for n, w in FIRST.items() if ".layers.1." in n}
    with bench(EmbeddedServer, EmbeddedServer) as both:
        good, behind = both.servers
        both.publish(FIRST, 1)
        both.publish(SECOND, 2, [good])
        before = digests(both.engine(1))
        done = both.publish(part, 3, only=set(part), base=2, canary=None)
        assert done.failed == {
            behind.address: f"{behind.address}: it has weights of version 1, expected 2, of which "
            "a part is replaced; it needs all of them first"
        }
        assert both.engine(0).version == 3 and both.engine(1).version == 1
        assert digests(both.engine(1)) == before and both.paused(1)
        now = digests(both.engine(0))
        both.publish(SECOND, 4)
        assert {n for n, d in digests(both.engine(0)).items() if d != now[n]} == part.keys()
        assert digests(both.engine(0)) == digests(both.engine(1))


def test_publish_raises_what_the_trainer_does_and_leaves_old_weights():
    def broken() -> Iterator[tuple[str, Tensor]]:
        for number, each in enumerate(SECOND.items()):
            if number == 60:
                raise FloatingPointError("no more")
            yield each

    with bench(EmbeddedServer) as one:
        one.publish(FIRST, 1)
        before = digests(one.engine(0))
        with pytest.raises(FloatingPointError):
            one.publish(broken(), 2)
        with pytest.raises(RuntimeError, match=r"1 of 129 tensors .* \['lm_head.weight'\]"):
            one.publish({n: w for n, w in SECOND.items() if n != "lm_head.weight"}, 2)
        assert one.paused(0) and one.engine(0).version == 1
        assert digests(one.engine(0)) == before
        assert one.publish(SECOND, 2).failed == {}
