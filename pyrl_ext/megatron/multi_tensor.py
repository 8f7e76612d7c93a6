"""Norm and scaling of many tensors, in the form that megatron's optimizer calls them.

megatron-core 0.19.2 has its own where neither TransformerEngine nor Apex is used (core/utils.py,
``local_multi_tensor_*``); its norm waits for the device once a tensor, and its scaling writes each
product to new memory first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def l2_norm(
    _chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """The norm of all tensors of the one list together, [1] float32; no norms by tensor."""
    (tensors,) = lists
    return get_total_norm(tensors).float().view(1), None


def scale(_chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Write ``factor * x`` of the first list into the second; both may be the same tensors."""
    for source, target in zip(*lists, strict=True):
        torch.mul(source, factor, out=target)
