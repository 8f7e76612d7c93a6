import torch
from torch import Tensor


def gather_routes(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int) -> Tensor:
    """Index tokens and layers, bring layers to the front, put the spread experts into padding."""
    T, L, K = routes.shape
    check("layers", layers, 0, L, "a slot of routes")
    if rows.device.type == "cpu":
        check("rows", rows, -1, T, "-1 (padding) or a token of routes")
    padding = (rows < 0)[None, :, None]
    fill = (torch.arange(len(rows) * K, device=rows.device) % num_experts).view(1, len(rows), K)
    if T == 0:  # padding only
        return fill.expand(len(layers), -1, -1).to(routes.dtype)
    slots = layers.to(rows.device, non_blocking=True)
    picked = routes.to(torch.int64)[rows.clamp(min=0)].index_select(1, slots)
    return torch.where(padding, fill, picked.transpose(0, 1)).to(routes.dtype).contiguous()


def check(name: str, entries: Tensor, lowest: int, end: int, rule: str) -> None:
    """Raise IndexError if an entry is outside [lowest, end)."""
    outside = (entries < lowest) | (entries >= end)
    if outside.any():
        i = int(outside.nonzero()[0])
        raise IndexError(
            f"gather_routes: {name}[{i}] is {int(entries[i])}, expected {rule} in [0, {end})"
        )
