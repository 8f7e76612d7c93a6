"""The check that the experts of a route are experts of the model, and distinct."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

_ROWS_AT_ONCE = 1 << 14
"""Rows of one part. Within a part, ids out of range are reported before repeated ids."""
_BYTES_AT_ONCE = 1 << 18
"""Size of a copy that stays in the processor's cache [bytes]."""


class WrongRoute(NamedTuple):
    """The first wrong route of some rows.

    Args:
        row:   of the routes.
        slot:  of the layer in them.
        found: experts and what is wrong with them.
        expected: what they should be.
    """

    row: int
    slot: int
    found: str
    expected: str


def first_wrong(routes: Tensor, rows: Tensor, num_experts: int | None) -> WrongRoute | None:
    """The first of ``rows`` whose expert ids are out of range, or twice in one layer; None: none.

    Args:
        routes: [T, L, K] integers.
        rows: [N] int64, those that are checked, on the device of ``routes``.
        num_experts: experts of a layer; None: only repeated ids are found.

    Syncs: copies ``rows`` of ``routes`` to the host.
    """
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[first : first + _ROWS_AT_ONCE]
        if all(_are_right(ids, num_experts) for ids in _on_host(routes, part)):
            continue
        wrong = _first_of(routes[part].cpu().numpy(), num_experts)
        if wrong is not None:
            return wrong._replace(row=int(part[wrong.row]))
    return None


def _on_host(routes: Tensor, rows: Tensor) -> Iterator[np.ndarray]:
    """The ``rows`` of ``routes``, a few at a time: [n, L, K]."""
    if routes.device.type == "cpu":
        ids = routes.numpy()
        at = rows.numpy()
    else:
        ids = routes[rows].cpu().numpy()
        at = np.arange(len(ids))
    row_bytes = prod(ids.shape[1:]) * ids.itemsize
    at_once = max(1, _BYTES_AT_ONCE // max(1, row_bytes))
    for first in range(0, len(at), at_once):
        yield ids[at[first : first + at_once]]


def _are_right(ids: np.ndarray, num_experts: int | None) -> bool:
    """True if all of ``ids`` [n, L, K] are in range, and the K of each layer are distinct."""
    narrow = np.dtype(f"u{ids.itemsize}")
    if num_experts is not None:
        highest = min(num_experts - 1, np.iinfo(ids.dtype).max)
        # as an unsigned number, a negative id is larger than all that its type holds
        if ids.view(narrow).max(initial=0) > highest:
            return False
        narrow = np.min_scalar_type(highest)
    slots = ids.transpose(2, 0, 1).astype(narrow, order="C")  # [K, n, L]
    return not any((slots[:k] == slots[k]).any() for k in range(1, len(slots)))


def _first_of(ids: np.ndarray, num_experts: int | None) -> WrongRoute | None:
    """The first wrong route of ``ids`` [n, L, K]; one out of range comes before a repeated one."""
    wrong = {"repeat": (_repeated(ids), f"{ids.shape[2]} distinct ids")}
    if num_experts is not None:
        outside = ((ids < 0) | (ids >= num_experts)).any(2)
        wrong = {"are out of range": (outside, f"ids from 0 to {num_experts - 1}")} | wrong
    for what, (where, expected) in wrong.items():
        if where.any():
            row, slot = map(int, np.argwhere(where)[0])
            return WrongRoute(row, slot, f"experts {ids[row, slot].tolist()} {what}", expected)
    return None


def _repeated(ids: np.ndarray) -> np.ndarray:
    """[n, L, K] -> [n, L] bool, whether two of the K are equal."""
    ordered = np.sort(ids, axis=2)
    return (ordered[:, :, 1:] == ordered[:, :, :-1]).any(2)
