"""An engine in a process of its own: as good as one in this process, and every way that it, its
trainer or a publish may end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext import train
from pyrl_ext.dist import topology
from pyrl_ext.dist.heartbeat import heartbeats
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.ops.digest import digest
from pyrl_ext.rollout.distribute import RolloutRequest, generate_on_ranks
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.process import client
from pyrl_ext.rollout.process.channel import Kind
from pyrl_ext.rollout.process.client import IdleEngine, ProcessEngine, RemoteError
from pyrl_ext.rollout.process.sender import Reader, Sender
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.ranks import run_ranks
from tests.helpers.sleeper import Sleeper, unbuildable
from tests.helpers.tiny import tiny_plan
from tests.rollout.test_hf import GLM, build, checkpoint, prompts_of
from tests.rollout.test_recorded import assert_same

ROOT = Path(__file__).parents[2]
SMALL = 20_000  # bytes of a bucket; one tensor is larger, all are sixty times that
WEIGHTS = list(checkpoint(build(GLM)).items())
NORM = "model.layers.1.input_layernorm.weight"
PROMPTS = prompts_of([1, 7, 3, 12, 5], GLM["vocab_size"])


def start(folder: Path, name: str, transport: Kind = "shm") -> ProcessEngine:
    return ProcessEngine(
        HFEngine,
        (GLM,),
        transport=transport,
        bucket_bytes=SMALL,
        log=folder / f"{name}.log",
        environment={"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ProcessEngine]]:
    """One a transport, started side by side."""
    folder = tmp_path_factory.mktemp("served")
    kinds: tuple[Kind, ...] = ("shm", "broadcast")
    started = {kind: start(folder, kind, kind) for kind in kinds}
    yield {**started}
    for engine in started.values():
        engine.close()
        assert engine.process.returncode is not None


@pytest.fixture(params=["shm", "broadcast"])
def engine(request: pytest.FixtureRequest, engines: dict[str, ProcessEngine]) -> ProcessEngine:
    return engines[request.param]


def digests(named: list[tuple[str, Tensor]]) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in named}


def loaded(engine: ProcessEngine, version: int = 3) -> ProcessEngine:
    engine.load_weights(WEIGHTS, version)
    return engine


def test_samples_are_those_of_an_engine_in_this_process(engine: ProcessEngine):
    here = HFEngine(GLM)
    assert engine.capabilities == here.capabilities
    for version in (3, 4):  # again, through memory that was used before
        here.load_weights(WEIGHTS, version)
        loaded(engine, version)
        for sampling in (Sampling(8, samples_per_prompt=3), Sampling(5, greedy=True)):
            assert_same(engine.generate(PROMPTS, sampling), here.generate(PROMPTS, sampling))
        assert engine.checksums() == here.checksums()
        assert [*engine.checksums([NORM])] == [NORM]


def test_some_weights_reach_an_engine_that_keeps_the_others(engine: ProcessEngine):
    loaded(engine)
    engine.load_weights([(NORM, dict(WEIGHTS)[NORM] * 2)], 4, only={NORM})
    before, after = digests(WEIGHTS), engine.checksums()
    assert {name for name in after if after[name] != before[name]} == {NORM}


def test_memory_that_weights_travel_in_has_no_name(engine: ProcessEngine):
    """So that no crash leaves anything in /dev/shm."""
    loaded(engine)
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert "/dev/shm" not in maps
    assert ("memfd:pyrl-weights (deleted)" in maps) == (engine._sender.kind == "shm")


def test_a_stream_that_is_closed_early_leaves_a_usable_engine(engine: ProcessEngine):
    loaded(engine)
    sampling = Sampling(6, samples_per_prompt=2)
    whole = engine.generate(PROMPTS, sampling)
    for taken in (1, 9, 10):
        stream = engine.stream(PROMPTS, sampling)
        found = [next(stream) for _ in range(taken)]
        stream.close()
        assert all(isinstance(sample, Sample) for sample in found)
    assert_same(engine.generate(PROMPTS, sampling), whole)


# publishes that fail -----------------------------------------------------------------------------


def interrupted(after: int) -> Iterator[tuple[str, Tensor]]:
    yield from WEIGHTS[:after]
    raise FloatingPointError("rank 1 holds nan")


def spoilt(name: str, to: Any) -> list[tuple[str, Tensor]]:
    return [(n, to(t)) if n == name else (n, t) for n, t in WEIGHTS]


BAD = {
    "the source fails at once": (lambda: interrupted(0), FloatingPointError, "rank 1 holds nan"),
    "the source fails": (lambda: interrupted(40), FloatingPointError, "rank 1 holds nan"),
    "nan": (lambda: spoilt(NORM, lambda t: t * torch.nan), ValueError, f"{NORM}: holds nan"),
    "shape": (lambda: spoilt(NORM, lambda t: t[:-1]), ValueError, rf"{NORM}: shape \[63\]"),
    "name": (lambda: [*WEIGHTS, ("new", torch.ones(1))], ValueError, "new: unknown name"),
    "missing": (lambda: WEIGHTS[:-1], ValueError, f"{WEIGHTS[-1][0]}: missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_failed_publish_is_refused_until_a_good_one(engine: ProcessEngine, case: str):
    source, kind, message = BAD[case]
    good = loaded(engine).generate(PROMPTS[:2], Sampling(4))
    with pytest.raises(kind, match=message) as caught:
        engine.load_weights(source(), version=8)
    if kind is ValueError:
        assert isinstance(caught.value.__cause__, RemoteError)
        assert f"pid {engine.process.pid}" in str(caught.value.__cause__)
        assert "in fill" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="loading version 8 failed and left the weights incomp"):
        engine.generate(PROMPTS[:2], Sampling(4))
    assert_same(loaded(engine).generate(PROMPTS[:2], Sampling(4)), good)


def test_an_error_of_generation_comes_here(engine: ProcessEngine):
    loaded(engine)
    with pytest.raises(ValueError, match="token id 999, expected 0 to"):
        engine.generate([Prompt(0, (999,))], Sampling(4))
    assert len(engine.generate(PROMPTS, Sampling(4))) == len(PROMPTS)


# processes that hang or die ----------------------------------------------------------------------


def test_one_that_hangs_is_told_from_one_that_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "SILENT", 2)
    engine = ProcessEngine(Sleeper, (), transport="shm", log=tmp_path / "log")
    assert engine.generate([], Sampling(1, seed=3)) == []  # longer than the patience
    engine.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="sent no heartbeat for 2 s"):
        engine.generate([], Sampling(1))
    engine.process.send_signal(signal.SIGCONT)
    assert engine.generate([], Sampling(1)) == []
    engine.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="sent no heartbeat for 2 s"):
        engine.generate([], Sampling(1))
    engine.close()
    assert engine.process.returncode == -signal.SIGKILL


def test_one_that_is_killed_while_it_generates_is_named(tmp_path: Path):
    engine = ProcessEngine(Sleeper, (), transport="shm", log=tmp_path / "log")
    assert not engine.capabilities.routes
    engine.log.write_text("".join(f"line {i}\n" for i in range(100)))
    threading.Timer(0.2, engine.process.kill).start()
    with pytest.raises(RuntimeError, match=r"stream: .* was ended by SIGKILL") as caught:
        engine.generate(PROMPTS, Sampling(1, seed=9))
    last = str(caught.value).splitlines()
    assert f"{engine.log} ends with:" in last[0]
    assert last[1:] == [f"  line {i}" for i in range(80, 100)]
    engine.close()


def test_one_that_is_killed_during_a_publish_is_named(engines: dict[str, ProcessEngine]):
    """The last test of this engine."""
    engine = loaded(engines["broadcast"])

    def deadly() -> Iterator[tuple[str, Tensor]]:
        yield from WEIGHTS[:40]
        engine.process.kill()
        yield from WEIGHTS[40:]

    with pytest.raises(RuntimeError, match=r"load_weights\(version 9\): .* was ended by SIGKILL"):
        engine.load_weights(deadly(), version=9)
    with pytest.raises(RuntimeError, match="was ended by SIGKILL"):
        engine.generate(PROMPTS, Sampling(4))


PARENT = """
import sys, time
from pyrl_ext.rollout.process.client import ProcessEngine
from pyrl_ext.rollout.process.server import BEATS

engine = ProcessEngine(time.sleep, (60,), transport="shm", log=sys.argv[1])
while BEATS.unpack_from(engine._beats) == (0,):
    time.sleep(0.01)
print(engine.process.pid, flush=True)
time.sleep(60)
"""


def test_a_trainer_that_is_killed_takes_its_engine_along(tmp_path: Path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert trainer.stdout is not None
    child = os.pidfd_open(int(trainer.stdout.readline()))
    assert wait([child], timeout=0.2) == []
    trainer.kill()
    assert wait([child], timeout=2) == [child]
    os.close(child)
    trainer.communicate()


def test_an_engine_that_cannot_be_built_says_why(tmp_path: Path):
    engine = ProcessEngine(unbuildable, ("no such model",), transport="shm", log=tmp_path / "log")
    with pytest.raises(RuntimeError, match="ImportError: no such model"):
        _ = engine.capabilities
    engine.close()


# the transport by itself -------------------------------------------------------------------------


def tensors(seed: int) -> list[tuple[str, Tensor]]:
    """Of all kinds and sizes."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for i in range(60):
        shape = torch.randint(0, 12, (int(torch.randint(0, 4, (), generator=g)),), generator=g)
        value = torch.randn(shape.tolist(), generator=g)
        dtype = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8)[i % 5]
        value = (value * 50).to(dtype)
        found.append((f"tensor {i}", value.transpose(0, -1) if value.dim() else value))
    return [*found, ("large", torch.randn(2000, generator=g)), found[0]]


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("size", [1, 500, 1 << 20])
@pytest.mark.parametrize("kind", ["shm", "broadcast"])
def test_every_reader_gets_every_tensor(kind: Kind, size: int, readers: int):
    sender = Sender(kind, size, readers)
    got: list[list[tuple[str, Tensor]]] = [[] for _ in range(readers)]
    there: dict[int, Reader] = {}  # a process has one; here they are threads

    def read(i: int) -> None:
        reader = there[i] = there.get(i) or Reader(sender.incoming.address)
        got[i] = []
        for name, tensor in reader.tensors():
            time.sleep(5e-4 * i)  # its bucket must not be filled again meanwhile
            got[i].append((name, tensor.clone()))

    for seed in range(3):
        _ = sender.incoming
        threads = [threading.Thread(target=read, args=(i,)) for i in range(readers)]
        for thread in threads:
            thread.start()
        sent = tensors(seed)
        sender.send(iter(sent), wait)
        for thread in threads:
            thread.join()
        for mine in got:
            assert [name for name, _ in mine] == [name for name, _ in sent]
            for (_, a), (_, b) in zip(mine, sent, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
        assert sender._channel is not None
        largest = max(size, *(t.nbytes for _, t in sent))
        assert len(sender._channel.buffers) <= 2
        assert all(len(bucket) <= largest for bucket in sender._channel.buffers.values())
    sender.drop()


# with the trainer --------------------------------------------------------------------------------


def rows_of(transport: str, folder: str) -> list[dict[str, float]]:
    few = ("batching.prompts=4", "batching.samples_per_prompt=4", "rollout.max_new_tokens=6")
    quiet = ("log.progress=false", "evaluate.every=2", "steps=2", "rollout.bucket_bytes=50000")
    options = ("parallel.dp=2", f"rollout.transport={transport}", f"run={folder}/{transport}")
    plan = tiny_plan(*few, *quiet, *options)
    with topology.start(plan) as topo, heartbeats(topo) as heartbeat:
        assert train.train(plan, topo, heartbeat)
    return read_rows(Path(plan.run) / "metrics.jsonl")


def trained(group: Any, folder: str) -> list[list[dict[str, float]]]:
    shares_of_ranks_without_an_engine(group)
    return [rows_of(transport, folder) for transport in ("inprocess", "shm")]


def shares_of_ranks_without_an_engine(group: Any) -> None:
    engine = HFEngine(GLM)
    engine.load_weights(WEIGHTS, 3)
    sampling = Sampling(4, samples_per_prompt=2)
    expected = engine.generate(PROMPTS, sampling)
    held = IdleEngine(routes=True) if group.rank() == 0 else engine
    held.load_weights(iter(WEIGHTS), 3)
    for keep in (5, 3):
        asked = RolloutRequest(PROMPTS, sampling, keep)
        got, _ = generate_on_ranks(held, asked, None, group, (None, 0))
        ids = {sample.prompt_id for sample in got}
        assert len(ids) == keep
        assert_same(got, [sample for sample in expected if sample.prompt_id in ids])


def test_a_run_has_the_numbers_of_one_with_engines_in_process(tmp_path: Path):
    here, there = run_ranks(trained, 2, str(tmp_path))[0]
    assert len(here) == len(there) == 3
    for a, b in zip(here, there, strict=True):
        timed = {"tokens_per_s", *(name for name in a if name.startswith("time/"))}
        assert {k: v for k, v in a.items() if k not in timed} == {
            k: v for k, v in b.items() if k not in timed
        }
    assert {p.name for p in (tmp_path / "shm").glob("*.log")} == {"engine-0.log", "engine-1.log"}
