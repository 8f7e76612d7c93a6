"""Families with a vision tower: the tower's weight table, and the language model's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pyrl_ext.plan.model.sizes import ModelSizes
from pyrl_ext.plan.model.towers import TowerKind
from pyrl_ext.plan.model.weight import Weight

# pydantic would take the fields of the first base, not those of the text family
_Mixin = ModelSizes if TYPE_CHECKING else object


class VisionLanguage(_Mixin):
    """A language model with a vision tower; a family has its text family as second base."""

    tower_kind: ClassVar[TowerKind]
    tower_names: ClassVar[Mapping[str, str]]
    """Part of a megatron name of the tower -> part of its checkpoint name, replaced in turn."""
    text_prefix: ClassVar[tuple[str, str]]
    """Prefix of the checkpoint names of the text family, and its replacement here."""

    def hf_name(self, name: str) -> str:
        name = super().hf_name(name)
        alone, here = self.text_prefix
        return here + name.removeprefix(alone) if name.startswith(alone) else name

    def ignored(self, mtp_layers: int) -> dict[str, str]:
        patterns = super().ignored(mtp_layers).items()
        moved = {rf"(.*\.)?{p.removeprefix(r'model\.')}": reason for p, reason in patterns}
        return moved | _patterns(self.tower_weights(), "the vision tower's")

    def tower_ignored(self) -> dict[str, str]:
        """`ignored` of the tower alone: the language model's tensors."""
        return _patterns(self.weights(0), "the language model's")

    def tower_weights(self) -> list[Weight]:
        """The weight table of the tower alone."""
        assert self.vision is not None  # the rules refuse a config without one
        tower = self.vision
        kind = self.tower_kind
        hidden = tower.hidden_size
        rows = [
            _same("embedding.weight", hidden, *kind.patch(tower)),
            _same("embedding.bias", hidden),
            _same("embedding.positions", *kind.positions(tower), hidden),
        ]
        for layer in range(tower.num_hidden_layers):
            prefix = f"decoder.layers.{layer}."
            rows += _attention(prefix, hidden, tower.num_attention_heads)
            rows += _norm(prefix + "pre_mlp_layernorm", hidden)
            rows += _mlp(prefix + "mlp.", hidden, tower.intermediate_size, hidden)
        if kind.final_norm:
            rows += _norm("decoder.final_layernorm", hidden)
        wide = hidden * tower.merge**2
        projections = {"output_layer.last.": hidden}
        projections |= {f"output_layer.taken.{i}.": wide for i in range(len(tower.deepstack))}
        for prefix, normalized in projections.items():
            rows += _norm(prefix + "norm", normalized)
            rows += _mlp(prefix, wide, wide, self.hidden_size)
        return [replace(row, hf_names=(self._tower_name(row),)) for row in rows]

    def _tower_name(self, row: Weight) -> str:
        name = row.megatron_name
        for megatron, hf in self.tower_names.items():
            name = name.replace(megatron, hf)
        return name


def _same(name: str, *size: int) -> Weight:
    return Weight.same(name, name, *size)


def _norm(name: str, width: int) -> list[Weight]:
    return [_same(f"{name}.weight", width), _same(f"{name}.bias", width)]


def _attention(prefix: str, hidden: int, heads: int) -> list[Weight]:
    weight = f"{prefix}self_attention.linear_qkv.weight"
    bias = f"{prefix}self_attention.linear_qkv.bias"
    width = hidden // heads
    return [
        *_norm(prefix + "input_layernorm", hidden),
        Weight.fused(weight, weight, heads, width, hidden),
        Weight.fused(bias, bias, heads, width),
        *_output(prefix + "self_attention.linear_proj", hidden, hidden),
    ]


def _mlp(prefix: str, width: int, inner: int, out: int) -> list[Weight]:
    weight = f"{prefix}linear_fc1.weight"
    bias = f"{prefix}linear_fc1.bias"
    return [
        Weight.rows(weight, weight, inner, width),
        Weight.rows(bias, bias, inner),
        *_output(f"{prefix}linear_fc2", out, inner),
    ]


def _output(name: str, rows: int, columns: int) -> list[Weight]:
    weight = f"{name}.weight"
    return [Weight.columns(weight, weight, rows, columns), _same(f"{name}.bias", rows)]


def _patterns(table: Iterable[Weight], reason: str) -> dict[str, str]:
    """Patterns of all names that begin as those of ``table`` do."""
    prefixes = {".".join(name.split(".")[:2]) for row in table for name in row.hf_names}
    return {rf"{re.escape(prefix)}(\..*)?": reason for prefix in sorted(prefixes)}
