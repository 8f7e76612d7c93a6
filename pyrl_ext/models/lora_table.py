"""The factors of adapters as rows of a weight table: one A and one B for
each HF linear, also where megatron fuses several, and for each routed expert."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyrl_ext.models.weight_table import stream_of
from pyrl_ext.plan.model.weight import Shard, Weight
from pyrl_ext.plan.schema.lora import Lora

_FIRST_EXPERT = re.compile(r"\.(local_)?experts\.0\.")


def linear_of(name: str) -> str:
    """The last name of a linear: ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    return name.split(".")[-2]


def targeted(row: Weight, lora: Lora) -> list[int]:
    """Which of ``row.hf_names`` are weights of linears with an adapter."""
    return [
        i
        for i, name in enumerate(row.hf_names)
        if name.endswith(".weight") and lora.adapts(linear_of(name), row.expert is not None)
    ]


def adapter_rows(row: Weight, lora: Lora) -> list[Weight]:
    """The rows of the adapter of one weight: of its A, and of its B; none if it has no adapter.

    The parameter ``X.weight`` has the factors ``X.lora_A``, the A [rank, in] of its HF linears
    stacked, and ``X.lora_B``, their B [out, rank], cut as the weight is. A factor that all experts
    of a layer share comes with expert 0.
    """
    if not (which := targeted(row, lora)):
        return []
    rank = lora.rank_of(row.expert is not None)
    shapes = [row.shapes[i] for i in which]
    a = _factor(row, "A", which, [(rank, size[1]) for size in shapes])
    b = _factor(row, "B", which, [(size[0], rank) for size in shapes])
    if row.shard == "columns":  # an expert's "down", whose B faces the hidden size
        shared = b
        a = replace(a, shard="columns")
    else:
        shared = a
        b = replace(b, shard=_shard_of_b(row, len(which)))
    if row.expert is None or lora.experts == "per_expert":
        return [a, b]
    each = b if shared is a else a
    return [_of_all_experts(shared), each] if row.expert == 0 else [each]


def _factor(
    row: Weight, letter: str, which: Sequence[int], shapes: list[tuple[int, int]]
) -> Weight:
    names = (row.hf_names[i].replace(".weight", f".lora_{letter}.weight") for i in which)
    megatron = row.megatron_name.removesuffix(".weight") + f".lora_{letter}"
    return replace(
        row,
        hf_names=tuple(names),
        megatron_name=megatron,
        shard="same",
        shapes=tuple(shapes),
        sections=tuple(row.sections[i] for i in which) if row.sections else (),
    )


def _shard_of_b(row: Weight, linears: int) -> Shard:
    return "rows" if row.shard in ("gated", "grouped") and linears == 1 else row.shard


def _of_all_experts(row: Weight) -> Weight:
    """The row of a factor that all experts of a layer share: the expert's number left out."""
    names = tuple(_FIRST_EXPERT.sub(".experts.", name) for name in row.hf_names)
    name = _FIRST_EXPERT.sub(".", row.megatron_name)
    return replace(row, hf_names=names, megatron_name=name, expert=None)


def adapter_table(table: Iterable[Weight], lora: Lora) -> list[Weight]:
    """The rows of all factors, in the order of the weights in ``table``."""
    return [factor for row in table for factor in adapter_rows(row, lora)]


class RandomFactors:
    """Initial factors by name, from a seed, the same under every layout: A as PEFT draws it,
    uniform within 1 / sqrt(in), each from a random stream for its name; B zero."""

    def __init__(self, table: Sequence[Weight], seed: int):
        self.seed = seed
        self.shapes = {n: s for w in table for n, s in zip(w.hf_names, w.shapes, strict=True)}

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith(".lora_B.weight"):
            return torch.zeros(shape)
        drawn = torch.rand(shape, generator=stream_of(name, self.seed))
        return (drawn * 2 - 1) / math.sqrt(shape[1])
