"""Model families, one per file: their megatron config and their table of weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyrl_ext.models.blocks import ignored
from pyrl_ext.models.weight_table import Weight
from pyrl_ext.plan.model.sizes import ModelSizes, Yarn


def rotary(sizes: ModelSizes) -> tuple[int, float, Yarn | None]:
    """Arguments of `PackedRotary`: rotated dimensions per head, base, YaRN scaling or None."""
    return sizes.rotary_width, sizes.rope_base, sizes.yarn


@dataclass(frozen=True)
class Family[S: ModelSizes]:
    """The functions that differ between architectures.

    Each takes the architecture's sizes S, which ``plan/model/families/<name>.py`` defines.

    Args:
        config:  (sizes) -> keyword arguments of megatron's TransformerConfig, or of its
                 MLATransformerConfig if they contain ``multi_latent_attention``.
        weights: (sizes, number of MTP layers) -> one row for each parameter, in the order in which
                 the tensors are published.
        rotary:  (sizes) -> rotated dimensions per head, base, YaRN scaling or None.
        ignored: (sizes, number of MTP layers) -> patterns of checkpoint names that are skipped on
                 purpose, with the reason.
    """

    config: Callable[[S], dict[str, Any]]
    weights: Callable[[S, int], list[Weight]]
    rotary: Callable[[S], tuple[int, float, Yarn | None]] = rotary
    ignored: Callable[[S, int], dict[str, str]] = ignored


def family(name: str) -> Family[Any]:
    """The family called ``name``, from ``pyrl_ext/models/<name>.py``."""
    return importlib.import_module(f"pyrl_ext.models.{name}").FAMILY
