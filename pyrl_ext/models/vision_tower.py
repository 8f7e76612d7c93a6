"""Families with a vision tower: its table of weights, and that of the language model next to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from pyrl_ext.megatron.config import TowerKind
from pyrl_ext.models import Family, TowerFamily
from pyrl_ext.models.weight import Weight
from pyrl_ext.plan.model.sizes import ModelSizes


def tower_rows(sizes: ModelSizes, kind: TowerKind, names: Mapping[str, str]) -> list[Weight]:
    """The table of a tower's weights.

    Args:
        names: part of a megatron name -> the same part of a checkpoint name; replaced in turn.
    """
    assert sizes.vision is not None  # the family has a tower
    tower = sizes.vision
    hidden = sizes.vision.hidden_size
    heads = tower.num_attention_heads
    wide = hidden * tower.merge**2

    def rows() -> Iterator[list[Weight]]:
        yield [
            _same("embedding.weight", hidden, *kind.patch(tower)),
            _same("embedding.bias", hidden),
        ]
        yield [_same("embedding.positions", *kind.positions(tower), hidden)]
        for i in range(tower.num_hidden_layers):
            at = f"decoder.layers.{i}."
            qkv = f"{at}self_attention.linear_qkv"
            yield _norm(at + "input_layernorm", hidden)
            yield [Weight.fused(qkv + ".weight", qkv + ".weight", heads, hidden // heads, hidden)]
            yield [Weight.fused(qkv + ".bias", qkv + ".bias", heads, hidden // heads)]
            yield _out(at + "self_attention.linear_proj", hidden, hidden)
            yield _norm(at + "pre_mlp_layernorm", hidden)
            yield _mlp(at + "mlp.", hidden, tower.intermediate_size, hidden)
        if kind.final_norm:
            yield _norm("decoder.final_layernorm", hidden)
        taken = (f"output_layer.taken.{i}." for i in range(len(tower.deepstack)))
        for at, normed in [("output_layer.last.", hidden), *((at, wide) for at in taken)]:
            yield _norm(at + "norm", normed)
            yield _mlp(at, wide, wide, sizes.hidden_size)

    return [_renamed(row, names) for row in chain.from_iterable(rows())]


def _renamed(row: Weight, names: Mapping[str, str]) -> Weight:
    (name,) = row.hf_names
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return replace(row, hf_names=(name,))


def _same(name: str, *size: int) -> Weight:
    return Weight.same(name, name, *size)


def _norm(name: str, width: int) -> list[Weight]:
    return [_same(f"{name}.{kind}", width) for kind in ("weight", "bias")]


def _out(name: str, rows: int, columns: int) -> list[Weight]:
    weight = f"{name}.weight"
    return [Weight.columns(weight, weight, rows, columns), _same(f"{name}.bias", rows)]


def _mlp(at: str, width: int, inner: int, out: int) -> list[Weight]:
    weight = f"{at}linear_fc1.weight"
    bias = f"{at}linear_fc1.bias"
    first = [Weight.rows(weight, weight, inner, width), Weight.rows(bias, bias, inner)]
    return [*first, *_out(f"{at}linear_fc2", out, inner)]


# the language model next to a tower ---------------------------------------------------------------


def family_with_tower[S: ModelSizes](
    text: Family[S], moved: Mapping[str, str], kind: TowerKind, names: Mapping[str, str]
) -> Family[S]:
    """The family of a language model next to a tower.

    Args:
        text: of the language model alone.
        moved: beginning of its checkpoint names -> what it is beside a tower.
        names: see `tower_rows`.
    """

    def beside(name: str) -> str:
        fitting = (start for start in moved if name.startswith(start))
        return next((moved[start] + name.removeprefix(start) for start in fitting), name)

    def weights(sizes: S, mtp_layers: int) -> list[Weight]:
        return [
            replace(row, hf_names=tuple(map(beside, row.hf_names)))
            for row in text.weights(sizes, mtp_layers)
        ]

    def ignored(sizes: S, mtp_layers: int) -> dict[str, str]:
        given = text.ignored(sizes, mtp_layers)
        moved = {rf"(.*\.)?{p.removeprefix(r'model\.')}": why for p, why in given.items()}
        return moved | _places(tower.weights(sizes), "the vision tower's")

    tower = TowerFamily(
        kind,
        weights=partial(tower_rows, kind=kind, names=names),
        ignored=lambda sizes: _places(weights(sizes, 0), "the language model's"),
    )
    return replace(text, weights=weights, ignored=ignored, tower=tower)


def _places(table: list[Weight], why: str) -> dict[str, str]:
    """Patterns of all names that begin as those of ``table`` do."""
    beginnings = {".".join(name.split(".")[:2]) for row in table for name in row.hf_names}
    return {rf"{re.escape(each)}(\..*)?": why for each in sorted(beginnings)}
