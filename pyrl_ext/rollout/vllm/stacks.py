"""The weights of a layer's experts as one tensor of each kind, for vLLM's loader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\.\w+\.weight)")


def places_of(model: Any) -> dict[int, int]:
    """Place of each expert that this worker holds in its weights, by the expert's id. Empty if the
    model has no experts, or they share these weights with others (vLLM adds a shared expert to the
    routed ones on AMD's GPUs)."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            manager = module.expert_map_manager
            places = {e: manager.map_global_to_local(e) for e in manager.get_local_expert_ids()}
            alone = len(places) == module.local_num_experts and not manager.num_fused_shared_experts
            return places if alone else {}
    return {}


class ExpertStacks:
    """Collects the tensors of single experts.

    vLLM's loader takes 0.5 ms of Python for each tensor (vllm 0.32, `reload/layerwise.py`). Its
    ``RoutedExperts.weight_loader`` also accepts one tensor with three dimensions, which holds all
    experts of the worker.

    Args:
        places: of this worker's experts, as `places_of`
    """

    def __init__(self, places: Mapping[int, int]):
        self._places = places
        self._first = min(places, key=lambda expert: places[expert], default=0)
        self._open: dict[tuple[str, str], tuple[Tensor, int]] = {}

    def add(self, name: str, tensor: Tensor) -> tuple[Tensor, tuple[str, Tensor] | None] | None:
        """Copies a tensor to its place.

        Returns: None for a tensor of no expert here; else its copy [M, K], and if it was the last
            one: the name of the first expert's tensor, and all of them [experts, M, K].
        """
        match = _EXPERT.fullmatch(name)
        place = self._places.get(int(match[2])) if match else None
        if match is None or place is None:
            return None
        kind = match[1], match[3]
        stack, left = self._open.pop(kind, (None, len(self._places)))
        if stack is None:
            stack = tensor.new_empty((len(self._places), *tensor.shape))
        copy = stack[place].copy_(tensor)
        if left > 1:
            self._open[kind] = stack, left - 1
            return copy, None
        return copy, (f"{match[1]}{self._first}{match[3]}", stack)
