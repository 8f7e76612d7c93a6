"""Names of a Hugging Face checkpoint's tensors: what trainer, files and engines agree on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_FUSED = re.compile(r"(.*\.experts)\.(gate_up|up|down)_proj")
_STACKED = re.compile(r"(.*\.experts)\.adapters\.((?:gate|up|down)_proj\.lora_[AB]\.weight)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
# the layer of tensors for multi-token prediction in families that do not number it on
AHEAD = 1 << 30


def layer_of(name: str) -> int | None:
    """``model.layers.<n>.<...>`` -> n, the 0-based global layer id; ``mtp.<...>`` -> `AHEAD`; None
    outside of the layers."""
    if name.startswith("mtp."):
        return AHEAD
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def split_experts(
    name: str, shape: Sequence[int]
) -> Iterator[tuple[str, int | slice, slice]] | None:
    """The tensors that a checkpoint of single experts has in place of a fused one.

    Args:
        name: ``<...>.experts.gate_up_proj`` [E, 2I, H], gate rows first, ``up_proj`` [E, I, H], or
            ``down_proj`` [E, H, I]; or the factors of adapters,
            ``<...>.experts.adapters.<...>`` [E, M, K], or [M, K] if the experts share it
        shape: of the tensor

    Returns: (name, expert, rows of that expert's part) of each; None: the tensor is not fused.
    """
    if stacked := _STACKED.fullmatch(name):
        if len(shape) == 2:  # the layer's experts share it
            return iter([(f"{stacked[1]}.{stacked[2]}", slice(None), slice(None))])
        return ((f"{stacked[1]}.{e}.{stacked[2]}", e, slice(None)) for e in range(shape[0]))
    fused = _FUSED.fullmatch(name)
    if fused is None or len(shape) != 3:
        return None
    kinds = fused[2].split("_")
    rows = shape[1] // len(kinds)
    return (
        (f"{fused[1]}.{expert}.{kind}_proj.weight", expert, slice(i * rows, (i + 1) * rows))
        for expert in range(shape[0])
        for i, kind in enumerate(kinds)
    )
