"""The layers with which an engine drafts tokens: those of multi-token prediction (MTP)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.rollout.tensor_names import AHEAD, layer_of


def draft_shapes(config: Mapping[str, Any] | str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint tensors of a model's MTP layers, without their copies of the
    embedding and the head; of a Hugging Face config, or of a folder that has one."""
    if isinstance(config, str | Path):
        config = json.loads(Path(config, "config.json").read_text(encoding="utf-8"))
    sizes = read_sizes(cast("Mapping[str, Any]", config))
    return {
        name: tuple(shape)
        for depth in range(sizes.num_nextn_predict_layers)
        for row in sizes.mtp_weights(depth)
        for name, shape in zip(row.hf_names, row.shapes, strict=True)
    }


def is_draft(name: str, num_layers: int) -> bool:
    """True for a checkpoint tensor of an MTP layer; these are numbered from ``num_layers`` on."""
    layer = layer_of(name)
    return layer is not None and (layer == AHEAD or layer >= num_layers)
