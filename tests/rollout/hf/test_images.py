"""The embedded engine generates from images, against whole forwards of transformers."""

from __future__ import annotations

import json

import pytest
import torch

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.model import read_config
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.configs import CONFIGS
from tests.helpers.engines import assert_matches_plain, engine_of, random_model
from tests.helpers.images import END, KIMI, PAD, QWEN3_VL, SCALE, START, prompt_of

pytestmark = pytest.mark.multiprocess

FAMILIES = {"qwen3_vl_moe": (QWEN3_VL, 96), "kimi_k25": (KIMI, 48)}


def inputs_of(sample: Sample) -> dict[str, torch.Tensor]:
    """The arguments by which transformers takes the images of a sample."""
    if not sample.images:
        return {}
    patches = SCALE(torch.cat([image.patches for image in sample.images]))
    is_kimi = patches.shape[1] == 48
    return {
        "pixel_values": patches.view(-1, 3, 4, 4) if is_kimi else patches,
        "image_grid_thw": torch.tensor([image.grid for image in sample.images]),
        "mm_token_type_ids": (sample.tokens == PAD).int()[None],
    }


def is_text(sample: Sample) -> bool:
    """True if the response has no placeholder; transformers would look for its image."""
    return not {PAD, START, END, 73} & {*sample.response}


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_from_images_matches_plain_forwards(family: str):
    config, width = FAMILIES[family]
    model = random_model(config)
    engine = engine_of(model, config, max_num_seqs=5, scale=SCALE)
    prompts = [
        prompt_of(10, (4, 2), width=width),
        prompt_of(11, width=width, text=9),
        prompt_of(12, (2, 2), (4, 6), width=width, text=1),
        prompt_of(13, (6, 4), width=width),
    ]
    sampling = Sampling(8, 1.2, samples_per_prompt=3, seed=5, stop_ids=(*range(20, 28),))
    samples = engine.generate(prompts, sampling)
    assert len(samples) == 12 and len({len(s.response) for s in samples}) > 2
    plain_text = [sample for sample in samples if is_text(sample)]
    assert {s.prompt_id for s in plain_text} == {10, 11, 12, 13}
    for sample in plain_text:
        sample.check()
        (prompt,) = (p for p in prompts if p.id == sample.prompt_id)
        assert [i.row for i in sample.images] == [i.row for i in prompt.images]
        assert_matches_plain(model, sample, sampling, **inputs_of(sample))


def test_read_config_leaves_the_dict_as_it_is():
    """A run's plan is saved after its engine was built."""
    text = (CONFIGS / "tiny_vl/config.json").read_text()
    read_config(given := json.loads(text))
    assert given == json.loads(text)


def test_generate_depends_on_the_image():
    model = random_model(QWEN3_VL)
    engine = engine_of(model, QWEN3_VL, scale=SCALE)
    first = prompt_of(1, (4, 4), width=96)
    other = prompt_of(2, (4, 4), width=96)
    swapped = Prompt(1, first.tokens, images=other.images)
    greedy = Sampling(6, greedy=True)
    (a,), (b,) = engine.generate([first], greedy), engine.generate([swapped], greedy)
    assert a.rollout_logprobs.tolist() != b.rollout_logprobs.tolist()


def test_stream_refuses_images_without_a_processor():
    engine: HFEngine = engine_of(random_model(QWEN3_VL), QWEN3_VL)
    with pytest.raises(ValueError, match=r"prompt 4\): 1 images, expected none: the engine was"):
        engine.generate([prompt_of(4, (2, 2), width=96)], Sampling(2))
