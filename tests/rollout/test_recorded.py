"""Stored rollout batches: round trip, damage, and playing them back."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pyrl_ext import train
from pyrl_ext.data.recordings import load_samples, save_samples
from pyrl_ext.rollout.engine import Capabilities
from pyrl_ext.rollout.recorded import RecordedEngine, Recorder
from pyrl_ext.rollout.versions import with_newest_routes
from pyrl_ext.samples import Image, Prompt, Sample, Sampling
from pyrl_ext.tools.report.page import report_page
from pyrl_ext.tools.report.state import Folder
from tests.helpers.engines import (
    assert_same,
    engine_of,
    random_model,
    random_sample,
    random_samples,
)
from tests.helpers.images import QWEN3_VL, SCALE, prompt_of
from tests.helpers.rows import numbers
from tests.helpers.samples import with_kept
from tests.helpers.scores import check_scores
from tests.helpers.tiny import CONFIG, one_rank, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def prompts_of(samples: list[Sample]) -> list[Prompt]:
    found = {s.prompt_id: tuple(s.tokens[: s.prompt_len].tolist()) for s in samples if not s.index}
    return [Prompt(number, tokens) for number, tokens in found.items()]


def test_save_samples_replaces_a_file_whole(tmp_path: Path):
    path = tmp_path / "batch.safetensors"
    save_samples(path, random_samples(version=1))
    broken = [*random_samples(), dataclasses.replace(random_sample(9, 0, 5), prompt_len=0)]
    with pytest.raises(ValueError, match=r"prompt 9, sample 0\): prompt_len 0"):
        save_samples(path, broken)
    assert load_samples(path)[0].weight_version == 1
    save_samples(path, random_samples(version=2))
    assert load_samples(path)[0].weight_version == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_save_samples_refuses_bad_batches(tmp_path: Path):
    with pytest.raises(ValueError, match="0 samples"):
        save_samples(tmp_path / "a", [])
    with pytest.raises(ValueError, match=r"prompt 1, sample 0 has \(layers"):
        save_samples(tmp_path / "a", [random_sample(0, 0, 5), random_sample(1, 0, 5, None)])


def with_images() -> list[Sample]:
    """Two groups that show the same picture, one of them another one too, and a group of text."""
    g = torch.Generator().manual_seed(3)
    grids = ((1, 2, 2), (1, 4, 2))
    red, blue = (torch.randint(0, 256, (t * h * w, 6), generator=g) for t, h, w in grids)
    once = (Image(0, 1, grids[0], red.to(torch.uint8)),)
    twice = (Image(0, 1, grids[1], blue.to(torch.uint8)), Image(1, 1, grids[0], red.byte()))
    images = {0: once, 1: twice, 2: ()}
    return [dataclasses.replace(s, images=images[s.prompt_id]) for s in random_samples()]


def with_sets() -> list[Sample]:
    """Sets that top-p and top-k kept, next to images."""
    return [with_kept(each, 200) for each in with_images()]


@pytest.mark.parametrize(
    "samples",
    [random_samples(8), random_samples(300), random_samples(None), with_images(), with_sets()],
    ids=["uint8", "uint16", "dense", "images", "sets"],
)
def test_load_samples_inverts_save_samples(tmp_path: Path, samples: list[Sample]):
    path = tmp_path / "new" / "batch.safetensors"
    save_samples(path, samples)
    loaded = load_samples(path)
    assert_same(loaded, samples)
    assert_same(load_samples(path, [len(samples) - 1]), samples[-1:])
    assert [p.name for p in path.parent.iterdir()] == ["batch.safetensors"]
    assert RecordedEngine(path).capabilities.sampling_mask == (samples[0].kept_ids is not None)
    small = {i.patches.data_ptr() for s in loaded for i in s.images if len(i.patches) < 8}
    assert len(small) == bool(samples[0].images)  # a picture is stored once


def test_load_samples_refuses_cut_files_and_other_files(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="expected a whole file of save_samples"):
        load_samples(path)
    save_samples(path, with_sets())
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="expected a whole file of save_samples"):
            load_samples(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="format None, expected a whole file"):
        RecordedEngine(path)


def test_RecordedEngine_plays_images_back(tmp_path: Path):
    asked = [prompt_of(3, (2, 2), (4, 6)), prompt_of(4), prompt_of(5, (4, 4))]
    sampling = Sampling(4, samples_per_prompt=2)
    samples = engine_of(random_model(QWEN3_VL), QWEN3_VL, scale=SCALE).generate(asked, sampling)
    save_samples(tmp_path / "batch.safetensors", samples)
    engine = RecordedEngine(tmp_path)
    assert engine.capabilities.images
    engine.load_weights([], 3)
    assert_same(engine.generate(asked, sampling), samples)
    asked[0] = dataclasses.replace(asked[0], images=asked[0].images[:1])
    with pytest.raises(
        ValueError, match=r"prompt 3, sample 0 was recorded with images at .*\(7, 6"
    ):
        engine.generate(asked, sampling)


def test_RecordedEngine_finds_a_batch_by_version_and_prompts(tmp_path: Path):
    for version in (0, 1):
        save_samples(tmp_path / f"{version}.safetensors", random_samples(version=version))
    other = [dataclasses.replace(s, prompt_id=-1 - s.prompt_id) for s in random_samples(version=1)]
    save_samples(tmp_path / "eval.safetensors", other)
    engine = RecordedEngine(tmp_path)
    expected = Capabilities(routes=True, weights=False, images=True, concurrent=True)
    assert engine.capabilities == expected
    sampling = Sampling(4, samples_per_prompt=2)
    with pytest.raises(RuntimeError, match="no weight version"):
        engine.generate(prompts_of(random_samples()), sampling)
    for version in (1, 0, 1):
        engine.load_weights([], version)
        assert_same(
            engine.generate(prompts_of(random_samples()), sampling), random_samples(version=version)
        )
    assert_same(engine.generate(prompts_of(other), sampling), other)
    some = [prompts_of(random_samples())[i] for i in (2, 0)]  # a rank's share, in its own order
    chosen = [s for p in some for s in random_samples(version=1) if s.prompt_id == p.id]
    assert_same(engine.generate(some, sampling), chosen)
    engine.load_weights([], 7)
    with pytest.raises(ValueError, match=r"step 7 for prompts \[0, 1, 2\], .* steps are \[0, 1\]"):
        engine.generate(prompts_of(random_samples()), sampling)


def of_two_versions(sample: Sample) -> Sample:
    """Its last token is one version newer, and has the only route that counts."""
    size = sample.tokens.numel()
    version = sample.weight_version
    spans = ((sample.prompt_len, size - 1, version), (size - 1, size, version + 1))
    return with_newest_routes(dataclasses.replace(sample, version_spans=spans))


def test_RecordedEngine_finds_older_samples_by_the_step_that_trained_on_them(tmp_path: Path):
    recorder = Recorder(tmp_path, one_rank(tiny_plan()))
    now = random_samples(version=0)
    older = random_samples(version=1)
    older[1] = of_two_versions(older[1])
    older[2].route_mask[:1] = False  # a turn of one version, in a context of older ones
    older[2] = dataclasses.replace(older[2], masked=1)
    for step, samples in enumerate((now, now, older, older)):
        recorder.save(step, samples)
    engine = RecordedEngine(tmp_path)
    prompts = prompts_of(now)
    for step, samples in enumerate((now, now, older, older)):
        asked = Sampling(4, samples_per_prompt=2, step=step)
        assert_same(engine.generate(prompts, asked), samples)


def test_RecordedEngine_refuses_other_prompts_and_groups(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_samples(path, random_samples())
    engine = RecordedEngine(path)
    engine.load_weights([], 2)
    prompts = prompts_of(random_samples())
    with pytest.raises(ValueError, match=r"prompt 0 has samples .0, 1., expected 0 to 2"):
        engine.generate(prompts, Sampling(4, samples_per_prompt=3))
    prompts[1] = dataclasses.replace(prompts[1], tokens=(1, 2))
    with pytest.raises(ValueError, match=r"prompt 1, sample 0 was recorded for .*, expected .1, 2"):
        engine.generate(prompts, Sampling(4, samples_per_prompt=2))


def test_RecordedEngine_refuses_a_folder_without_batches_and_repeated_ones(tmp_path: Path):
    with pytest.raises(ValueError, match="expected recorded rollout batches"):
        RecordedEngine(tmp_path)
    save_samples(tmp_path / "a.safetensors", random_samples())
    save_samples(tmp_path / "b.safetensors", random_samples())
    with pytest.raises(ValueError, match=r"prompt 0 of step 2 is also in .*, expected each once"):
        RecordedEngine(tmp_path)


# Runs ---------------------------------------------------------------------------------------------


def recorder_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_Recorder_writes_whole_files_and_drops_repeated_steps(tmp_path: Path):
    folder = tmp_path / "rollouts"
    recorder = Recorder(folder, one_rank(tiny_plan()))
    assert not folder.exists()
    for step in range(3):
        recorder.save(step, random_samples(version=step))
    with pytest.raises(ValueError, match="prompt_len 0"):
        recorder.save(3, [dataclasses.replace(random_sample(9, 0, 5), prompt_len=0)])
    names = [f"step-{step:06d}.safetensors" for step in range(3)]
    assert recorder_files(folder) == names
    Recorder(folder, one_rank(tiny_plan()), start=2)
    assert recorder_files(folder) == names[:2]
    assert_same(load_samples(folder / names[1]), random_samples(version=1))


def test_Recorder_drops_the_scores_of_steps_that_a_resumed_run_repeats(tmp_path: Path):
    names = [f"step-{step:06d}-rank-{rank}.safetensors" for step in range(3) for rank in range(2)]
    (tmp_path / "scores").mkdir()
    for name in names:
        (tmp_path / "scores" / name).touch()
    Recorder(tmp_path, one_rank(tiny_plan()), start=2)
    assert recorder_files(tmp_path / "scores") == names[:4]


@pytest.mark.parametrize("config", ["tiny.yaml", "tiny_qwen3_next.yaml", "tiny_nemotron.yaml"])
def test_train_has_the_same_numbers_from_its_recording(tmp_path: Path, config: str):
    """To the last bit, with several microbatches in each of two minibatches; recorded in two parts,
    the second of which repeats a step, from the checkpoint before it."""
    quick = ("batching.prompts=4", "batching.samples_per_prompt=4", "rollout.max_new_tokens=6")
    quick += ("evaluate.every=0", "log.progress=false", "checkpoint.every=1")
    quick += ("batching.tokens_per_microbatch=32", "data.max_prompt_tokens=16")

    def run(name: str, *overrides: str) -> list[dict[str, float]]:
        path = str(CONFIG.with_name(config))
        assert train.main([path, f"run={tmp_path / name}", *quick, *overrides]) == 0
        return numbers(tmp_path / name, "publish/")

    run("live", "steps=2", "rollout.record=rollouts")
    shutil.rmtree(tmp_path / "live/checkpoints/step-2")  # as if it had crashed after step 1
    live = run("live", "steps=3", "rollout.record=rollouts")
    folder = tmp_path / "live/rollouts"
    assert len(recorder_files(folder)) == 4 and len(recorder_files(folder / "scores")) == 3
    check_scores(folder, 2, live[2]["mismatch/abs_mean"])
    page = report_page([Folder(tmp_path / "live")])
    assert "; trainer minus engine " in page and "Memory of a rank" in page and " planned<" in page
    played = run("played", "steps=3", "rollout.engine=recorded", f"rollout.path={folder}")
    assert [row["step"] for row in live] == [0, 1, 2] and live == played
