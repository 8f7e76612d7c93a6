import torch
from torch import Tensor


def expert_rows(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, ...]:
    counts = routing_map.sum(0, dtype=torch.int32)
    if routing_map.device.type == "cpu":
        check_top_k(routing_map, top_k)
    tokens, experts = routing_map.shape
    size = tokens * top_k
    by_expert = torch.nonzero_static(routing_map.T.reshape(-1), size=size).squeeze(1)
    by_token = torch.nonzero_static(routing_map.reshape(-1), size=size).squeeze(1)
    expert = by_expert.div(max(tokens, 1), rounding_mode="floor")
    rows = by_expert - expert * tokens
    places = rows * experts + expert
    row_of = rows.new_empty(tokens * experts)
    row_of[places] = torch.arange(size, device=rows.device)
    starts = torch.arange(0, size + 1, top_k, device=rows.device)
    return probs.reshape(-1)[places], rows, starts, row_of[by_token], places, counts


def expert_rows_grad(
    grad: Tensor, order: Tensor, places: Tensor, tokens: int, experts: int
) -> Tensor:
    out = grad.new_zeros(tokens * experts)
    out[places] = grad
    return out.view(tokens, experts)


def new_outputs(probs: Tensor, top_k: int) -> tuple[Tensor, ...]:
    """Empty weights, rows, starts, order, places and counts."""
    tokens, experts = probs.shape
    size = tokens * top_k
    rows, order, places = (probs.new_empty(size, dtype=torch.int64) for _ in range(3))
    starts = probs.new_empty(tokens + 1, dtype=torch.int64)
    counts = probs.new_empty(experts, dtype=torch.int32)
    return probs.new_empty(size), rows, starts, order, places, counts


def check_top_k(routing_map: Tensor, top_k: int) -> None:
    found = routing_map.sum(1)
    for t in (found != top_k).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"expert_rows: routing_map[{t}] has {int(found[t])} experts, expected top_k {top_k}"
        )
