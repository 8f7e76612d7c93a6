"""The transformers model of the embedded engine, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)


def read_config(given: dict[str, Any] | str | Path) -> PreTrainedConfig:
    """The config of a dict, a config.json or its folder.

    Raises: ValueError for a model type that transformers does not know.
    """
    if not isinstance(given, dict):
        path = Path(given)
        path = path / "config.json" if path.is_dir() else path
        given = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(given, dict)
    kind = str(given.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"HFEngine: model_type {kind!r}, expected one that transformers knows")
    # a copy: it writes into nested dicts
    return CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(given), object_hook=_number))


def _number(held: dict[str, Any]) -> Any:
    """The number that transformers writes as ``{"__float__": "Infinity"}``."""
    return float(held["__float__"]) if held.keys() == {"__float__"} else held


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that builds models of this config, a vision tower included."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def build_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    experts: str | None,
    attention: str | None,
) -> PreTrainedModel:
    """The model for inference; its weights are undefined until they are loaded.

    Args:
        experts, attention: transformers implementations by name; None = the faster ones here
    """
    # load_weights brings the weights: no random initialisation, no global random numbers
    with torch.random.fork_rng(devices=[]), initialization.no_init_weights(), device:
        model = model_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention or "sdpa",
            # one matrix product per expert is fastest on a CPU, a grouped one on a GPU
            experts_implementation=experts or ("eager" if device.type == "cpu" else "grouped_mm"),
        )
    model.tie_weights()  # skipped along with the initialisation
    unbound_steps(model)
    return model.eval().requires_grad_(False)


def unbound_steps(model: PreTrainedModel) -> None:
    """Take the bound from the steps of time of Mamba-2 layers. transformers has one, the config's
    `time_step_min`, in prompts, though not token by token. That number is for initial values:
    training has no bound, and vLLM has none."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))  # type: ignore[assignment]
