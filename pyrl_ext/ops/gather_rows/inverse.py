"""invert_rows: where each source row went.

Backends: native (C++, CPU; on cuda torch's sort), triton (cuda: torch's sort), reference (torch).
On a GPU a stable sort of integers is a radix sort, and torch has the one of CUB.
Gradient: none, rows are integers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import need_tensor
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.tensors import on_gpu


class Inverse(NamedTuple):
    """The map from source rows to the places they were gathered to, as compressed rows.

    ``order[starts[n] : starts[n + 1]]`` are the m with ``rows[m] == n``, ascending; ``order`` is -1
    from ``starts[N]`` on.

    Args:
        starts: [N + 1] int64.
        order:  [M] int64.
    """

    starts: Tensor
    order: Tensor

    def check(self, function: str, rows: Tensor, num_src: int | None = None) -> None:
        """Raise where this cannot be the inverse of ``rows``, as far as sizes tell."""
        starts, order = self
        if (
            starts.ndim != 1
            or starts.shape[0] < 1
            or order.shape != rows.shape
            or (num_src is not None and starts.shape[0] != num_src + 1)
        ):
            size = "N" if num_src is None else num_src
            raise ValueError(
                f"{function}: inverse has starts {list(starts.shape)}, order {list(order.shape)}, "
                f"expected [{size} + 1] and {list(rows.shape)}, as invert_rows(rows, {size}) gives"
            )
        if not (starts.dtype == order.dtype == torch.int64):
            raise TypeError(
                f"{function}: inverse is {starts.dtype}, {order.dtype}, expected torch.int64"
            )
        if not (starts.device == order.device == rows.device):
            raise ValueError(
                f"{function}: inverse is on {starts.device}, {order.device}, rows on "
                f"{rows.device}, expected one device"
            )


def _fake(rows: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty(num_src + 1), rows.new_empty(rows.shape[0])


def reference(rows: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
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


def _refuse_host(rows: Tensor, num_src: int) -> str | None:
    return None if on_gpu(rows) else f"rows is on {rows.device}, expected cuda"


op = Op("invert_rows(Tensor rows, SymInt num_src) -> (Tensor, Tensor)", fake=_fake)
op.serve("pyrl_ext.ops.gather_rows", "native")
op.backend("native", reference, refuse=_refuse_host)
op.backend("triton", reference, refuse=_refuse_host)
op.backend("reference", reference)


def invert_rows(rows: Tensor, num_src: int) -> Inverse:
    """The m with ``rows[m] == n``, for every n in [0, num_src).

    Args:
        rows: [M] int64, entries in [-1, num_src); -1 goes nowhere.
        num_src: N, the rows gathered from.

    Returns:
        Inverse: starts [N + 1], order [M], int64 on the device of ``rows``.

    Raises:
        ValueError, TypeError: shape, dtype or size do not fit.
        IndexError: an entry of ``rows`` is out of range (on CPU; on a GPU it is not checked, since
            that would wait for the device).
    """
    need_tensor("invert_rows", "rows", rows)
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise TypeError(
            f"invert_rows: rows is {rows.dtype} {list(rows.shape)}, expected torch.int64 [M]"
        )
    if num_src < 0:
        raise ValueError(f"invert_rows: num_src is {num_src}, expected >= 0")
    return Inverse(*op(rows, num_src))
