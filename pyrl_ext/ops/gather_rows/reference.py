import torch
from torch import Tensor


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    """Append ``fill`` to ``src`` as a last row, and index. Syncs on cuda (the range check)."""
    outside = (rows < -1) | (rows >= src.shape[0])
    if outside.any():
        i = int(outside.nonzero()[0])
        raise IndexError(
            f"gather_rows: rows[{i}] is {int(rows[i])}, expected -1 (fill) or a row of src in "
            f"[0, {src.shape[0]})"
        )
    return torch.cat([src, fill[None]])[rows]  # -1 is the last row
