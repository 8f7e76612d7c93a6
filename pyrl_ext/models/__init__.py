"""Model families, one a file: sizes -> megatron config, and weight names both ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyrl_ext.models.weights import Weight


@dataclass(frozen=True)
class Family:
    """What is particular to one architecture. All take its sizes, of ``plan/families/<name>.py``.

    Args:
        config:  sizes -> keyword arguments of megatron's TransformerConfig, or with
                 ``multi_latent_attention`` of its MLATransformerConfig.
        rotary:  sizes -> (rotated dimensions per head, base).
        weights: sizes, layers for multi-token prediction -> the table of every tensor of a
                 checkpoint, in export order.
        ignored: the same -> patterns of checkpoint names left out on purpose, with the reason.
    """

    config: Callable[[Any], dict[str, Any]]
    rotary: Callable[[Any], tuple[int, float]]
    weights: Callable[[Any, int], list[Weight]]
    ignored: Callable[[Any, int], dict[str, str]]


def family(name: str) -> Family:
    """The family called ``name``, from ``pyrl_ext/models/<name>.py``."""
    return importlib.import_module(f"pyrl_ext.models.{name}").FAMILY


def common_config(shape: Any) -> dict[str, Any]:
    """What every family's megatron config takes from its sizes alike."""
    import torch.nn.functional as F

    sparse = shape.router_layers
    return {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "ffn_hidden_size": shape.intermediate_size,
        "layernorm_epsilon": shape.rms_norm_eps,
        "qk_layernorm": True,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": [int(i in sparse) for i in range(shape.num_hidden_layers)],
        "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": shape.shared_expert_width or None,
    }
