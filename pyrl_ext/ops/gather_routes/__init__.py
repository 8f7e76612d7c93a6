"""gather_routes: the routed experts of some tokens in some layers, layer by layer.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch).
Gradient: none, expert ids are integers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import INT64, Arguments, need_tensor
from pyrl_ext.ops._op import Op

ROUTE_DTYPES = (torch.uint8, torch.uint16)
_ARGUMENTS = Arguments("gather_routes", routes=("T, L, K", ROUTE_DTYPES), rows=("M", INT64))


def new_output(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int) -> Tensor:
    """An empty result."""
    return routes.new_empty((layers.shape[0], rows.shape[0], routes.shape[2]))


def reference(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int) -> Tensor:
    """Index tokens and layers, bring layers to the front, put the spread experts into padding."""
    T, L, K = routes.shape
    check_entries("layers", layers, 0, L, "a slot of routes")
    if rows.device.type == "cpu":
        check_entries("rows", rows, -1, T, "-1 (padding) or a token of routes")
    padding = (rows < 0)[None, :, None]
    fill = (torch.arange(len(rows) * K, device=rows.device) % num_experts).view(1, len(rows), K)
    if T == 0:  # padding only
        return fill.expand(len(layers), -1, -1).to(routes.dtype)
    slots = layers.to(rows.device, non_blocking=True)
    picked = routes.to(torch.int64)[rows.clamp(min=0)].index_select(1, slots)
    return torch.where(padding, fill, picked.transpose(0, 1)).to(routes.dtype).contiguous()


def check_entries(name: str, entries: Tensor, lowest: int, end: int, rule: str) -> None:
    """Raise IndexError if an entry is outside [lowest, end)."""
    outside = (entries < lowest) | (entries >= end)
    if outside.any():
        i = int(outside.nonzero()[0])
        raise IndexError(
            f"gather_routes: {name}[{i}] is {int(entries[i])}, expected {rule} in [0, {end})"
        )


op = Op(
    "gather_routes(Tensor routes, Tensor rows, Tensor layers, int num_experts) -> Tensor",
    fake=new_output,
)
op.serve(__name__, "native", "triton")
op.backend("reference", reference)


def gather_routes(
    routes: Tensor, rows: Tensor, layers: Sequence[int] | Tensor, num_experts: int
) -> Tensor:
    """``out[i, m, j] = routes[rows[m], layers[i], j]``, or ``(m * K + j) % num_experts``.

    The second where ``rows[m]`` is -1: a padding row gets K distinct experts, and together the
    padding rows spread over all experts.

    Args:
        routes: [T, L, K] uint8 or uint16, expert of each token, layer slot and choice. Layers of a
            larger tensor (``routes[:, a:b]``) are read in place; any other view is copied first.
        rows:   [M] int64, entries in [-1, T).
        layers: [l] slots in [0, L), in the order wanted; a tensor is int64. Kept on the host.
        num_experts: experts per layer, at least K.

    Returns:
        [l, M, K] dtype and device of ``routes``, contiguous. The native kernel can be captured in a
        CUDA graph: every replay reads ``routes`` and ``rows`` again; ``layers`` and the sizes are
        those of the capture.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or sizes do not fit.
        IndexError: an entry of ``rows`` or ``layers`` is out of range. On a GPU ``rows`` is not
            checked, since that would wait for the device (the reference fails as torch's indexing
            does there).
    """
    _ARGUMENTS.check(routes, rows)
    top_k = routes.shape[2]
    limit = torch.iinfo(routes.dtype).max + 1
    if not top_k <= num_experts <= limit:
        raise ValueError(
            f"gather_routes: num_experts is {num_experts}, expected {top_k} (the experts of a "
            f"token, which are distinct) to {limit} (what {routes.dtype} holds)"
        )
    if not isinstance(layers, Tensor):
        layers = torch.tensor(list(layers), dtype=torch.int64)
    elif layers.dtype != torch.int64 or layers.ndim != 1 or layers.device.type != "cpu":
        raise TypeError(
            f"gather_routes: layers is {layers.dtype} {list(layers.shape)} on {layers.device}, "
            "expected int64 [l] on cpu"
        )
    return op(routes, rows, layers, num_experts)


def count_routes(routes: Tensor, rows: Tensor, num_experts: int) -> Tensor:
    """Number of of the M * K choices of :func:`gather_routes`, in every layer, are each expert.

    Args:
        routes, rows, num_experts: as there, on the CPU.

    Returns: [L, num_experts] int64.
    """
    need_tensor("count_routes", "routes", routes)
    layers = routes.shape[1]
    chosen = gather_routes(routes, rows, range(layers), num_experts).flatten(1).long()
    chosen += torch.arange(layers)[:, None] * num_experts
    return torch.bincount(chosen.flatten(), minlength=layers * num_experts).view(layers, -1)
