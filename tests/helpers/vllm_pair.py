"""vLLM and transformers with the same random weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext import train
from pyrl_ext.data.images import Scale
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.rollout.draft_layers import draft_shapes
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.sampling import processed_logprobs
from pyrl_ext.rollout.vllm.engine import VLLMEngine
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.adapters import random_tensors
from tests.helpers.configs import CONFIGS, hf_of
from tests.helpers.ranks import LOOP

# what ranks that train with vLLM have imported when they are forked
WITH_VLLM = (*LOOP, "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")


NEEDS_AMX = "vLLM for CPUs multiplies weights in 8 bits on processors with AMX alone"
BLOCK = 128  # rows and columns of a matrix that have one scale
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
_HEADS = {
    "tiny": {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32},
    "tiny_qwen3": {"num_key_value_heads": 4},
}


def wide_enough(folder: Path, model: str, **changes: Any) -> Path:
    """A folder with the config of a model whose matrices have whole blocks, also those that vLLM
    puts together, and widths that its kernels for CPUs take."""
    sizes = hf_of(model) | _WIDE | _HEADS[model] | changes
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    return folder


def train_on_rank(group: Any, config: Path, *overrides: str) -> int:
    """Exit code of a run on this rank."""
    join_vllm(group)
    return train.main([str(config), *overrides])


def join_vllm(group: Any) -> None:
    """Sets the variables in which vLLM looks for the ranks that run already."""
    rank = str(group.rank())
    os.environ |= {"WORLD_SIZE": str(group.size()), "RANK": rank, "LOCAL_RANK": rank}


def random_weights(hf: HFEngine, seed: int) -> list[tuple[str, Tensor]]:
    return [*random_tensors(hf, seed).items()]


def with_drafts(folder: Path, hf: dict[str, Any]) -> Path:
    """A folder with the config of a model that has an MTP layer."""
    config = hf | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def drafting_weights(hf: HFEngine, config: Path, seed: int, eye: float = 1.0) -> dict[str, Tensor]:
    """Weights of a model whose next token depends on its last one almost alone, with an MTP layer
    that sees the same, so that it often drafts the likeliest token. ``eye``: 0: a layer that sees
    nothing."""
    shapes = draft_shapes(config)
    g = torch.Generator().manual_seed(seed)
    drafts = {name: 0.05 * torch.randn(shape, generator=g) for name, shape in shapes.items()}
    weights = dict(random_weights(hf, seed)) | drafts
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.01
        elif name == "lm_head.weight":
            tensor *= 20
        elif name.endswith("eh_proj.weight"):
            width = len(tensor)
            weights[name] = torch.cat([eye * torch.eye(width), torch.zeros(width, width)], 1)
    return weights


class Pair:
    """vLLM and transformers with the same weights."""

    def __init__(
        self,
        config: Path,
        engine_routes: bool | None = None,
        scale: Scale | None = None,
        sampling_mask: bool | None = None,
        draft_layers: int = 0,
        quantization: str | None = None,
        dtype: str = "float32",
        **options: Any,
    ):
        self.config = config
        self.draft_layers = draft_layers
        self.hf = HFEngine(config, scale=scale)
        self.vllm = VLLMEngine(
            config,
            num_experts=8 if self.hf.routed.layer_ids else 0,
            layer_ids=self.hf.routed.layer_ids,
            max_tokens=256,
            max_num_seqs=16,
            engine_routes=engine_routes,
            sampling_mask=not engine_routes if sampling_mask is None else sampling_mask,
            draft_layers=draft_layers,
            quantization=quantization,
            dtype=dtype,
            tokenizer=CONFIGS / "tiny" if scale is None else config,
            scale=scale,
            options={"max_num_batched_tokens": 64} | options,  # longer prompts come in parts
        )
        self.preempted = 0
        scheduler = self.vllm._engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counted
        self.load(seed=0)

    def load(self, seed: int) -> None:
        if not self.draft_layers:
            return self.give(dict(random_weights(self.hf, seed)), seed)
        self.give(drafting_weights(self.hf, self.config, seed), seed)

    def give(self, weights: dict[str, Tensor], version: int) -> None:
        """Loads weights into both; transformers has no MTP layers and skips theirs."""
        for engine in (self.hf, self.vllm):
            engine.load_weights(weights.items(), version=version)

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """transformers' logits [T, V] and routes [T, L, K] of the sample's tokens; the last one is
        no input, and transformers would want an image for a placeholder there."""
        tokens = sample.tokens.clone()
        tokens[-1] = 0
        with torch.no_grad():
            logits = self.hf.model(tokens[None], **self.images(sample)).logits[0]
        chosen = [x.view(len(sample.tokens), -1) for x in self.hf.routed.chosen.values()]
        return logits, torch.stack(chosen, 1) if chosen else torch.empty(0)

    def images(self, sample: Sample) -> dict[str, Tensor]:
        """The arguments by which transformers takes the images of a sample."""
        if not sample.images or self.hf.routed.images.scale is None:
            return {}
        patches = torch.cat([image.patches for image in sample.images])
        is_image = torch.zeros(1, len(sample.tokens), dtype=torch.int32)
        for image in sample.images:
            is_image[0, image.row : image.row + image.rows] = 1
        return {
            "pixel_values": self.hf.routed.images.scale(patches),
            "image_grid_thw": torch.tensor([image.grid for image in sample.images]),
            "mm_token_type_ids": is_image,
        }

    def check(
        self, samples: list[Sample], sampling: Sampling, whole: bool = True
    ) -> tuple[float, int]:
        """(largest log-prob difference, tokens with a route), none of them a wrong one; ``whole``:
        every token has one that was an input."""
        worst = 0.0
        routed = 0
        for sample in samples:
            logits, routes = self.forward(sample)
            logprobs = processed_logprobs(logits[:-1], sampling)
            mine = logprobs.gather(1, sample.tokens[1:, None])[:, 0]
            gap = (mine - sample.rollout_logprobs[1:])[sample.loss_mask[1:]]
            worst = max(worst, gap.abs().max().item())
            if not self.hf.routed.layer_ids:
                assert sample.check().routes is None
                continue
            has = sample.route_mask
            assert not has[-1] and (has[:-1].all() or not whole)
            assert sample.routes is not None
            same = sample.routes[has].long().sort(-1).values == routes[has].long().sort(-1).values
            assert same.all(), f"{int((~same).sum())} routes differ"
            routed += int(has.sum())
        return worst, routed


def check_routes_of_ranks(group: Any, model: str) -> None:
    """All ranks of ``group`` hold one vLLM, which reports routes itself: the first rank gets those
    of transformers, the others get the same samples without routes."""
    join_vllm(group)
    pair = Pair(CONFIGS / model, True, tensor_parallel_size=group.size(), block_size=32)
    sampling = Sampling(max_new_tokens=5, samples_per_prompt=2)
    for cached in (False, True):  # the second time prompts are in the prefix cache
        samples = pair.vllm.generate(prompts(5, 70), sampling)
        tokens = gather_objects([sample.tokens.tolist() for sample in samples], group)
        assert all(each == tokens[0] for each in tokens)
        if group.rank() == 0:
            worst, routed = pair.check(samples, sampling)
            assert worst < 1e-5 and routed > 150, (cached, worst, routed)
            continue
        assert all(sample.routes is None for sample in samples)
        assert not any(sample.route_mask.any() for sample in samples)
    left = pair.vllm.stream(prompts(5, 70), sampling)
    next(left)
    left.close()
    pair.load(1)
    samples = pair.vllm.generate(prompts(5, 70), sampling)
    if group.rank() == 0:
        assert pair.check(samples, sampling)[0] < 1e-5
    pair.vllm.close()


def check_sets(pair: Pair, samples: list[Sample], sampling: Sampling) -> int:
    """Tokens in the kept sets of samples, which are those of transformers' distribution."""
    total = 0
    for sample in samples:
        assert sample.kept_counts is not None and sample.kept_ids is not None
        start = sample.prompt_len
        logits = pair.forward(sample)[0]
        kept = processed_logprobs(logits[start - 1 : -1], sampling) > -torch.inf
        assert sample.kept_counts[start:].tolist() == kept.sum(1).tolist()
        assert sample.kept_ids.tolist() == kept.nonzero()[:, 1].tolist()
        total += len(sample.kept_ids)
    return total


def prompts(*lengths: int) -> list[Prompt]:
    g = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 128, (length,), generator=g).tolist() for length in lengths]
    return [Prompt(i, tuple(tokens)) for i, tokens in enumerate(drawn)]
