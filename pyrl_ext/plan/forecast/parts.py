"""Parts of a pass: kinds of work, and the rate that each is assumed to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pyrl_ext.plan.forecast.measured import in_use
from pyrl_ext.plan.forecast.workload import Bin
from pyrl_ext.plan.plan import Plan

# score: a forward pass for log-probs; forward, backward: the two passes of an update.
Work = Literal["score", "forward", "backward"]


class Reached(NamedTuple):
    """The share of a data sheet's rate that a kind of kernel is assumed to reach."""

    share: float
    why: str


# Assumptions. `plan --calibrate` takes measured rates in place of those that one GPU can show.
REACHED = {
    "projections": Reached(0.6, "matrix products of thousands of rows"),
    "grouped experts": Reached(0.5, "one grouped product for all experts of a rank"),
    "attention": Reached(0.4, "packed causal attention, counting the unmasked half"),
    "scan": Reached(0.25, "products within chunks of 64 to 256 rows, and with states"),
    "head": Reached(0.4, "chunks whose float32 logits are written once and read twice"),
    "fp8": Reached(0.45, "8-bit products, with the scaling of their inputs"),
    "memory": Reached(0.8, "long sequential reads and writes"),
    "ring": Reached(0.75, "collectives of tens of MB"),
    "exchange": Reached(0.6, "all-to-all with parts of unequal size"),
    "host": Reached(0.8, "pinned memory"),
}


@dataclass(frozen=True)
class Part:
    """One kind of work of a model chunk on one rank."""

    name: str
    unit: Literal["FLOP", "byte"]
    rate: float
    """Amount per second."""
    why: str
    fixed: float = 0.0
    """Amount for a microbatch."""
    row: float = 0.0
    """Amount for every row of its bin."""
    pair: float = 0.0
    """Amount for every causal pair of query and key."""
    scored: float = 0.0
    """Amount for every scored row."""

    def amount(self, of: Bin, microbatches: int) -> float:
        """The amount for `microbatches` whose rows add up to `of`."""
        fixed = self.fixed * microbatches
        return fixed + self.row * of.rows + self.pair * of.pairs + self.scored * of.scored


def reached(kind: str, peak: float, unit: str = "FLOP") -> tuple[float, str]:
    """(rate, where it is from, in words) of a kind of kernel: the measured one if there is one for
    this peak, otherwise the assumed share."""
    share, why = REACHED[kind]
    measured = in_use()
    found = measured.rates.get(kind) if measured else None
    if measured and found and found.peak == peak:
        return found.rate, f"{_shown(found.rate, unit)} measured on {measured.device}: {found.what}"
    return share * peak, f"{share:.0%} of {_shown(peak, unit)}: {why}"


def _shown(rate: float, unit: str) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s" if unit == "FLOP" else f"{rate / 1e9:.4g} GB/s"


def sources() -> Iterator[str]:
    """Sentences about the rates: which were measured, and which are assumed."""
    measured = in_use()
    if measured is None:
        return
    taken = ", ".join(
        f"{kind} {each.rate / each.peak:.0%} (assumed {REACHED[kind].share:.0%})"
        for kind, each in measured.rates.items()
    )
    yield f"measured on {measured.device}, of the data sheet's rate: {taken} ({measured.source})"
    kept = [kind for kind in REACHED if kind not in measured.rates]
    yield f"assumed as before: {', '.join(kept)}; and products in other types than bfloat16"


def computed_again(plan: Plan) -> frozenset[str]:
    """Kinds of work that the backward pass recomputes."""
    if plan.model.recompute == "none":
        return frozenset()
    selected = {"attention", "experts", "context parallel", "expert parallel"}
    if plan.model.recompute == "selective":  # core attention and experts
        return frozenset(selected)
    return frozenset({*selected, "projections", "scan", "memory", "tensor parallel"})
