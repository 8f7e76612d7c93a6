import torch
from torch import Tensor


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> Tensor:
    """Append ``fill`` to ``src`` as a last row, and index. Syncs on cuda (the range check)."""
    check_range("gather_rows", rows, src.shape[0])
    fill = src.new_zeros(src.shape[1:]) if fill is None else fill
    return torch.cat([src, fill[None]])[rows]  # -1 is the last row


def invert_rows(rows: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
    """Sort stably; entries of -1 behind all others."""
    if rows.device.type == "cpu":
        check_range("invert_rows", rows, num_src)
    ordered, order = torch.sort(rows.where(rows >= 0, num_src), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_src + 1, device=rows.device))
    return starts, order.masked_fill(ordered == num_src, -1)


def check_range(function: str, rows: Tensor, num_src: int) -> None:
    outside = (rows < -1) | (rows >= num_src)
    if outside.any():
        raise out_of_range(function, rows, int(outside.nonzero()[0]), num_src)


def out_of_range(function: str, rows: Tensor, at: int, num_src: int) -> IndexError:
    return IndexError(
        f"{function}: rows[{at}] is {int(rows[at])}, expected -1 (fill) or a row of src in "
        f"[0, {num_src})"
    )
