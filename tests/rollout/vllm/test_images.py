"""vLLM generates from prompts with images: its rows of text and of images equal transformers'.

Needs vLLM (`make .venv/.vllm`); `make test-vllm` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PIL

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from pyrl_ext.data.files import DataError
from pyrl_ext.data.images import ImageReader, place
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers import images
from tests.helpers.pictures import write_run
from tests.helpers.ranks import run_ranks
from tests.helpers.turns import ScriptedFeed, answers, first_turns
from tests.helpers.vllm_pair import CONFIGS, WITH_VLLM, Pair, random_weights, train_on_rank

pytestmark = pytest.mark.vllm

VL = CONFIGS / "tiny_vl"
PAD = 104
START = 105
END = 106
VIDEO = 107
READER = ImageReader(VL, ".", PAD)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(VL, scale=READER.scale)
    yield pair
    pair.vllm.close()


def prompt_of(number: int, *sizes: tuple[int, int], **more: Any) -> Prompt:
    return images.prompt_of(number, *sizes, marks=(START, PAD, END), **more)


def sampling_of(tokens: int, **more: Any) -> Sampling:
    """A placeholder ends a response: transformers would want an image for it."""
    return Sampling(tokens, stop_ids=(PAD, START, END, VIDEO), **more)


def test_generate_from_images_equals_transformers(pair: Pair):
    """Log-probs, and the routes of every row of text and of images: images of several sizes, two in
    a prompt, none, and prompts that vLLM reads in parts, which end inside an image."""
    asked = [
        prompt_of(0, (4, 2)),
        prompt_of(1, text=9),
        prompt_of(2, (2, 2), (4, 6), text=1),
        prompt_of(3, (16, 16)),
        prompt_of(4, (16, 16), (12, 16), text=40),
    ]
    seen: dict[str, Any] = {}
    step = pair.vllm._engine.step

    def watched():
        outputs = step()
        seen.update({each.request_id: each.prompt_token_ids for each in outputs})
        return outputs

    pair.vllm._engine.step = watched
    sampling = sampling_of(12, samples_per_prompt=4, temperature=1.2)
    samples = pair.vllm.generate(asked, sampling)
    pair.vllm._engine.step = step
    assert [seen[str(n)] for n in range(20)] == [[*asked[n // 4].tokens] for n in range(20)]
    for sample in samples:
        assert [*sample.images] == [*asked[sample.prompt_id].images]
    worst, routed = pair.check(samples, sampling)
    assert worst < 1e-5 and routed > 1000


def test_generate_sees_the_picture_of_a_file(pair: Pair, tmp_path: Path):
    """As the embedded engine does, and so as the trainer: one reader decodes for all."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    PIL.fromarray(pixels).save(tmp_path / "a.jpg")
    tokens, placed = place(READER, [9, START, PAD, END, 5], [str(tmp_path / "a.jpg")])
    prompt = Prompt(7, tuple(tokens), images=tuple(placed))
    sampling = sampling_of(8, samples_per_prompt=3)
    samples = pair.vllm.generate([prompt], sampling)
    expected = placed[0].load()
    for sample in samples:
        assert torch.equal(sample.images[0].patches, expected.patches)
        assert sample.images[0].grid == expected.grid
    assert pair.check(samples, sampling)[0] < 1e-5
    (greedy,) = pair.vllm.generate([prompt], sampling_of(8, greedy=True))
    assert pair.hf.generate([prompt], sampling_of(8, greedy=True))[0].response == greedy.response


def test_load_weights_forgets_what_the_tower_made_of_images(pair: Pair):
    asked = [prompt_of(5, (4, 4)), prompt_of(6, (2, 6), (4, 4))]
    sampling = sampling_of(6, samples_per_prompt=3)
    for seed in (0, 1, 0):
        pair.load(seed)
        samples = pair.vllm.generate(asked, sampling)
        assert pair.check(samples, sampling)[0] < 1e-5
        assert {s.weight_version for s in samples} == {seed}


def test_checksums_cover_the_tower(pair: Pair):
    taken = pair.hf.checksums()
    found = pair.vllm.checksums()
    tower = {name for name in taken if name.startswith("model.visual.")}
    assert len(tower) > 40 and {name: found[name] for name in taken} == taken
    worker = pair.vllm._engine.model_executor.driver_worker.worker
    bias = worker.model_runner.model.visual.merger.norm.bias.data
    bias[2] += 1e-3
    after = pair.vllm.checksums()
    changed = {name for name in found if after[name] != found[name]}
    assert changed == {"vllm rank 0: visual.merger.norm.bias"}
    weights = random_weights(pair.hf, 0)
    lacking = [(n, v) for n, v in weights if n != "model.visual.pos_embed.weight"]
    with pytest.raises(ValueError, match=r"model\.visual\.pos_embed\.weight: missing"):
        pair.vllm.load_weights(lacking, 0)
    pair.load(0)
    assert pair.vllm.checksums() == found


def test_stream_refuses_an_image_that_cannot_be_decoded(pair: Pair, tmp_path: Path):
    """It was looked at when the run began; requests of earlier prompts are aborted."""
    file = tmp_path / "a.png"
    PIL.fromarray(np.zeros((32, 32, 3), np.uint8)).save(file)
    tokens, placed = place(READER, [START, PAD, END], [str(file)])
    file.write_bytes(file.read_bytes()[:-30])
    asked = [prompt_of(1, (2, 2)), Prompt(2, tuple(tokens), images=tuple(placed))]
    with pytest.raises(DataError, match=r"a\.png: .*expected an image that can be decoded"):
        pair.vllm.generate(asked, sampling_of(4))
    assert not pair.vllm._engine.has_unfinished_requests()
    sampling = sampling_of(4)
    assert pair.check(pair.vllm.generate(asked[:1], sampling), sampling)[0] < 1e-5
    pair.vllm.scale = None
    with pytest.raises(ValueError, match=r"prompt 1\): 1 images, expected none: the engine was"):
        pair.vllm.generate(asked[:1], sampling)
    pair.vllm.scale = READER.scale


def test_answer_shares_a_prefix_with_the_same_picture_only():
    """Prompts of equal tokens, whose first blocks are in the prefix cache for one picture."""
    pair = Pair(VL, scale=READER.scale, block_size=32)
    sampling = sampling_of(4)

    def answered(prompt: Prompt) -> list[Sample]:
        feed = ScriptedFeed(first_turns([prompt], 2, 4), lambda _: None, max_tokens=256)
        return [*answers(pair.vllm, feed, sampling)]

    for seed in (0, 1, 0):  # pictures: the third prompt is in the cache
        prompt = prompt_of(3, (16, 16), text=9, seed=seed)
        samples = answered(prompt)
        assert pair.check(samples, sampling, whole=False)[0] < 1e-5
    assert not samples[0].route_mask[:64].any(), "nothing came from the prefix cache"
    pair.load(1)
    samples = answered(prompt)
    assert pair.check(samples, sampling, whole=False)[0] < 1e-5
    assert samples[0].route_mask[:-1].all()
    pair.vllm.close()


@pytest.mark.parametrize("pp", [1, 2])
def test_train_on_pictures_sees_what_vllm_saw(pp: int, tmp_path: Path):
    """The encoder on a rank without an engine, for which vLLM's groups do not wait; the first stage
    of a pipeline, whose rank is in one group more than the others. Old log-probs and routes are the
    trainer's own, step by step."""
    config = write_run(tmp_path)
    config.write_text(config.read_text().replace("hf,", "vllm,"))
    run = ("evaluate.every=0", f"parallel.pp={pp}")
    found = run_ranks(train_on_rank, 1 + pp, config, *run, preload=WITH_VLLM)
    assert found == [0] * (1 + pp)
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/max"] < 1e-5 and row["route/agree_topk"] == 1.0
