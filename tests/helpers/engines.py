"""Small models, engines that hold them or get other tensors than were sent, and random samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.sampling import processed_logprobs
from pyrl_ext.rollout.tensor_names import layer_of
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.configs import hf_of

GLM = hf_of()
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


DENSE = {**QWEN, "model_type": "qwen3"}


CONFIGS = {"glm4_moe_lite": GLM, "qwen3_moe": QWEN, "qwen3": DENSE}


def random_model(config: dict[str, Any], seed: int = 0, std: float = 0.2) -> Any:
    """A random model with sharp logits and unequal router biases."""
    generator = torch.Generator().manual_seed(seed)
    kind: Any = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model: Any = kind.from_config(
        CONFIG_MAPPING[config["model_type"]].from_dict(config), dtype=torch.float32
    ).eval()
    saved = model.state_dict().keys()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name not in saved:  # follows from the config
                continue
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if "norm" in name else std * noise)
    return model


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its safetensors."""
    if model.config.model_type == "kimi_k25":
        from tests.helpers.vision import kimi  # needs megatron

        return kimi(model.state_dict(), model.config.vision_config.num_attention_heads)
    found = single_experts(model.state_dict())
    if model.config.tie_word_embeddings:
        found.pop("lm_head.weight")
    return found


FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def single_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, of each expert alone where a layer's experts are in one."""
    found = dict[str, Tensor]()
    for name, value in state.items():
        stem, _, kind = name.partition(".experts.")
        if kind not in FUSED:
            found[name] = value
            continue
        for expert, rows in enumerate(value):
            parts = rows.chunk(len(FUSED[kind]))
            for part, own in zip(FUSED[kind], parts, strict=True):
                found[f"{stem}.experts.{expert}.{part}.weight"] = own
    return found


def engine_of(model: Any, config: dict[str, Any], **options: Any) -> HFEngine:
    engine = HFEngine(config, **options)
    engine.load_weights(checkpoint(model).items(), version=3)
    return engine


def prompts_of(sizes: list[int], vocab: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(10 + i, tuple(rng.integers(3, vocab, n).tolist())) for i, n in enumerate(sizes)]


def plain(
    model: Any, tokens: torch.Tensor, **images: torch.Tensor
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits [T, V] of one full forward, and the experts [T, K] of every router layer."""
    routes: dict[int, torch.Tensor] = {}

    def keep(layer: int | None) -> Any:
        assert layer is not None
        return lambda module, args, output: routes.__setitem__(layer, output[2])

    hooks = [
        module.register_forward_hook(keep(layer_of(name)))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    with torch.no_grad():
        logits = model(input_ids=tokens[None], **images).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, routes


def assert_matches_plain(
    model: Any, sample: Sample, sampling: Sampling, **images: torch.Tensor
) -> None:
    logits, routes = plain(model, sample.tokens, **images)
    size = len(sample.tokens)
    start = sample.prompt_len
    expected = processed_logprobs(logits[start - 1 : -1], sampling)
    chosen = sample.tokens[start:, None]
    torch.testing.assert_close(
        sample.rollout_logprobs[start:], expected.gather(1, chosen)[:, 0], atol=1e-5, rtol=0
    )
    assert sample.layer_ids == tuple(sorted(routes))
    if sample.routes is not None:
        assert sample.routes.dtype == torch.uint8
        for column, layer in enumerate(sample.layer_ids):
            got = sample.routes[:-1, column].long().sort(-1).values
            assert torch.equal(got, routes[layer][:-1].sort(-1).values), f"layer {layer}"
        assert sample.route_mask.tolist() == [True] * (size - 1) + [False]
        assert not sample.routes[-1].any()
    assert sample.loss_mask.tolist() == [False] * start + [True] * (size - start)


def assert_same(got: list[Sample], expected: list[Sample]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        for field in dataclasses.fields(Sample):
            x = getattr(a, field.name)
            y = getattr(b, field.name)
            if isinstance(y, torch.Tensor):
                assert x.dtype == y.dtype and torch.equal(x, y), field.name
            elif field.name == "images":
                assert [(i.row, i.rows, i.grid) for i in x] == [(i.row, i.rows, i.grid) for i in y]
                for one, other in zip(x, y, strict=True):
                    assert one.patches.dtype == torch.uint8
                    assert torch.equal(one.patches, other.patches)
            else:
                assert x == y or (x != x and y != y), field.name


DOWN = "model.layers.2.mlp.experts.3.down_proj.weight"
Named = Iterable[tuple[str, Tensor]]


class Disturbed:
    """An engine that is handed other tensors than were sent."""

    def __init__(self, engine: Any, disturb: Callable[[Named], Named]):
        self.engine = engine
        self.disturb = disturb

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def load_weights(self, named: Named, version: int, only: Any = None) -> None:
        self.engine.load_weights(self.disturb(named), version, only)


class Stale:
    """One tensor stays what it was at first."""

    def __init__(self, name: str):
        self.name = name
        self.first = None

    def __call__(self, named: Named) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            if name == self.name:
                if self.first is None:
                    self.first = tensor.clone()
                tensor = self.first
            yield name, tensor


def random_sample(
    prompt: int, index: int, size: int, experts: int | None = 8, version: int = 2
) -> Sample:
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


def random_samples(experts: int | None = 8, version: int = 2) -> list[Sample]:
    return [
        random_sample(p, i, 4 + 2 * p + i, experts, version) for p in range(3) for i in range(2)
    ]
