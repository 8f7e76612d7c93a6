"""The section `lora` of the YAML: low-rank adapters on a frozen base."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pyrl_ext.plan.language.fields import Positive, Rate, RelativePath, Section, Text

TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "w1",  # Mixtral's names of gate, up and down
    "w3",
    "w2",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj",
    "out_proj",
)
"""Last parts of the HF names of the linears that `targets: all` means, where a family has them."""
ROUTER = "gate"
"""The router's weight, which has an adapter only if it is named."""


class Lora(Section):
    """Adapters that are trained in place of the weights: W x + alpha / rank * B A x, W frozen."""

    rank: Positive
    """rows of A and columns of B"""
    expert_rank: Positive | None = None
    """rank of the routed experts' adapters; null: rank"""
    alpha: Rate
    """an adapter is added times alpha / its rank"""
    targets: Literal["all"] | list[Text] = "all"
    """linears with an adapter, as a list of the last parts of their HF names, such as q_proj; all:
    every one of attention, layers with states, dense layers and experts; the router only if the
    list has gate"""
    experts: Literal["per_expert", "shared_outer", "none"] = "per_expert"
    """adapters of routed experts. per_expert: A and B for each; shared_outer: the experts of a
    layer share A of gate and up, and B of down; none: they have none"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """only 0: the trained policy must be the one that samples"""
    publish: Literal["merge", "adapter"] | None = None
    """what the engine gets. merge: W + alpha / rank * B A, rounded to its dtype; adapter: A and B,
    which it applies itself; null: adapter where the engine applies all of them, else merge"""
    weights: Annotated[Text, RelativePath()] | None = None
    """folder of a PEFT adapter to start from, relative to this YAML file; null: A is drawn from the
    seed, B is zero"""

    def adapts(self, linear: str, expert: bool) -> bool:
        """True if a linear has an adapter, called by the last part of its HF name."""
        wanted = TARGETS if self.targets == "all" else self.targets
        return linear in wanted and not (expert and self.experts == "none")

    def rank_of(self, expert: bool) -> int:
        """The rank of an adapter of a routed expert, or of any other."""
        return self.expert_rank or self.rank if expert else self.rank

    def scale_of(self, expert: bool) -> float:
        """The factor with which such an adapter is added."""
        return self.alpha / self.rank_of(expert)
