"""The requests that vLLM gets for turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyrl_ext.ops.splitmix64 import GOLDEN
from pyrl_ext.rollout.engine import need_processor
from pyrl_ext.rollout.vllm.images import PromptImages
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
        images: makes its inputs of images
        sampling: how tokens are drawn
        most: requests that it holds at once
        salt: names the weights; no block of the prefix cache is found under another one
        apart: no trajectory finds the blocks of another one
        reads_cache: what is in the prefix cache is not computed again
        adapters: LoRA adapters that are applied; None: none

    Attributes:
        decoded: the images of each prompt, decoded when its first request is made
    """

    engine: LLMEngine
    images: PromptImages
    sampling: Sampling
    most: int
    salt: str
    apart: bool
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
            need_processor("VLLMEngine.stream", [prompt], self.images.scale)
            self.decoded[prompt.id] = tuple(each.load() for each in prompt.images)
        if self._last is None or self._last[0] is not prompt:
            self._last = prompt, self.images.input(prompt.tokens, self.decoded[prompt.id])
        salt = f"{self.salt} {prompt.id} {turn.index}" if self.apart else self.salt
        return self._last[1] | {"cache_salt": salt}

    def _params(self, turn: Turn) -> SamplingParams:
        from vllm import SamplingParams

        sampling = self.sampling
        seed = (sampling.seed * 1_000_003 + turn.prompt.id) * 1_009 + turn.index
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
