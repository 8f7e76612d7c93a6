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
    tokens, scale = 65536 // shrink, 1.8
    for experts, top_k in [(64, 4), (160, 8)]:
        logits = torch.randn(tokens, experts, device=device)
        ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
        given = Given(ids)

        def ours(x: Tensor, ids: Tensor = ids) -> tuple[Tensor, Tensor]:
            return ops.replay_probs(x.sigmoid(), ids, "sum", scale, x.dtype)

        def megatron(x: Tensor, k: int = top_k, given: Any = given) -> tuple[Tensor, Tensor]:
            return topk_routing_with_score_function(
                x, k, scaling_factor=scale, score_function="sigmoid", router_replay=given
            )

        dense = tokens * experts
        name = f"{tokens} x {experts}, top {top_k}"
        yield Case(
            f"sigmoid and forward {name}",
            lambda x=logits, f=ours: f(x),
            {"megatron": lambda x=logits, f=megatron: f(x)},
            moved=4 * dense + ids.nbytes + 5 * dense,
            written=5 * dense,
        )
        grad = torch.randn(tokens, experts, device=device)
        yield Case(
            f"with its backward {name}",
            _both_ways(ours, logits, grad),
            {"megatron": _both_ways(megatron, logits, grad)},
            moved=4 * dense + 2 * ids.nbytes + 5 * dense + 4 * dense,
            written=9 * dense,
        )


def _both_ways(
    routing: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor, grad: Tensor
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(routing(leaf)[0], leaf, grad)[0]

    return run
