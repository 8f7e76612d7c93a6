"""The embedded engine generates from images, against whole forwards of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pyrl_ext.data.images import Scale
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.samples import Image, Prompt, Sample, Sampling
from tests.helpers.engines import GLM, QWEN, assert_matches_plain, engine_of, random_model

PAD, START, END = 70, 71, 72
SCALE = Scale(torch.tensor(1 / 64), torch.tensor(-2.0))
IDS = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TEXT = {
    **QWEN,
    "model_type": "qwen3_vl_moe_text",
    "rope_parameters": {**ROPE, "mrope_interleaved": True},
    "mlp_only_layers": [],
}
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "text_config": TEXT,
    "vision_config": {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "tie_word_embeddings": True,
    "video_token_id": 73,
    **IDS,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_k25",
    "text_config": GLM | {"model_type": "deepseek_v3", "vocab_size": 96},
    "vision_config": {
        "patch_size": 4,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
    },
    "projection_hidden_size": 16,
    "tie_word_embeddings": False,
    "video_token_id": 73,
    **IDS,
}
FAMILIES = {"qwen3_vl_moe": (QWEN3_VL, 96), "kimi_k25": (KIMI, 48)}


@dataclass(frozen=True)
class Given:
    """An image of a prompt, decoded already."""

    image: Image

    @property
    def row(self) -> int:
        return self.image.row

    @property
    def rows(self) -> int:
        return self.image.rows

    def load(self) -> Image:
        return self.image


def prompt_of(number: int, *sizes: tuple[int, int], width: int, text: int = 3) -> Prompt:
    """Text, then an image of each of ``sizes`` (patches in height and width), then text."""
    g = torch.Generator().manual_seed(number)
    tokens: list[int] = torch.randint(3, 70, (text,), generator=g).tolist()
    images: list[Given] = []
    for height, wide in sizes:
        rows = height * wide // 4
        patches = torch.randint(0, 256, (height * wide, width), generator=g).to(torch.uint8)
        images.append(Given(Image(len(tokens) + 1, rows, (1, height, wide), patches)))
        tokens += [START, *[PAD] * rows, END]
    return Prompt(number, (*tokens, 5), images=tuple(images))


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
    """Whether the response has no placeholder; transformers would look for its image."""
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


def test_generate_depends_on_the_image():
    model = random_model(QWEN3_VL)
    engine = engine_of(model, QWEN3_VL, scale=SCALE)
    first, other = prompt_of(1, (4, 4), width=96), prompt_of(2, (4, 4), width=96)
    swapped = Prompt(1, first.tokens, images=other.images)
    greedy = Sampling(6, greedy=True)
    (a,), (b,) = engine.generate([first], greedy), engine.generate([swapped], greedy)
    assert a.rollout_logprobs.tolist() != b.rollout_logprobs.tolist()


def test_stream_refuses_images_without_a_processor():
    engine: HFEngine = engine_of(random_model(QWEN3_VL), QWEN3_VL)
    with pytest.raises(ValueError, match=r"prompt 4\): 1 images, expected none: the engine was"):
        engine.generate([prompt_of(4, (2, 2), width=96)], Sampling(2))
