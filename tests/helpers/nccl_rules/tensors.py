"""Sizes, types and layouts of the tensors of a collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch's table (ProcessGroupNCCL: getNcclDataType); bool travels as uint8, complex as pairs
MOVED = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
NOT_REDUCED = {torch.float8_e4m3fn, torch.float8_e5m2}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
GATHERS = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base")
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")
BITWISE = ("BAND", "BOR", "BXOR")


def faults_of(op: str, tensors: Sequence[Tensor], reduce_op: Any, rank: int) -> list[str]:
    """All that NCCL refuses, or gets wrong without a word.

    Args:
        tensors: in the order of the arguments of ``op``.
        rank: in the group.
    """
    found: list[str] = []
    for tensor in tensors:
        if tensor.dtype not in MOVED:
            found.append(f"{tensor.dtype}, which NCCL has not")
        if op.startswith(REDUCING) and tensor.dtype in NOT_REDUCED:
            found.append(f"{tensor.dtype}, which NCCL does not reduce")
        if not tensor.is_contiguous():
            found.append(
                f"shape {list(tensor.shape)} of strides {list(tensor.stride())} is not contiguous"
            )
    name = str(reduce_op).rpartition(".")[2]
    if reduce_op is not None and name in BITWISE:
        found.append(f"reduce operation {name}, which NCCL has not")
    if op in GATHERS or op in SCATTERS:
        output, given = tensors
        whole, part = (output, given) if op in GATHERS else (given, output)
        found += _misplaced(whole, part, rank)
    if op == "all_to_all_single" and _overlap(tensors[0], tensors[1]):
        found.append("input and output overlap")
    return sorted(set(found))


def _misplaced(whole: Tensor, part: Tensor, rank: int) -> list[str]:
    """In place, the part of this rank is at its place in the whole."""
    expected = whole.data_ptr() + rank * part.nbytes
    if not _overlap(whole, part) or part.data_ptr() == expected:
        return []
    offset = part.data_ptr() - whole.data_ptr()
    return [f"in place at byte {offset} of the whole, expected {rank * part.nbytes}"]


def _overlap(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not other.numel():
        return False
    first, second = sorted((one, other), key=Tensor.data_ptr)
    return second.data_ptr() < first.data_ptr() + first.nbytes


def size_of(op: str, given: dict[str, Any]) -> list[str]:
    """Type and shape, as all members of a collective have to give them."""
    if op in ("all_to_all_single", "all_to_all"):
        tensor = given["input"] if op == "all_to_all_single" else given["input_tensor_list"][0]
        return [str(tensor.dtype)]
    if op in SCATTERS:
        return [_kind(given["output"])]
    if op in GATHERS:
        return [_kind(given["input_tensor"])]
    if op == "all_gather":
        return [_kind(tensor) for tensor in given["tensor_list"]]
    if op == "reduce_scatter":
        return [_kind(tensor) for tensor in given["input_list"]]
    return [_kind(given["tensor"])]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def splits_of(op: str, given: dict[str, Any]) -> list[list[int]]:
    """Numbers of elements to each member and from each, of an all-to-all; [] of others."""
    if op == "all_to_all":
        lists = given["input_tensor_list"], given["output_tensor_list"]
        return [[tensor.numel() for tensor in each] for each in lists]
    if op != "all_to_all_single":
        return []
    found: list[list[int]] = []
    for name in ("input", "output"):
        tensor = given[name]
        sizes = given[f"{name}_split_sizes"]
        if sizes is None or not len(sizes):
            members = dist.get_world_size(given["group"])
            sizes = [len(tensor) // members] * members
        width = math.prod(tensor.shape[1:])
        found.append([int(rows) * width for rows in sizes])
    return found
