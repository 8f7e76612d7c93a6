import torch
from torch import Tensor


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    """Add the first row of every sum, then the second, and so on. Syncs on cuda (how many)."""
    wide = torch.promote_types(src.dtype, torch.float32)
    out = src.new_zeros((len(starts) - 1, *src.shape[1:]), dtype=wide)
    counts = starts.diff()
    for j in range(int(counts.max()) if len(counts) else 0):
        n = (counts > j).nonzero().squeeze(1)
        out[n] += src[order[starts[n] + j]].to(wide)
    return out.to(src.dtype)
