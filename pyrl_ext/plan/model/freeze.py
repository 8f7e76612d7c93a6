"""Patterns of `model.freeze`, over the names that weights have in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from pyrl_ext.plan.model.weight import Weight

ROUTER_BIAS = ".router.expert_bias"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_NUMBER = re.compile(r"\.\d+(?=\.)")


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """True if one of ``patterns`` matches the whole checkpoint name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def names_matched(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Those of ``names`` that a pattern matches; quick for thousands of whole names too."""
    given = set(patterns)
    wild = {pattern for pattern in given if set(pattern) & set("*?[")}
    whole = given - wild
    return {name for name in names if name in whole or is_named(name, wild)}


def frozen_rows(table: Sequence[Weight], patterns: Sequence[str]) -> list[Weight]:
    """The rows of which ``patterns`` name a checkpoint tensor."""
    found = names_matched((name for row in table for name in row.hf_names), patterns)
    return [row for row in table if not found.isdisjoint(row.hf_names)]


def every_layer(name: str) -> str:
    """A name with ``*`` in place of the numbers of its layer and expert."""
    return _NUMBER.sub(".*", name)


def layer_of(row: Weight) -> int | None:
    """0-based global id of the decoder layer that the parameter is in; those of multi-token
    prediction follow the last. None outside of the layers."""
    found = _LAYER.match(row.megatron_name)
    return int(found[1]) if found else None
