"""How far two choices of experts for the same tokens agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def shared_experts(a: Tensor, b: Tensor) -> Tensor:
    """``|A and B|`` for every token and layer.

    Args:
        a, b: [T, L, K] integer, distinct expert ids of a token in a layer, in any order.

    Returns:
        [T, L] int64, from 0 to K.
    """
    if a.shape != b.shape or a.ndim != 3:
        raise ValueError(
            f"shared_experts: {list(a.shape)} and {list(b.shape)}, expected one shape [T, L, K]"
        )
    a, b = a.to(torch.int32), b.to(torch.int32)
    shared = torch.zeros(a.shape[:2], dtype=torch.int64, device=a.device)
    for k in range(a.shape[2]):  # never [T, L, K, K] at once
        shared += (a == b[..., k : k + 1]).sum(-1)
    return shared


def agreement_sums(
    a: Tensor, b: Tensor, layer_ids: Sequence[int], mask: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """The ``route/`` agreement metrics as sums with their counts, to be added over ranks.

    Sums of different pipeline stages (other layers, the same tokens) may be added too, except
    those of ``route/tokens_any_layer_diff``, which needs all layers of a token at once.

    Args:
        a, b: [T, L, K] integer, distinct expert ids of a token in a layer, in any order.
        layer_ids: [L] 0-based global ids of the layers, for the names.
        mask: [T] bool, tokens to compare; None compares all.

    Returns:
        name -> (float64 sum, int64 count), scalars on the device of ``a``.
    """
    if len(layer_ids) != a.shape[1]:
        raise ValueError(
            f"agreement_sums: {len(layer_ids)} layer ids for {a.shape[1]} layers, expected as many"
        )
    if mask is not None:
        a, b = a[mask], b[mask]
    shared, topk = shared_experts(a, b), a.shape[2]
    tokens = torch.tensor(shared.shape[0], device=a.device)
    same = shared == topk
    fraction = shared.double() / topk
    sums = {
        "route/agree_topk": (fraction.sum(), tokens * len(layer_ids)),
        "route/exact_set": (same.sum().double(), tokens * len(layer_ids)),
        "route/tokens_any_layer_diff": ((~same).any(1).sum().double(), tokens),
    }
    for layer, total in zip(layer_ids, fraction.sum(0), strict=True):
        sums[f"route/agree_topk/layer_{layer}"] = (total, tokens)
    return sums


def agreement(sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """``sum / count`` of each metric, NaN where nothing was counted. Syncs: twice a metric."""
    return {
        name: float(total) / int(count) if int(count) else float("nan")
        for name, (total, count) in sums.items()
    }
