"""Requests to vLLM, one for each turn, with the images of their prompts."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pyrl_ext.ops.digest import GOLDEN
from pyrl_ext.rollout.engine import need_processor
from pyrl_ext.rollout.hf.images import Scale
from pyrl_ext.samples import Image, Prompt, Sampling, Turn

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.inputs import EngineInput
    from vllm.lora.request import LoRARequest


@dataclass
class Requests:
    """Makes a request of every turn of a stream.

    Args:
        engine: takes them
        scale: of the image processor; None: prompts have no images
        sampling: how tokens are drawn
        most: requests that it holds at once
        salt: names the weights; no block of the prefix cache is found under another one
        isolated: no trajectory finds the blocks of another one
        reads_cache: what is in the prefix cache is not computed again
        adapters: LoRA adapters that are applied; None: none

    Attributes:
        decoded: the images of each prompt, decoded when its first request is made
    """

    engine: LLMEngine
    scale: Scale | None
    sampling: Sampling
    most: int
    salt: str
    isolated: bool
    reads_cache: bool
    adapters: LoRARequest | None = None
    decoded: dict[int, tuple[Image, ...]] = field(default_factory=dict)
    _last: tuple[Prompt, Any] | None = None

    def admit(self, waiting: deque[str], turns: Mapping[str, Turn]) -> None:
        """Gives vLLM those that wait until it holds enough: a scaled image takes four times the
        memory of its patches."""
        while waiting and self.engine.get_num_unfinished_requests() < self.most:
            name = waiting.popleft()
            given = self._input(turns[name]), self._params(turns[name])
            self.engine.add_request(name, *given, lora_request=self.adapters)

    def _input(self, turn: Turn) -> EngineInput:
        prompt = turn.prompt
        if prompt.id not in self.decoded:
            need_processor("VLLMEngine.stream", [prompt], self.scale)
            self.decoded[prompt.id] = tuple(image.load() for image in prompt.images)
        if self._last is None or self._last[0] is not prompt:
            self._last = prompt, prompt_input(prompt.tokens, self.decoded[prompt.id], self.scale)
        salt = f"{self.salt} {prompt.id} {turn.stream}" if self.isolated else self.salt
        return self._last[1] | {"cache_salt": salt}

    def _params(self, turn: Turn) -> SamplingParams:
        from vllm import SamplingParams

        sampling = self.sampling
        seed = (sampling.seed * 1_000_003 + turn.prompt.id) * 1_009 + turn.stream
        return SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            top_k=-1 if sampling.greedy else sampling.top_k or -1,
            max_tokens=turn.max_new_tokens,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # the config may name stop tokens that the plan does not have
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # they may be part of a stop string
            detokenize=bool(sampling.stop),
            seed=(seed + turn.number * GOLDEN) % 2**63,
            logprobs=0,
            skip_reading_prefix_cache=not self.reads_cache,
        )


def image_arguments(scale: Scale | None) -> dict[str, Any]:
    """Arguments of vLLM's engine: patches come scaled; none are kept for later requests."""
    if scale is None:
        return {}
    return {
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"video": 0},
    }


def prompt_input(
    tokens: Sequence[int], images: Sequence[Image], scale: Scale | None
) -> EngineInput:
    """A prompt for `add_request`, with the patches and placeholders that the trainer trains on.

    vLLM's own image processor would resize a picture by another library. So vLLM gets the result of
    one, by its documented type for that: tokens with a placeholder for every row, the rows of every
    image, its patches, and a name under which it caches them.
    """
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    if not images or scale is None:
        return tokens_input(list(tokens))
    counts = torch.tensor([len(image.patches) for image in images])
    fields: Any = {
        "pixel_values": scale(torch.cat([image.patches for image in images])),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
    }
    places = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", counts),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return mm_input(
        list(tokens),
        MultiModalKwargsItems.from_hf_inputs(fields, places),
        {"image": [_name(image) for image in images]},
        {"image": [PlaceholderRange(image.row, image.rows) for image in images]},
    )


def _name(image: Image) -> str:
    """A name for vLLM's cache of encoded images: the same for equal patches only."""
    digest = hashlib.sha256(repr(image.grid).encode())
    digest.update(image.patches.contiguous().numpy())
    return digest.hexdigest()
