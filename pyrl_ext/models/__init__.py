"""Model families, one a file: HF config -> megatron config, and weight names both ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyrl_ext.models.weights import Weight


@dataclass(frozen=True)
class Family:
    """What is particular to one architecture.

    Args:
        config:  HF config (plain dict) -> keyword arguments of megatron's MLATransformerConfig.
        rotary:  HF config -> (rotated dimensions per head, base).
        weights: HF config -> the table of every tensor of a checkpoint, in export order.
        ignored: patterns of checkpoint names that are left out on purpose -> the reason.
    """

    config: Callable[[dict], dict[str, Any]]
    rotary: Callable[[dict], tuple[int, float]]
    weights: Callable[[dict], list[Weight]]
    ignored: Callable[[dict], dict[str, str]]


def family(name: str) -> Family:
    """The family called ``name``, from ``pyrl_ext/models/<name>.py``."""
    return importlib.import_module(f"pyrl_ext.models.{name}").FAMILY
