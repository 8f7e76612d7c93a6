"""The LoRA adapters that an engine applies itself: which modules have one, and their factors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema.lora import ROUTER, Lora

DOWN = ("down_proj", "w2")  # the latter is Mixtral's
_EXPERT = re.compile(r"\.experts\.\d+\.")


class AdapterTensors(NamedTuple):
    """A module with an adapter adds scale * B A x to its output.

    Args:
        rank: rows of A and columns of B
        scale: of the product
        names: of A [rank, in] and B [out, rank]; experts of a layer may share one of them
    """

    rank: int
    scale: float
    names: tuple[str, str]


Adapters = Mapping[str, AdapterTensors]  # by the checkpoint name of the module, experts one by one


def applied_lora(plan: Plan) -> Lora | None:
    """The plan's adapters, if its engine applies them."""
    return plan.lora if plan.lora_publish == "adapter" else None


def adapters_of(lora: Lora, names: Iterable[str]) -> dict[str, AdapterTensors]:
    """The adapters of a model whose weights have these checkpoint names.

    Raises: ValueError for an adapter of the router, which engines choose experts with before any
        adapter could be added.
    """
    if lora.adapts(ROUTER, expert=False):
        raise ValueError(
            f"lora.targets: {ROUTER} with lora.publish adapter, expected other targets; engines "
            "have no adapters in routers. Use lora.publish: merge"
        )
    found: dict[str, AdapterTensors] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        expert = _EXPERT.search(name) is not None
        if kind != "weight" or not lora.adapts(last, expert):
            continue
        shared = ""
        if expert and lora.experts == "shared_outer":
            shared = "B" if last in DOWN else "A"
        places = (_EXPERT.sub(".experts.", module) if each == shared else module for each in "AB")
        a, b = (f"{place}.lora_{each}.weight" for place, each in zip(places, "AB", strict=True))
        found[module] = AdapterTensors(lora.rank_of(expert), lora.scale_of(expert), (a, b))
    return found


def is_factor(name: str) -> bool:
    """True if a tensor is a factor of an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def need_all_factors(call: str, adapters: Adapters, names: Collection[str]) -> None:
    """Raises ValueError if an update leaves factors out: all of them are of one version."""
    wanted = {factor for adapter in adapters.values() for factor in adapter.names}
    if lacking := sorted(wanted.difference(names)):
        raise ValueError(
            f"{call}: {len(lacking)} factors are not sent, {lacking[:4]}, expected those of every "
            "adapter; they would be of two versions"
        )
