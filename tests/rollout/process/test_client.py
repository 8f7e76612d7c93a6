"""An engine in another process: as good as one in this process, and every way that it, its trainer
or a publish may end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.ops.digest import digest
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.parallel.heartbeat import heartbeats
from pyrl_ext.rollout.distribute import RolloutRequest, generate_on_ranks
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.process.client import IdleEngine, ProcessEngine, RemoteError
from pyrl_ext.rollout.process.sender import Kind
from pyrl_ext.samples import Prompt, Sample, Sampling
from pyrl_ext.train.loop import train
from tests.helpers.engines import (
    GLM,
    assert_same,
    checkpoint,
    engine_of,
    prompts_of,
    random_model,
)
from tests.helpers.images import QWEN3_VL, SCALE, prompt_of
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import MEASURED
from tests.helpers.sleeper import Echo, Sleeper
from tests.helpers.tiny import tiny_plan
from tests.helpers.turns import ScriptedFeed, answers, by_turn, first_turns, ragged

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SMALL = 20_000  # bytes of a bucket; one tensor is larger, all are sixty times that
WEIGHTS = list(checkpoint(random_model(GLM)).items())
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


def of_images() -> HFEngine:
    return engine_of(random_model(QWEN3_VL), QWEN3_VL, scale=SCALE)


def test_generate_sees_the_images_of_prompts(tmp_path: Path):
    """Patches go there once, and samples have the images of this process."""
    asked = [prompt_of(3, (2, 2), (4, 6)), prompt_of(4), prompt_of(5, (4, 4))]
    sampling = Sampling(4, samples_per_prompt=2)
    here = of_images().generate(asked, sampling)
    with closing(ProcessEngine(of_images, (), transport="shm", log=tmp_path / "log")) as engine:
        assert engine.capabilities.images
        there = engine.generate(asked, sampling)
        turns = ScriptedFeed(first_turns(asked, 2, 4), ragged(2, 60))
        found = by_turn(answers(engine, turns, sampling))
        assert_same([s for s in found.values() if not s.turn], there)
        there += found.values()
    assert_same(there[:6], here)
    for sample in there:
        (prompt,) = (p for p in asked if p.id == sample.prompt_id)
        assert [*map(id, sample.images)] == [*map(id, prompt.images)]


def test_generate_equals_an_engine_in_this_process(engine: ProcessEngine):
    here = HFEngine(GLM)
    assert engine.capabilities == here.capabilities
    for version in (3, 4):  # again, through memory that was used before
        here.load_weights(WEIGHTS, version)
        loaded(engine, version)
        for sampling in (Sampling(8, samples_per_prompt=3), Sampling(5, greedy=True)):
            assert_same(engine.generate(PROMPTS, sampling), here.generate(PROMPTS, sampling))
        assert engine.checksums() == here.checksums()
        assert [*engine.checksums([NORM])] == [NORM]


def test_load_weights_replaces_only_the_tensors_it_names(engine: ProcessEngine):
    loaded(engine)
    engine.load_weights([(NORM, dict(WEIGHTS)[NORM] * 2)], 4, only={NORM})
    before = digests(WEIGHTS)
    after = engine.checksums()
    assert {name for name in after if after[name] != before[name]} == {NORM}


def test_load_weights_uses_memory_without_a_name(engine: ProcessEngine):
    """So that no crash leaves anything in /dev/shm."""
    loaded(engine)
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert "/dev/shm" not in maps
    assert ("memfd:pyrl_ext (deleted)" in maps) == (engine._sender.kind == "shm")


def test_stream_that_is_closed_early_leaves_a_usable_engine(engine: ProcessEngine):
    loaded(engine)
    sampling = Sampling(6, samples_per_prompt=2)
    whole = engine.generate(PROMPTS, sampling)
    for taken in (1, 9, 10):
        stream = engine.stream(PROMPTS, sampling)
        found = [next(stream) for _ in range(taken)]
        stream.close()
        assert all(isinstance(sample, Sample) for sample in found)
    assert_same(engine.generate(PROMPTS, sampling), whole)


# turns -------------------------------------------------------------------------------------------

TURNS = Sampling(6, 1.3, stop_ids=(*range(20, 28),), seed=5)


def feed_of(turns: int = 3, **more: Any) -> ScriptedFeed:
    return ScriptedFeed(first_turns(PROMPTS, 2, 6), ragged(turns, GLM["vocab_size"]), **more)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int, int], Sample]:
    here = HFEngine(GLM)
    here.load_weights(WEIGHTS, 3)
    return by_turn(answers(here, feed_of(), TURNS))


@pytest.mark.parametrize("more", [{}, {"delay": 0.1}], ids=str)
def test_answer_equals_an_engine_in_this_process(
    engines: dict[str, ProcessEngine], expected: dict[tuple[int, int, int], Sample], more: Any
):
    """Observations come at once, or when the engine has waited for them."""
    feed = feed_of(**more)
    found = by_turn(answers(loaded(engines["shm"]), feed, TURNS))
    assert [*found] == [*expected]
    for key, sample in found.items():
        torch.testing.assert_close(
            sample.rollout_logprobs, expected[key].rollout_logprobs, atol=1e-5, rtol=0
        )
        logprobs = expected[key].rollout_logprobs
        assert_same([dataclasses.replace(sample, rollout_logprobs=logprobs)], [expected[key]])


@pytest.mark.parametrize("replies", [True, False], ids=["running", "waiting"])
@pytest.mark.parametrize("taken", [1, 9, 10])
def test_answer_that_is_closed_early_leaves_a_usable_engine(
    engines: dict[str, ProcessEngine], taken: int, replies: bool
):
    """Also when the engine has answered all ten turns and waits for more."""
    engine = loaded(engines["shm"])
    feed = feed_of()
    stream = engine.answer(feed, TURNS)
    for _ in range(taken):
        sample = next(stream)
        if replies:
            feed.reply(sample)
    stream.close()
    assert len(engine.generate(PROMPTS, Sampling(4))) == len(PROMPTS)


def test_answer_raises_the_errors_of_the_process_and_of_the_feed(
    engines: dict[str, ProcessEngine],
):
    engine = loaded(engines["shm"])

    def script(sample: Sample) -> list[int]:
        if sample.prompt_id == PROMPTS[1].id:
            raise FloatingPointError("the environment is broken")
        return [*sample.tokens.tolist(), 999]

    for prompt, kind, message in (
        (PROMPTS[0], ValueError, r"answer\(turn 1 of sample 0 of prompt 10\): token id 999"),
        (PROMPTS[1], FloatingPointError, "the environment is broken"),
    ):
        with pytest.raises(kind, match=message):
            list(answers(engine, ScriptedFeed(first_turns([prompt], 1, 6), script), TURNS))
        assert len(engine.generate(PROMPTS, Sampling(4))) == len(PROMPTS)


def test_answer_passes_contexts_that_no_pipe_holds(tmp_path: Path):
    """Both ends send at the same time, more than the other reads at once."""
    size = 100_000
    group = 6

    def script(sample: Sample) -> list[int] | None:
        assert sample.tokens[-1] == sample.index
        return None if sample.turn == 3 else sample.tokens.tolist()

    prompt = Prompt(1, tuple(range(size)))
    feed = ScriptedFeed(first_turns([prompt], group, 1), script, max_tokens=2 * size)
    with closing(ProcessEngine(Echo, (), transport="shm", log=tmp_path / "log")) as engine:
        found = by_turn(answers(engine, feed, Sampling(1)))
    assert len(found) == 4 * group
    assert all(s.prompt_len == size + turn for (*_, turn), s in found.items())


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
def test_load_weights_that_fails_blocks_generation_until_a_good_one(
    engine: ProcessEngine, case: str
):
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


def test_generate_raises_the_error_of_the_process(engine: ProcessEngine):
    loaded(engine)
    with pytest.raises(ValueError, match="token id 999, expected 0 to"):
        engine.generate([Prompt(0, (999,))], Sampling(4))
    assert len(engine.generate(PROMPTS, Sampling(4))) == len(PROMPTS)


# processes that die ----------------------------------------------------------------------


def test_generate_names_a_process_that_was_killed(tmp_path: Path):
    engine = ProcessEngine(Sleeper, (), transport="shm", log=tmp_path / "log")
    assert not engine.capabilities.routes
    engine.log.write_text("".join(f"line {i}\n" for i in range(100)))
    threading.Timer(0.2, engine.process.kill).start()
    with pytest.raises(RuntimeError, match=r"answer: .* was ended by SIGKILL") as caught:
        engine.generate(PROMPTS, Sampling(1, seed=9))
    with pytest.raises(RuntimeError, match=r"answer: .* was ended by SIGKILL"):
        list(engine.answer(ScriptedFeed([], lambda _: None), Sampling(1)))
    last = str(caught.value).splitlines()
    assert f"{engine.log} ends with:" in last[0]
    assert last[1:] == [f"  line {i}" for i in range(80, 100)]
    engine.close()


def test_load_weights_names_a_process_that_was_killed(engines: dict[str, ProcessEngine]):
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


# with the trainer --------------------------------------------------------------------------------


def rows_of(transport: str, folder: str) -> list[dict[str, float]]:
    few = ("batching.prompts=4", "batching.samples_per_prompt=4", "rollout.max_new_tokens=6")
    quiet = ("log.progress=false", "evaluate.every=2", "steps=2", "rollout.bucket_bytes=50000")
    options = ("parallel.dp=2", f"rollout.transport={transport}", f"run={folder}/{transport}")
    plan = tiny_plan(*few, *quiet, *options)
    with topology.start(plan) as topo, heartbeats(topo) as heartbeat:
        assert train(plan, topo, heartbeat)
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
        rollout = generate_on_ranks(held, asked, None, group, (None, 0))
        assert (rollout.index.owners == 1).all()
        got = gather_objects(rollout.samples, group)[1]
        ids = {sample.prompt_id for sample in got}
        assert len(ids) == keep
        assert_same(got, [sample for sample in expected if sample.prompt_id in ids])


def test_train_has_the_same_numbers_with_engines_in_processes(tmp_path: Path):
    here, there = run_ranks(trained, 2, str(tmp_path))[0]
    assert len(here) == len(there) == 3
    for a, b in zip(here, there, strict=True):
        timed = {name for name in a if name.startswith(MEASURED)}
        assert {k: v for k, v in a.items() if k not in timed} == {
            k: v for k, v in b.items() if k not in timed
        }
    assert {p.name for p in (tmp_path / "shm").glob("*.log")} == {"engine-0.log", "engine-1.log"}
