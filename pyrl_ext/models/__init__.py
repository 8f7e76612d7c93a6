"""Model families, one per file: their megatron config and their table of weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyrl_ext.megatron.config import TowerKind
from pyrl_ext.models.blocks import ignored
from pyrl_ext.models.weight import Weight
from pyrl_ext.plan.model.sizes import ModelSizes


@dataclass(frozen=True)
class TowerFamily:
    """The functions of a family's vision tower.

    Args:
        kind:    how it is built of its sizes.
        weights: (sizes of the model) -> as in `Family`, of the tower alone.
        ignored: (sizes of the model) -> as in `Family`: the language model's tensors.
    """

    kind: TowerKind
    weights: Callable[[Any], list[Weight]]
    ignored: Callable[[Any], dict[str, str]]


@dataclass(frozen=True)
class Family[S: ModelSizes]:
    """The functions that differ between architectures.

    Each takes the architecture's sizes S, which ``plan/model/families/<name>.py`` defines.

    Args:
        config:  (sizes) -> keyword arguments of megatron's TransformerConfig, or of its
                 MLATransformerConfig if they contain ``multi_latent_attention``.
        weights: (sizes, number of MTP layers) -> one row for each parameter, in the order in which
                 the tensors are published.
        ignored: (sizes, number of MTP layers) -> patterns of checkpoint names that are skipped on
                 purpose, with the reason.
        tower:   the vision tower, of families that have one.
    """

    config: Callable[[S], dict[str, Any]]
    weights: Callable[[S, int], list[Weight]]
    ignored: Callable[[S, int], dict[str, str]] = ignored
    tower: TowerFamily | None = None


def family(name: str) -> Family[Any]:
    """The family called ``name``, from ``pyrl_ext/models/<name>.py``."""
    return importlib.import_module(f"pyrl_ext.models.{name}").FAMILY
