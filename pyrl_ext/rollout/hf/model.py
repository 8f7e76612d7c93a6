"""The transformers model of the embedded engine, without weights, and its routers."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)

from pyrl_ext.rollout.hf.attention import NAME
from pyrl_ext.rollout.hf.cache import SlotCache
from pyrl_ext.rollout.hf.images import PromptImages, Scale
from pyrl_ext.rollout.tensor_names import layer_of

_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)


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
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model for inference; its weights are undefined until they are loaded."""
    # load_weights brings the weights: no random initialization, no global random numbers
    with torch.random.fork_rng(devices=[]), initialization.no_init_weights(), device:
        model = model_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=NAME,
            # one matrix product per expert is fastest on a CPU, a grouped one on a GPU
            experts_implementation="eager" if device.type == "cpu" else "grouped_mm",
        )
    model.tie_weights()  # skipped along with the initialization
    unbound_steps(model)
    keep_router_biases(model)
    return model.eval().requires_grad_(False)


def unbound_steps(model: PreTrainedModel) -> None:
    """Take the bound from the steps of time of Mamba-2 layers. transformers has one, the config's
    `time_step_min`, in prompts, though not token by token. That number is for initial values:
    training has no bound, and vLLM has none."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))  # type: ignore[assignment]


def keep_router_biases(model: PreTrainedModel) -> None:
    """Keep the biases that choose experts in float32, as checkpoints and the trainer have them.
    transformers does not for MiniMax-M2, and rounding moves experts."""
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.data = bias.data.float()


class RoutedModel:
    """A transformers model for inference, and the experts that its routers choose.

    Args:
        config, dtype, device, scale: as `HFEngine`

    Raises: ValueError for expert layers without a router that can be watched.
    """

    def __init__(
        self,
        config: dict[str, Any] | str | Path,
        dtype: torch.dtype,
        device: torch.device,
        scale: Scale | None,
    ):
        self.device = device
        self.model = build_model(read_config(config), dtype, device)
        self.text: Any = self.model.config.get_text_config()
        kinds = getattr(self.text, "layer_types", None) or ()
        self.has_states = "linear_attention" in kinds
        self.images = PromptImages(self.model.config, scale)
        routers = _find_routers(self.model)
        self.layer_ids = tuple(sorted(routers))
        self.num_experts = max((_num_experts(router) for router in routers.values()), default=1)
        self.chosen: dict[int, Tensor] = {}  # layer -> [tokens, K] of the last forward
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._keep, layer))

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: SlotCache,
        keep: Tensor | int,
        **images: Tensor,
    ) -> Tensor:
        """Logits [B, keep, V] of tokens [B, T] under a mask [B or 1, 1, T, keys] bool."""
        return self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            **images,
        ).logits

    def routes(self) -> Tensor:
        """[tokens, L, K] experts of the last forward."""
        if missing := [layer for layer in self.layer_ids if layer not in self.chosen]:
            raise RuntimeError(f"HFEngine: routers of layers {missing} did not run, expected all")
        routes = torch.stack([self.chosen[layer] for layer in self.layer_ids], dim=1)
        self.chosen = {}
        return routes

    def _keep(self, layer: int, _module: nn.Module, _args: object, output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ids = [x for x in outputs if isinstance(x, Tensor) and not x.is_floating_point()]
        if len(ids) != 1 or ids[0].dim() != 2:
            shapes = [list(x.shape) for x in ids]
            raise RuntimeError(
                f"HFEngine: router gave integer outputs {shapes}, expected one [T, K]"
            )
        self.chosen[layer] = ids[0]


def _num_experts(router: nn.Module) -> int:
    return int(router.get_parameter("weight").shape[0])


def _find_routers(model: nn.Module) -> dict[int, nn.Module]:
    """Global layer id -> router module, by walking the model; every expert layer has one."""
    routers: dict[int, nn.Module] = {}
    expert_layers: set[int] = set()
    for name, module in model.named_modules():
        if (layer := layer_of(name)) is None:
            continue
        if name.endswith(".experts"):
            expert_layers.add(layer)
        if _ROUTER.search(type(module).__name__):
            if layer in routers:
                raise ValueError(f"HFEngine: two routers in layer {layer}, expected one")
            routers[layer] = module
    if expert_layers != set(routers):
        raise ValueError(
            f"HFEngine: experts in layers {sorted(expert_layers)} and routers in layers "
            f"{sorted(routers)} of {type(model).__name__}, expected the same; "
            "its routes cannot be reported"
        )
    return routers
