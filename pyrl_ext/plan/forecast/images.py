"""Images of a step: the bounds of the model's processor."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pyrl_ext.plan.plan import Plan


def largest_image(plan: Plan) -> int | None:
    """Patches of the largest image that the model's processor makes.

    None where `model.tokenizer` is no local folder, or its preprocessor_config.json states none.
    """
    folder = plan.tokenizer_path
    tower = plan.sizes.vision
    if folder is None or tower is None:
        return None
    try:
        read = json.loads(Path(folder, "preprocessor_config.json").read_text(encoding="utf-8"))
        pixels = read.get("max_pixels") or read["size"]["longest_edge"]
        return int(pixels) // tower.patch_size**2
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def layers_of_first_chunk(plan: Plan) -> float:
    """Decoder layers next to the embedding; infinity where none are placed (another rule)."""
    try:
        return len(plan.stages[0][0].layers)
    except ValueError:
        return math.inf
