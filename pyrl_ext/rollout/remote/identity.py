"""The identity of a model: digests that engine and trainer have to agree on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.adapters import applied_lora
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.remote.weight_protocol import names_digest

# of a config: its origin, and its type, which an identity has separately
_NOTES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")

Identity = dict[str, str]


def make_identity(
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    dtype: str,
    tokenizer: str | Path | None,
    lora: Lora | None = None,
    quantization: str | None = None,
) -> Identity:
    """
    Args:
        config: Hugging Face config
        shapes: of all tensors that an engine holds, by name
        dtype: of the weights in the engine
        tokenizer: its folder
        lora: adapters that the engine applies; their ranks are in ``shapes``
        quantization: as `rollout.quantization` names it

    Returns: digests of the config, of names and shapes, and of the tokenizer's file (empty: it has
        none), the dtype, the adapters' alpha ("None": it applies none), and the quantization
        ("none": there is none).
    """
    kept = {key: value for key, value in config.items() if key not in _NOTES}
    paths = [] if tokenizer is None else [Path(tokenizer) / name for name in _TOKENIZER]
    files = [path.read_bytes() for path in paths if path.is_file()]
    return {
        "model": hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        "tensors": names_digest(shapes),
        "dtype": dtype,
        "tokenizer": hashlib.sha256(files[0]).hexdigest() if files else "",
        "alpha": str(None if lora is None else lora.alpha),
        "quantization": quantization or "none",
    }


def difference(trainer: Identity, engine: Mapping[str, Any]) -> str | None:
    """The reason why an engine may not join; None: it may."""
    for name, expected in trainer.items():
        value = engine.get(name)
        if name == "tokenizer" and "" in (expected, value):
            continue  # an engine without one gets tokens all the same
        if value != expected:
            return f"its {name} is {str(value)[:12]!r}, expected {expected[:12]!r}, the trainer's"
    return None


def shapes_of(plan: Plan) -> dict[str, torch.Size]:
    """Shape of every tensor that an engine of this plan holds, by its checkpoint name."""
    held = Destinations.from_config(plan.hf, applied_lora(plan), plan.draft_layers > 0)
    return {name: held.shape(name) for name in held.parts}


def identity_of(plan: Plan) -> Identity:
    """The identity of the plan's engines."""
    return make_identity(
        plan.hf,
        shapes_of(plan),
        plan.rollout_dtype,
        plan.tokenizer_path,
        applied_lora(plan),
        plan.rollout.quantization,
    )
