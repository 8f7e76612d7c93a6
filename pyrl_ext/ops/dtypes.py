"""Types of tensors by the names that a plan gives them."""

from __future__ import annotations

import torch

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.uint16)
}


def dtype_of(name: str) -> torch.dtype:
    """``torch.bfloat16`` for ``bfloat16``: types of weights, and of the ids of routed experts.

    Raises: KeyError where a plan has no such type.
    """
    return _DTYPES[name]


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, log-probs and sums of gradients: float64 for float64, else
    float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
