"""Stored rollout batches: round trip, damage, and playing them back; rollouts over ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
import zlib
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from pyrl_ext import train
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.rollout.distribute import RolloutRequest, generate_on_ranks
from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.rollout.recorded import RecordedEngine, Recorder, load_samples, save_samples
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG


def sample(prompt: int, index: int, size: int, experts: int | None = 8, version: int = 2) -> Sample:
    generator = torch.Generator().manual_seed(1000 * prompt + index)
    places = torch.arange(size)
    routes = None
    if experts is not None:
        drawn = torch.randint(0, experts, (size, 3, 2), generator=generator)
        routes = drawn.to(torch.uint8 if experts <= 256 else torch.uint16)
    return Sample(
        prompt_id=prompt,
        index=index,
        tokens=torch.cat(
            [
                torch.tensor([prompt + 40, 9]),
                torch.randint(0, 128, (size - 2,), generator=generator),
            ]
        ),
        prompt_len=2,
        loss_mask=places >= 2,
        rollout_logprobs=torch.where(places >= 2, -torch.rand(size, generator=generator), 0.0),
        routes=routes,
        layer_ids=() if routes is None else (1, 2, 3),
        route_mask=places < (size - 1 if routes is not None else 0),
        weight_version=version,
        finish_reason="stop" if index else "length",
        reward=0.25 * index if index else math.nan,
    )


def batch(experts: int | None = 8, version: int = 2) -> list[Sample]:
    return [sample(p, i, 4 + 2 * p + i, experts, version) for p in range(3) for i in range(2)]


def prompts_of(samples: list[Sample]) -> list[Prompt]:
    found = {s.prompt_id: tuple(s.tokens[: s.prompt_len].tolist()) for s in samples if not s.index}
    return [Prompt(number, tokens) for number, tokens in found.items()]


def assert_same(got: list[Sample], expected: list[Sample]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        for field in dataclasses.fields(Sample):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(y, torch.Tensor):
                assert x.dtype == y.dtype and torch.equal(x, y), field.name
            else:
                assert x == y or (x != x and y != y), field.name


@pytest.mark.parametrize("experts", [8, 300, None])
def test_round_trip(tmp_path: Path, experts: int | None):
    path = tmp_path / "new" / "batch.safetensors"
    save_samples(path, batch(experts))
    assert_same(load_samples(path), batch(experts))
    assert [p.name for p in path.parent.iterdir()] == ["batch.safetensors"]


def test_replaces_a_file_whole(tmp_path: Path):
    path = tmp_path / "batch.safetensors"
    save_samples(path, batch(version=1))
    broken = [*batch(), dataclasses.replace(sample(9, 0, 5), prompt_len=0)]
    with pytest.raises(ValueError, match=r"prompt 9, sample 0\): prompt_len 0"):
        save_samples(path, broken)
    assert load_samples(path)[0].weight_version == 1
    save_samples(path, batch(version=2))
    assert load_samples(path)[0].weight_version == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_bad_batches(tmp_path: Path):
    with pytest.raises(ValueError, match="0 samples"):
        save_samples(tmp_path / "a", [])
    with pytest.raises(ValueError, match="prompt 1, sample 0 has routes of layers"):
        save_samples(tmp_path / "a", [sample(0, 0, 5), sample(1, 0, 5, None)])


def test_every_changed_byte_is_noticed(tmp_path: Path):
    path = tmp_path / "batch.safetensors"
    save_samples(path, batch())
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    named = set()
    for place in range(data, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="differs from its checksum") as caught:
            load_samples(path)
        named.add(str(caught.value).split(": ")[1].split(" (")[0])
    assert named == {f"prompt {s.prompt_id}, sample {s.index}" for s in batch()}


def test_load_samples_notices_every_changed_bit_of_the_header(tmp_path: Path):
    """Names, types, shapes and places of tensors, metadata, the checksum itself, its length."""
    path = tmp_path / "batch.safetensors"
    save_samples(path, batch())
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    for place in range(data):
        for bit in (place % 8, (place + 4) % 8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(ValueError, match="expected one written by save_samples"):
                load_samples(path)
    with pytest.raises(ValueError, match="expected one written by save_samples"):
        RecordedEngine(path)


def as_format_1(path: Path) -> None:
    """Rewrite a file as the first format had it: with a checksum of the index alone."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    index = metadata["index"]
    old = {"format": "pyrl_ext rollout 1", "index": index}
    save_file(tensors, path, metadata=old | {"index_crc32": str(zlib.crc32(index.encode()))})


def test_load_samples_reads_the_first_format(tmp_path: Path):
    path = tmp_path / "batch.safetensors"
    save_samples(path, batch())
    as_format_1(path)
    assert_same(load_samples(path), batch())
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    for place in range(data):  # a header without a checksum is an error of its file all the same
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with contextlib.suppress(ValueError):
            assert_same(load_samples(path), batch())


def test_every_cut_is_noticed(tmp_path: Path):
    path = tmp_path / "batch.safetensors"
    save_samples(path, batch())
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        message = "header" if size < data else r"prompt \d, sample \d is the first one incomplete"
        with pytest.raises(ValueError, match=message):
            load_samples(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="prompt 2, sample 1 is the first one incomplete"):
        load_samples(path)


def test_not_a_batch(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="not a file"):
        load_samples(path)
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="unreadable header"):
        load_samples(path)


def test_engine_finds_a_batch_by_version_and_prompts(tmp_path: Path):
    for version in (0, 1):
        save_samples(tmp_path / f"{version}.safetensors", batch(version=version))
    other = [dataclasses.replace(s, prompt_id=-1 - s.prompt_id) for s in batch(version=1)]
    save_samples(tmp_path / "eval.safetensors", other)
    engine = RecordedEngine(tmp_path)
    assert engine.capabilities == Capabilities(routes=True, weights=False)
    sampling = Sampling(4, samples_per_prompt=2)
    with pytest.raises(RuntimeError, match="no weight version"):
        engine.generate(prompts_of(batch()), sampling)
    for version in (1, 0, 1):
        engine.load_weights([], version)
        assert_same(engine.generate(prompts_of(batch()), sampling), batch(version=version))
    assert_same(engine.generate(prompts_of(other), sampling), other)
    some = [prompts_of(batch())[i] for i in (2, 0)]  # a rank's share, in its own order
    chosen = [s for p in some for s in batch(version=1) if s.prompt_id == p.id]
    assert_same(engine.generate(some, sampling), chosen)
    engine.load_weights([], 7)
    with pytest.raises(ValueError, match=r"version 7 for prompts 0, 1, 2, .* versions are 0, 1"):
        engine.generate(prompts_of(batch()), sampling)


def test_engine_refuses_other_prompts_and_groups(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_samples(path, batch())
    engine = RecordedEngine(path)
    engine.load_weights([], 2)
    prompts = prompts_of(batch())
    with pytest.raises(ValueError, match="prompt 0 has samples 0, 1, expected 0 to 2"):
        engine.generate(prompts, Sampling(4, samples_per_prompt=3))
    prompts[1] = dataclasses.replace(prompts[1], tokens=(1, 2))
    with pytest.raises(ValueError, match=r"prompt 1, sample 0 was recorded for .*, expected 1, 2"):
        engine.generate(prompts, Sampling(4, samples_per_prompt=2))


def test_engine_without_batches(tmp_path: Path):
    with pytest.raises(ValueError, match="expected recorded rollout batches"):
        RecordedEngine(tmp_path)
    save_samples(tmp_path / "a.safetensors", batch())
    save_samples(tmp_path / "b.safetensors", batch())
    with pytest.raises(
        ValueError, match=r"prompt 0 of weight version 2 is also in .*, expected each once"
    ):
        RecordedEngine(tmp_path)


class Seeded(Engine):
    """An engine of its own kind: samples are a function of prompt and index, one rank may fail.

    Sample i of prompt p comes at the time p * step % 11 + 4 * i. `open` counts streams that are not
    closed, `given` the samples of the last one.
    """

    def __init__(self, fails: bool = False, step: int = 0):
        self.fails, self.step = fails, step
        self.asked = self.open = self.given = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(routes=True)

    def load_weights(self, named: Any, version: int, only: Any = None) -> None: ...

    def checksums(self, names: Any) -> dict[str, int]:
        return {}

    def stream(self, prompts: Any, sampling: Sampling) -> Generator[Sample, None, None]:
        self.asked, self.given = len(prompts), 0
        if self.fails:
            raise ValueError("out of paper")
        group = range(sampling.samples_per_prompt)
        jobs = [(p.id * self.step % 11 + 4 * i, p.id, i) for p in prompts for i in group]
        self.open += 1
        try:
            for _, prompt, index in sorted(jobs):
                self.given += 1
                yield sample(prompt, index, 5 + prompt % 3)
        finally:
            self.open -= 1

    def sleep(self) -> int:
        return 0

    def close(self) -> None: ...


def scored(samples: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(s, reward=float(s.prompt_id)) for s in samples]


PAIRS = Sampling(4, samples_per_prompt=2)


def expected(*ids: int) -> list[Sample]:
    return scored([sample(i, j, 5 + i % 3) for i in ids for j in range(2)])


def asked(
    ids: Sequence[int], keep: int | None = None, sampling: Sampling = PAIRS
) -> RolloutRequest:
    return RolloutRequest(
        [Prompt(i, (1,)) for i in ids], sampling, len(ids) if keep is None else keep
    )


def test_one_process():
    lines: list[str] = []
    got, lost = generate_on_ranks(Seeded(step=5), asked(range(5)), scored, show=lines.append)
    assert_same(got, expected(*range(5)))
    assert lost == 0 and len(lines) == 10
    assert lines[-1].startswith("rollout: 10 samples, 5 of 5 groups, ")
    with pytest.raises(ValueError, match="out of paper"):
        generate_on_ranks(Seeded(True), asked(range(5)))


@pytest.mark.parametrize("keep", [1, 2, 4, 7])
def test_the_groups_that_are_complete_first_are_kept(keep: int):
    """Groups finish in the order of their places, which here is that of id * 5 modulo 11."""
    ids = range(7)
    order = sorted(ids, key=lambda i: (i * 5 % 11, i))
    engine, judged = Seeded(step=5), []

    def judge(group: list[Sample]) -> list[Sample]:
        judged.append([(s.prompt_id, s.index) for s in group])
        return scored(group)

    got, lost = generate_on_ranks(engine, asked(ids, keep), judge)
    assert_same(got, expected(*sorted(order[:keep])))
    assert judged == [[(i, 0), (i, 1)] for i in order[:keep]]
    kept = sum(len(s.tokens) - s.prompt_len for s in got)
    whole = list(islice(Seeded(step=5).stream(asked(ids).prompts, PAIRS), engine.given))
    assert lost == sum(len(s.tokens) - s.prompt_len for s in whole) - kept
    assert engine.open == 0 and (engine.given < 14 or keep == 7)


def test_a_reward_that_fails_ends_the_stream():
    engine = Seeded(step=5)
    with pytest.raises(ZeroDivisionError):
        generate_on_ranks(engine, asked(range(5)), judge_fails)
    assert engine.open == 0 and engine.given == 2


def judge_fails(samples: list[Sample]) -> list[Sample]:
    raise ZeroDivisionError(f"{len(samples)} samples")


def over_ranks(group: dist.ProcessGroup) -> None:
    rank, ranks = group.rank(), group.size()
    everything = asked(range(7))
    engine = Seeded()
    got, _ = generate_on_ranks(engine, everything, scored, group)
    assert engine.asked == len(range(rank, 7, ranks))
    assert_same(got, expected(*range(7)))
    few, _ = generate_on_ranks(engine, asked([0]), scored, group)
    assert_same(few, got[:2])
    message = f"1 of {ranks} ranks failed.*\n  rank 1: ValueError: out of paper"
    with pytest.raises(RuntimeError, match=message):
        generate_on_ranks(Seeded(rank == 1), everything, scored, group)
    with pytest.raises(RuntimeError, match="rank 2: ZeroDivisionError"):
        generate_on_ranks(engine, everything, scored if rank < 2 else judge_fails, group)
    with pytest.raises(RuntimeError, match=r"ranks \[2\] got other prompts"):
        generate_on_ranks(engine, asked(range(7 if rank < 2 else 6)), None, group)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] got other prompts"):
        generate_on_ranks(engine, asked(range(7), 5 if rank == 1 else 6), None, group)
    assert_same(generate_on_ranks(engine, everything, scored, group)[0], got)
    own_quotas(group)


def own_quotas(group: dist.ProcessGroup) -> None:
    """What is kept is each engine's own first groups, however late the others are."""
    rank, ranks = group.rank(), group.size()
    kept = []
    for other in range(ranks):
        share = sorted(range(other, 10, ranks), key=lambda i: i * 5 % 11)
        kept += share[: len(range(other, 7, ranks))]
    for slow in range(ranks):
        engine = Seeded(step=5)
        time.sleep(0.2 * (rank == slow))
        got, lost = generate_on_ranks(engine, asked(range(10), 7), scored, group)
        assert_same(got, expected(*sorted(kept)))
        assert lost > 0 and engine.open == 0
    got, _ = generate_on_ranks(
        Seeded(step=5), asked(range(4), 1), scored, group
    )  # two have no quota
    assert_same(got, expected(0))


def test_ranks_share_prompts_and_errors():
    run_ranks(over_ranks, 3)


# Runs ---------------------------------------------------------------------------------------------


def recorder_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_recorder_writes_whole_files_and_an_index(tmp_path: Path):
    folder = tmp_path / "rollouts"
    recorder = Recorder(folder)
    assert not folder.exists()
    for version in range(3):
        recorder.save(version, batch(version=version))
    index = json.loads((folder / "index.json").read_text())
    assert [entry["version"] for entry in index] == [0, 1, 2]
    for entry in index:
        samples = load_samples(folder / entry["file"])
        assert_same(samples, batch(version=entry["version"]))
        assert entry["samples"] == 6 and entry["tokens"] == sum(s.tokens.numel() for s in samples)
        assert entry["bytes"] == (folder / entry["file"]).stat().st_size
    with pytest.raises(ValueError, match="prompt_len 0"):
        recorder.save(3, [dataclasses.replace(sample(9, 0, 5), prompt_len=0)])
    assert json.loads((folder / "index.json").read_text()) == index
    assert len(recorder_files(folder)) == 4


def test_recorder_drops_the_steps_a_resumed_run_repeats(tmp_path: Path):
    recorder = Recorder(tmp_path)
    for version in range(4):
        recorder.save(version, batch(version=version))
    save_samples(tmp_path / "step-000004.safetensors", batch())  # as if killed before the index
    again = Recorder(tmp_path, start=2)
    assert recorder_files(tmp_path)[1:] == ["step-000000.safetensors", "step-000001.safetensors"]
    again.save(2, batch(version=2))
    index = json.loads((tmp_path / "index.json").read_text())
    assert [entry["version"] for entry in index] == [0, 1, 2]
    (tmp_path / "index.json").write_text('[{"file": 1}]')
    with pytest.raises(ValueError, match=r"index.json: unreadable \(KeyError"):
        Recorder(tmp_path)


@pytest.mark.parametrize("experts", [8, 300])
def test_routes_take_layers_times_experts_times_their_size(tmp_path: Path, experts: int):
    save_samples(tmp_path / "a", batch(experts))
    raw = (tmp_path / "a").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    sizes = {
        n: h["data_offsets"][1] - h["data_offsets"][0] for n, h in header.items() if n[0] != "_"
    }
    tokens = sum(s.tokens.numel() for s in batch())
    assert sizes["routes"] == tokens * 3 * 2 * (1 if experts <= 256 else 2)
    assert sum(sizes.values()) - sizes["routes"] == tokens * (8 + 4 + 1 + 1)


def test_a_run_from_its_recording_has_the_same_numbers(tmp_path: Path):
    """To the last bit; recorded in two parts, the second of which repeats a step."""
    quick = ("batching.prompts=4", "batching.samples_per_prompt=4", "rollout.max_new_tokens=6")
    quick += ("evaluate.every=0", "log.progress=false", "checkpoint.every=2")

    def run(name: str, *overrides: str) -> list[dict[str, float]]:
        assert train.main([str(CONFIG), f"run={tmp_path / name}", *quick, *overrides]) == 0
        rows = read_rows(tmp_path / name / "metrics.jsonl")
        apart = ("time/", "tokens_per_s", "publish/checked")
        return [{k: v for k, v in row.items() if not k.startswith(apart)} for row in rows]

    run("live", "steps=3", "rollout.record=rollouts")
    shutil.rmtree(tmp_path / "live/checkpoints/step-3")  # as if it had crashed after step 2
    live = run("live", "steps=4", "rollout.record=rollouts")
    folder = tmp_path / "live/rollouts"
    assert len(recorder_files(folder)) == 5
    played = run("played", "steps=4", "rollout.engine=recorded", f"rollout.path={folder}")
    assert [row["step"] for row in live] == [0, 1, 2, 3] and live == played
