"""The model families by HF's ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyrl_ext.plan.model.families.deepseek_v3 import DeepseekV3, Glm4MoeLite, KimiK25
from pyrl_ext.plan.model.families.glm4_moe import Glm4Moe
from pyrl_ext.plan.model.families.llama import Llama, Mixtral
from pyrl_ext.plan.model.families.minimax_m2 import MiniMaxM2
from pyrl_ext.plan.model.families.nemotron_h import NemotronH
from pyrl_ext.plan.model.families.qwen2 import Qwen2
from pyrl_ext.plan.model.families.qwen3 import Qwen3, Qwen3Moe, Qwen3VlMoe
from pyrl_ext.plan.model.families.qwen3_next import (
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    Qwen35MoeVision,
    Qwen35Vision,
)
from pyrl_ext.plan.model.sizes import ModelSizes

FAMILIES: dict[str, type[ModelSizes]] = {
    "deepseek_v3": DeepseekV3,
    "glm4_moe": Glm4Moe,
    "glm4_moe_lite": Glm4MoeLite,
    "kimi_k25": KimiK25,
    "llama": Llama,
    "minimax_m2": MiniMaxM2,
    "mixtral": Mixtral,
    "nemotron_h": NemotronH,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_5": Qwen35Vision,
    "qwen3_5_moe": Qwen35MoeVision,
    "qwen3_5_moe_text": Qwen35Moe,
    "qwen3_5_text": Qwen35,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
    "qwen3_vl_moe": Qwen3VlMoe,
}

# Key of a config that tells a model's structure -> the family that has it; the first one counts
_STRUCTURES = {
    "kv_lora_rank": "deepseek_v3",
    "linear_key_head_dim": "qwen3_next",
    "mamba_num_heads": "nemotron_h",
    "n_routed_experts": "glm4_moe",
    "num_local_experts": "mixtral",
    "num_experts": "qwen3_moe",
    "num_attention_heads": "llama",
}


def nearest_family(hf: Mapping[str, Any]) -> str | None:
    """The family whose structure is nearest to that of an HF config; None: the config does not tell
    it."""
    inner = hf.get("text_config")
    text = {**(inner if isinstance(inner, dict) else {}), **hf}
    return next((family for key, family in _STRUCTURES.items() if key in text), None)


def read_sizes(hf: Mapping[str, Any]) -> ModelSizes:
    """The sizes in an HF config, or in its ``text_config``. Raises pydantic's `ValidationError`."""
    return FAMILIES[hf["model_type"]].model_validate(hf.get("text_config", {}) | hf)
