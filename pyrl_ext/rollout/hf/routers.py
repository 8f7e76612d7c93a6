"""The routers of a live transformers model, found by walking it, and their outputs."""

from __future__ import annotations

import re

from torch import Tensor, nn

from pyrl_ext.rollout.tensor_names import layer_of

_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)


def find_routers(model: nn.Module) -> tuple[tuple[int, ...], list[nn.Module]]:
    """Global layer ids and router modules, by walking the model; every expert layer has one."""
    found: dict[int, nn.Module] = {}
    expert_layers: set[int] = set()
    for name, module in model.named_modules():
        if (layer := layer_of(name)) is None:
            continue
        if name.endswith(".experts"):
            expert_layers.add(layer)
        if _ROUTER.search(type(module).__name__):
            if layer in found:
                raise ValueError(f"HFEngine: two routers in layer {layer}, expected one")
            found[layer] = module
    if expert_layers != set(found):
        raise ValueError(
            f"HFEngine: experts in layers {sorted(expert_layers)} and routers in layers "
            f"{sorted(found)} of {type(model).__name__}, expected the same; "
            "its routes cannot be reported"
        )
    order = sorted(found)
    return tuple(order), [found[i] for i in order]


def num_experts(router: nn.Module) -> int:
    """Experts a router chooses from."""
    return int(router.get_parameter("weight").shape[0])


def expert_ids(output: object) -> Tensor:
    """The one integer tensor [tokens, K] a router returns."""
    parts = output if isinstance(output, tuple) else (output,)
    chosen = [x for x in parts if isinstance(x, Tensor) and not x.is_floating_point()]
    if len(chosen) != 1 or chosen[0].dim() != 2:
        shapes = [list(x.shape) for x in chosen]
        raise RuntimeError(f"HFEngine: router gave integer outputs {shapes}, expected one [T, K]")
    return chosen[0]
