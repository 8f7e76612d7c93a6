"""The model that servers hold, by which their answers are checked."""

from __future__ import annotations

from dataclasses import dataclass

from pyrl_ext.plan import Plan
from pyrl_ext.rollout.remote.protocol import Answer, ProtocolError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Sizes of the model, by which answers are checked.

    Args:
        vocab_size: token ids are below it
        num_layers: decoder layers, of which servers report routes, dense ones included
        layer_ids: 0-based global ids of those that have a router
        num_experts, topk: of a router
    """

    vocab_size: int
    num_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    topk: int

    @classmethod
    def of(cls, plan: Plan) -> ServedModel:
        """The model of the plan."""
        sizes = plan.sizes
        layers = plan.router_layers
        return cls(sizes.vocab_size, sizes.num_hidden_layers, layers, sizes.num_experts, sizes.topk)

    def check(self, answer: Answer) -> None:
        """Raises: ProtocolError for tokens and routes that the model cannot have."""
        top = max(answer.token_ids, default=0)
        rows = answer.routes
        if top >= self.vocab_size:
            raise ProtocolError(f"token id {top}, expected at most {self.vocab_size - 1}")
        if not self.layer_ids:
            return
        if rows is None:
            if answer.finish_reason != "abort":
                raise ProtocolError("no routes, expected those of every layer")
            return
        wanted = (self.num_layers, self.topk)
        if rows.shape[1:] != wanted:
            raise ProtocolError(f"routes {rows.shape}, expected [tokens, {wanted[0]}, {wanted[1]}]")
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_experts:
            raise ProtocolError(
                f"experts {rows.min()} to {rows.max()}, expected 0 to {self.num_experts - 1}"
            )
