"""Random weights and LoRA factors, for engines that apply adapters themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.adapters import adapters_of, is_factor
from pyrl_ext.rollout.hf.engine import HFEngine


def random_tensors(engine: HFEngine, seed: int) -> dict[str, Tensor]:
    """Every tensor that the engine holds, factors large enough that a wrong one shows."""
    g = torch.Generator().manual_seed(seed)
    drawn: dict[str, Tensor] = {}
    for name, shape in engine.shapes().items():
        noise = torch.randn(shape, generator=g)
        std = 0.2 if is_factor(name) else 0.08
        drawn[name] = 1 + 0.1 * noise if "norm" in name else std * noise
    return drawn


def factors_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if is_factor(name)}


def merged(tensors: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The weights with the adapters in them, in float64."""
    weights = {name: tensor for name, tensor in tensors.items() if not is_factor(name)}
    for module, (_, scale, names) in adapters_of(lora, weights).items():
        a, b = (tensors[name].double() for name in names)
        weights[f"{module}.weight"] = (weights[f"{module}.weight"] + scale * b @ a).float()
    return weights


def logits(engine: HFEngine, tokens: Tensor) -> Tensor:
    """[..., T, V] of the engine's model; its routers' choices are dropped."""
    model: Any = engine.model
    with torch.no_grad():
        return model(tokens).logits
