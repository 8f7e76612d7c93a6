"""LoRA adapters in a live transformers model, next to its weights: W x + scale B A x, unmerged.

The factors are tensors of the model under their checkpoint names, those of routed experts stacked
in three dimensions, so that whatever loads, compares or offloads weights does so with them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyrl_ext.rollout.adapters import Adapters, AdapterTensors
from pyrl_ext.rollout.hf.checkpoint_renames import published

EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""Projections of routed experts, as transformers calls them in every family."""


class FactorModule(nn.Module):
    """A or B of an adapter; of those of a layer's experts, stacked unless they share it."""

    def __init__(self, weight: Tensor, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(weight.new_empty(shape), requires_grad=False)


def attach(model: PreTrainedModel, adapters: Adapters) -> None:
    """Give modules of ``model`` their adapters; factors are undefined until they are loaded.

    Raises: ValueError naming modules that are no linears, nor routed experts in three dimensions.
    """
    left = dict(adapters)
    for name, module in list(model.named_modules()):
        place = _published(model, name)
        if isinstance(module, nn.Linear) and place in left:
            _on_linear(module, left.pop(place))
        elif name.endswith(".experts"):
            of_layer = {k: left.pop(k) for k in list(left) if k.startswith(place + ".")}
            names = {kind: _published(model, f"{name}.0.{kind}") for kind in EXPERT_LINEARS}
            _on_experts(module, {k: of_layer[n] for k, n in names.items() if n in of_layer})
    if left:
        raise ValueError(
            f"HFEngine.lora: {len(left)} modules of {type(model).__name__} have no place for an "
            f"adapter, {sorted(left)[:4]}, expected linears and routed experts. Use lora.publish: "
            "merge"
        )


def _published(model: PreTrainedModel, name: str) -> str:
    """The checkpoint name of a module."""
    found = published(model.config, {name: torch.empty(0, device="meta")})
    return next(iter(found))


def _on_linear(module: nn.Linear, adapter: AdapterTensors) -> None:
    rows, width = module.weight.shape
    module.lora_A = FactorModule(module.weight, adapter.rank, width)
    module.lora_B = FactorModule(module.weight, rows, adapter.rank)

    def add(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + _delta(args[0], module.lora_A.weight, module.lora_B.weight, adapter.scale)

    module.register_forward_hook(add)


def _delta(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return scale * F.linear(F.linear(x, a), b)


def _on_experts(module: Any, kinds: Adapters) -> None:
    """``kinds``: by projection the adapter of the layer's first expert, which all have."""
    if not kinds:
        return
    gated = hasattr(module, "gate_up_proj")
    first = module.gate_up_proj if gated else module.up_proj
    experts, rows, hidden = first.shape
    inner = rows // 2 if gated else rows
    module.adapters = nn.ModuleDict()
    for kind, (rank, _, names) in kinds.items():
        out, width = (hidden, inner) if kind == "down_proj" else (inner, hidden)
        place = module.adapters[kind] = nn.Module()
        for name, letter, shape in zip(names, "AB", ((rank, width), (out, rank)), strict=True):
            stacked = (experts,) if ".experts.0." in name else ()
            place.add_module(f"lora_{letter}", FactorModule(first, *stacked, *shape))
    module.forward = partial(_experts_forward, module, kinds)


def _experts_forward(
    module: Any, kinds: Adapters, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' eager forward of experts, with what adapters add, one expert after the other.

    Args:
        kinds: by projection
        hidden: [T, H]
        top_k_index, top_k_weights: [T, K]

    Syncs: reads which experts are chosen.
    """

    def added(kind: str, expert: int, x: Tensor, output: Tensor) -> Tensor:
        if kind not in kinds:
            return output
        both = (each.weight for each in module.adapters[kind].children())
        a, b = (each[expert] if each.dim() == 3 else each for each in both)
        return output + _delta(x, a, b, kinds[kind].scale)

    total = torch.zeros_like(hidden)
    for expert in top_k_index.unique().tolist():
        token, place = (top_k_index == expert).nonzero(as_tuple=True)
        x = hidden[token]
        if hasattr(module, "gate_up_proj"):
            gate, up = F.linear(x, module.gate_up_proj[expert]).chunk(2, -1)
            gate = added("gate_proj", expert, x, gate)
            up = added("up_proj", expert, x, up)
            inner = module.act_fn(gate) * up
        else:
            up = F.linear(x, module.up_proj[expert])
            inner = module.act_fn(added("up_proj", expert, x, up))
        down = added("down_proj", expert, inner, F.linear(inner, module.down_proj[expert]))
        total.index_add_(0, token, (down * top_k_weights[token, place, None]).to(total.dtype))
    return total
