"""Names of a Hugging Face checkpoint's tensors: what trainer, files and engines agree on."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def layer_of(name: str) -> int | None:
    """``model.layers.<n>.<...>`` -> n, the 0-based global layer id; None outside of the layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None
