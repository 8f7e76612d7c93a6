"""replay_probs: what a router computes for experts that are given, against megatron-core's own."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from benchmarks.measure import Case
from pyrl_ext import ops


class Given:
    """Hands megatron's routing function the experts of ``ids``, as its own replay does."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def get_replay_topk(self, scores: Tensor, *_args: object, **_kwargs: object) -> tuple:
        return scores.gather(1, self.ids), self.ids


def replay_probs(device: str, shrink: int = 1) -> Iterator[Case]:
    """The operator alone, against the same steps in torch; then a whole router from its logits,
    forward and backward. Ours takes the ids as they are kept, uint8; megatron's need int64."""
    tokens = 65536 // shrink
    scale = 1.8
    for experts, top_k in [(64, 4), (160, 8)]:
        logits = torch.randn(tokens, experts, device=device)
        scores = logits.sigmoid()
        grad = torch.randn_like(logits)
        wide = torch.rand_like(logits).topk(top_k).indices
        ids = wide.to(torch.uint8)
        given = Given(wide)

        def ours(x: Tensor, ids: Tensor = ids) -> tuple[Tensor, Tensor]:
            return ops.replay_probs(x.sigmoid(), ids, "sum", scale, x.dtype)

        def megatron(x: Tensor, k: int = top_k, given: Any = given) -> tuple[Tensor, Tensor]:
            return topk_routing_with_score_function(
                x, k, scaling_factor=scale, score_function="sigmoid", router_replay=given
            )

        dense = tokens * experts
        chosen = tokens * top_k
        name = f"{tokens} x {experts}, top {top_k}"
        yield Case(
            f"probs and map from scores, {name}",
            lambda x=scores, i=ids: ops.replay_probs(x, i, "sum", scale, x.dtype),
            {"torch": lambda x=scores, i=wide: in_torch(x, i, scale)},
            moved=5 * dense + 5 * chosen,
            written=5 * dense,
        )
        yield Case(
            f"router forward, {name}",
            lambda x=logits, f=ours: f(x),
            {"megatron": lambda x=logits, f=megatron: f(x)},
            moved=9 * dense + chosen,
            written=5 * dense,
        )
        yield Case(
            f"router forward and backward, {name}",
            _both_ways(ours, logits, grad),
            {"megatron": _both_ways(megatron, logits, grad)},
            moved=13 * dense + 6 * chosen,
            written=9 * dense,
        )


def in_torch(scores: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    values = scores.gather(1, ids)
    values = values / (values.sum(-1, keepdim=True) + 1e-20) * scale
    chosen = torch.zeros_like(scores).int().scatter(1, ids, 1).bool()
    return torch.zeros_like(scores).scatter(1, ids, values), chosen


def _both_ways(
    routing: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor, grad: Tensor
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(routing(leaf)[0], leaf, grad)[0]

    return run
