"""expert_rows: the rows of a layer's experts, against torch's operators and megatron's sort."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.measure import Case
from pyrl_ext import ops
from pyrl_ext.ops.expert_rows import op, reference

# tokens, experts, experts a token: a wide MoE layer, one of GLM-4.7-Flash and of DeepSeek-V3
SIZES = [(8192, 64, 4), (16384, 64, 4), (32768, 256, 8)]


def by_sort(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and rows as megatron-core's ``permute`` finds them; it has no inverse."""
    turned = routing_map.T.contiguous()
    order = turned.reshape(-1).argsort(descending=True, stable=True)
    order = order[: len(routing_map) * top_k]
    return probs.T.contiguous().reshape(-1)[order], order % len(routing_map)


def same_rows(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs))


def expert_rows(device: str, shrink: int = 1) -> Iterator[Case]:
    """Forward; then forward and backward of the weights."""
    for tokens, experts, top_k in SIZES:
        tokens //= shrink
        probs = torch.rand(tokens, experts, device=device)
        ids = probs.topk(top_k).indices
        chosen = torch.zeros(tokens, experts, dtype=torch.bool, device=device).scatter(1, ids, True)
        grad = torch.rand(tokens * top_k, device=device)

        def forward(
            run: Callable, args: tuple = (chosen, probs, top_k)
        ) -> Callable[[], list[Tensor]]:
            return lambda: [*run(*args)]

        def both(
            run: Callable, args: tuple = (chosen, probs, top_k), grad: Tensor = grad
        ) -> Callable[[], list[Tensor]]:
            leaf = args[1].detach().requires_grad_()
            return lambda: [*torch.autograd.grad(run(args[0], leaf, args[2])[0], leaf, grad)]

        name = f"{tokens}, {top_k} of {experts}"
        rows = tokens * top_k
        dense = tokens * experts
        written = 28 * rows + 8 * tokens
        yield Case(
            f"forward, {name}",
            forward(op),
            {"torch": forward(reference.expert_rows), "sort": forward(by_sort)},
            moved=written + dense + 4 * rows,
            written=written,
            agree=same_rows,
            at_least={"torch": 2, "sort": 2},
        )
        yield Case(
            f"forward and backward, {name}",
            both(ops.expert_rows),
            {"torch": both(reference.expert_rows), "sort": both(by_sort)},
            moved=written + 5 * dense + 28 * rows,
            written=written + 4 * dense,
            agree=same_rows,
        )
