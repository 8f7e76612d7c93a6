"""gather_fields: the same rows of many tensors, in one launch, into one buffer.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch).
Gradient: none, fields are data; gather_rows has one.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import copysign, prod
from typing import NamedTuple

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import need_tensor
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.gather_rows.inverse import check_range
from pyrl_ext.ops.tensors import on_gpu

ALIGN = 256  # bytes, the alignment of a device's own allocations


class Fields(NamedTuple):
    """Fields gathered by :func:`gather_fields`.

    Args:
        flat:  [bytes] uint8, all fields, each from a multiple of 256 bytes on; what lies between
            them is unspecified.
        views: the fields in ``flat``, in the order they were given: [M, ...] each of its dtype.
    """

    flat: Tensor
    views: list[Tensor]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Fields":
        """Copy all fields to ``device`` at once.

        Syncs: unless ``non_blocking`` from pinned memory to a device.
        """
        return self.via(lambda flat: flat.to(device, non_blocking=non_blocking))

    def via(self, copy: Callable[[Tensor], Tensor]) -> "Fields":
        """The fields as views of ``copy(flat)``."""
        flat = copy(self.flat)
        return Fields(flat, _views(flat, self.views, len(self.views[0])))


def flat_layout(fields: Sequence[Tensor], num_out: int) -> tuple[list[int], list[int]]:
    """The byte offset of each field in the flat tensor, then its size; the row bytes of each."""
    starts = [0]
    row_bytes = []
    for field in fields:
        width = 1 if field.ndim == 1 else prod(field.shape[1:])
        row_bytes.append(field.element_size() * width)
        starts.append(starts[-1] + -(-num_out * row_bytes[-1] // ALIGN) * ALIGN)
    return starts, row_bytes


def pattern(dtype: torch.dtype, fill: float) -> int:
    """The bytes of ``fill`` in ``dtype``, repeated to 8, as a signed integer.

    Raises:
        ValueError: ``dtype`` does not hold ``fill``.
    """
    return _pattern(dtype, fill, copysign(1, fill))  # -0.0 and 0.0 are one key


@lru_cache(maxsize=256)
def _pattern(dtype: torch.dtype, fill: float, _sign: float) -> int:
    if not dtype.is_floating_point:
        top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
        lowest = 0 if dtype == torch.bool else torch.iinfo(dtype).min
        # a double holds whole numbers below 2^53
        if not (fill == fill // 1 and lowest <= fill <= top and abs(fill) < 2**53):
            raise ValueError(
                f"gather_fields: a fill is {fill}, expected a number that {dtype} holds"
            )
        fill = int(fill)
    element = torch.tensor([fill], dtype=dtype).view(torch.uint8).tolist()
    return struct.unpack("<q", bytes(element * (8 // len(element))))[0]


def _views(flat: Tensor, like: Sequence[Tensor], num_out: int) -> list[Tensor]:
    starts, row_bytes = flat_layout(like, num_out)
    typed = {dtype: flat.view(dtype) for dtype in {field.dtype for field in like}}
    views = []
    for field, start, each in zip(like, starts, row_bytes):
        size = field.element_size()
        view = typed[field.dtype][start // size : (start + num_out * each) // size]
        views.append(view if field.ndim == 1 else view.view(num_out, *field.shape[1:]))
    return views


def reference(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> Tensor:
    """Index the bytes of every field, fill last. Syncs on cuda (the range check)."""
    check_range("gather_fields", rows, fields[0].shape[0])
    starts, row_bytes = flat_layout(fields, rows.shape[0])
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=rows.device, pin_memory=pin)
    for field, start, each, fill in zip(fields, starts, row_bytes, fills):
        data = field.clone(memory_format=torch.contiguous_format).view(-1)
        data = data.view(torch.uint8).view(len(field), each)
        element = torch.tensor([pattern(field.dtype, fill)], device=rows.device).view(torch.uint8)
        padding = element.repeat(-(-each // 8))[:each]
        gathered = torch.cat([data, padding[None]])[rows]  # -1 is the last row
        flat[start : start + gathered.numel()] = gathered.view(-1)
    return flat


def _fake(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> Tensor:
    return rows.new_empty(flat_layout(fields, rows.shape[0])[0][-1], dtype=torch.uint8)


op = Op(
    "gather_fields(Tensor[] fields, Tensor rows, float[] fills, bool pin) -> Tensor", fake=_fake
)
op.serve(__name__, "native", "triton")
op.backend("reference", reference)


def gather_fields(
    fields: Sequence[Tensor], rows: Tensor, fills: Sequence[float], *, pin: bool = False
) -> Fields:
    """``views[f][i] = fields[f][rows[i]]``, or ``fills[f]`` where ``rows[i]`` is -1.

    Args:
        fields: [N, ...] each, at least one, of any real dtypes. Rows may lie any stride apart.
        rows:   [M] int64, entries in [-1, N). Repeated entries are allowed.
        fills:  the number in every element of a padding row, one a field, held by its dtype.
        pin:    the result is in pinned memory, from which a copy to a device need not be waited
            for. Only on the CPU.

    Returns:
        Fields: ``flat`` and its ``views``, on the device of ``rows``.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or fills do not fit; a field
            requires a gradient.
        IndexError: an entry of ``rows`` is out of range (on CPU; see
            :func:`~pyrl_ext.ops.gather_rows`).
    """
    need_tensor("gather_fields", "rows", rows)
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise TypeError(
            f"gather_fields: rows is {rows.dtype} {list(rows.shape)}, expected torch.int64 [M]"
        )
    if not len(fields) == len(fills) > 0:
        raise ValueError(
            f"gather_fields: {len(fields)} fields, {len(fills)} fills, expected one fill a field, "
            "and a field"
        )
    if pin and on_gpu(rows):
        raise ValueError(f"gather_fields: pin with rows on {rows.device}, expected them on cpu")
    for f, field in enumerate(fields):
        need_tensor("gather_fields", f"fields[{f}]", field)
        _check(f, field, fields[0], rows)
    flat = op(fields, rows, fills, pin)
    return Fields(flat, _views(flat, fields, rows.shape[0]))


def _check(f: int, field: Tensor, first: Tensor, rows: Tensor) -> None:
    if field.ndim < 1 or field.shape[0] != first.shape[0]:
        raise ValueError(
            f"gather_fields: fields[{f}] is {list(field.shape)}, fields[0] {list(first.shape)}, "
            "expected [N, ...] of one N"
        )
    if field.device != rows.device:
        raise ValueError(
            f"gather_fields: fields[{f}] is on {field.device}, rows on {rows.device}, expected "
            "one device"
        )
    if field.dtype.is_complex:
        raise TypeError(f"gather_fields: fields[{f}] is {field.dtype}, expected a real dtype")
    if field.requires_grad:
        raise ValueError(
            f"gather_fields: fields[{f}] requires a gradient, expected data. Use gather_rows"
        )
