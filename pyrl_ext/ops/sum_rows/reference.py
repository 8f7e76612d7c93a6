import torch
from torch import Tensor

from pyrl_ext.ops.on_gpu import on_gpu


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    """Add the first row of every sum, then the second, and so on. Syncs on cuda (how many)."""
    if not on_gpu(src) and (bad := _wrong(starts, order, len(src)).nonzero()).numel():
        raise wrong_entries(int(bad[0]), starts, order, len(src))
    wide = torch.promote_types(src.dtype, torch.float32)
    out = src.new_zeros((len(starts) - 1, *src.shape[1:]), dtype=wide)
    counts = starts.diff()
    for j in range(int(counts.max()) if len(counts) else 0):
        n = (counts > j).nonzero().squeeze(1)
        out[n] += src[order[starts[n] + j]].to(wide)
    return out.to(src.dtype)


def _wrong(starts: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """[N] bool: sums whose entries are not within ``order``, or not rows."""
    begin = starts[:-1]
    end = starts[1:]
    outside = ((order < 0) | (order >= num_rows)).cumsum(0)
    before = torch.cat([outside.new_zeros(1), outside])
    first, last = (place.clamp(0, len(order)) for place in (begin, end))
    inside = (begin >= 0) & (begin <= end) & (end <= len(order))
    return ~inside | (before[last] > before[first])


def wrong_entries(bad: int, starts: Tensor, order: Tensor, num_rows: int) -> IndexError:
    """The error of a sum whose entries are not rows."""
    at = int(starts[bad])
    end = int(starts[bad + 1])
    return IndexError(
        f"sum_rows: inverse.starts[{bad} : {bad + 2}] is [{at}, {end}] with entries "
        f"{order[at:end].tolist()[:8]}, expected rows of src in [0, {num_rows}), as "
        "invert_rows(rows, N) gives"
    )
