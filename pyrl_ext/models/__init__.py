"""Model families, one a file: sizes -> megatron config, and weight names both ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyrl_ext.models.blocks import ignored
from pyrl_ext.models.weight_table import Weight
from pyrl_ext.plan.model.sizes import Yarn


def rotary(sizes: Any) -> tuple[int, float, Yarn | None]:
    """What `PackedRotary` is built from, as the sizes say it."""
    return sizes.rotary_width, sizes.rope_base, sizes.yarn


@dataclass(frozen=True)
class Family:
    """What is particular to one architecture. All take its sizes, of ``plan/families/<name>.py``.

    Args:
        config:  sizes -> keyword arguments of megatron's TransformerConfig, or with
                 ``multi_latent_attention`` of its MLATransformerConfig.
        weights: sizes, number of MTP layers -> the table of every tensor of a
                 checkpoint, in the order they are published.
        rotary:  sizes -> (rotated dimensions per head, base, stretching or None).
        ignored: as weights -> patterns of checkpoint names left out on purpose, with the reason.
    """

    config: Callable[[Any], dict[str, Any]]
    weights: Callable[[Any, int], list[Weight]]
    rotary: Callable[[Any], tuple[int, float, Yarn | None]] = rotary
    ignored: Callable[[Any, int], dict[str, str]] = ignored


def family(name: str) -> Family:
    """The family called ``name``, from ``pyrl_ext/models/<name>.py``."""
    return importlib.import_module(f"pyrl_ext.models.{name}").FAMILY
