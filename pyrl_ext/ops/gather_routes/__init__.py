"""gather_routes: routed experts of some layers, for some tokens, layer by layer.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch).
Gradient: none, expert numbers are integers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrl_ext.ops._op import Op

from . import native, reference, triton

ROUTE_DTYPES = (torch.uint8, torch.uint16, torch.int16, torch.int32)


def _fake(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out_dtype: torch.dtype
) -> Tensor:
    shape = (layers.shape[0], rows.shape[0], routes.shape[2])
    return rows.new_empty(shape, dtype=out_dtype)


op = Op(
    "gather_routes(Tensor routes, Tensor rows, Tensor layers, int num_experts, "
    "ScalarType out_dtype) -> Tensor",
    fake=_fake,
)
op.backend("native", native.gather_routes, refuse=native.refuse)
op.backend("triton", triton.gather_routes, refuse=triton.refuse)
op.backend("reference", reference.gather_routes)


def gather_routes(
    routes: Tensor,
    rows: Tensor,
    layers: Sequence[int] | Tensor,
    num_experts: int,
    out_dtype: torch.dtype = torch.int32,
) -> Tensor:
    """``out[i, m, j] = routes[rows[m], layers[i], j]``, or ``(m * K + j) % num_experts``.

    The second where ``rows[m]`` is -1: a padding row gets K distinct experts, and together the
    padding rows spread over all of them.

    Args:
        routes: [T, L, K] uint8, uint16, int16 or int32, expert of each token, layer slot, choice.
            On the device of ``rows``, or, with ``rows`` on a GPU, in pinned host memory, which the
            GPU then reads itself. Layers of a larger tensor (``routes[:, a:b]``) are read where
            they are; any other view is copied first.
        rows:   [M] int64, entries in [-1, T).
        layers: [l] slots in [0, L), in the order wanted; a tensor is int64. Kept on the host.
        num_experts: experts of a layer, at least K.
        out_dtype: int32, int64 or the dtype of ``routes``.

    Returns:
        [l, M, K] ``out_dtype``, contiguous, on the device of ``rows``. The native kernel can be
        captured in a CUDA graph: it reads ``routes`` and ``rows`` again at every replay, ``layers``
        and the sizes are those of the capture.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or sizes do not fit.
        IndexError: an entry of ``rows`` or ``layers`` is out of range. On a GPU ``rows`` is not
            checked, since that would wait for the device (the reference fails as torch's own
            indexing does there).
    """
    if routes.ndim != 3 or rows.ndim != 1:
        raise ValueError(
            f"gather_routes: routes {list(routes.shape)}, rows {list(rows.shape)}, expected "
            "[T, L, K], [M]"
        )
    if routes.dtype not in ROUTE_DTYPES:
        raise TypeError(
            f"gather_routes: routes is {routes.dtype}, expected one of {list(ROUTE_DTYPES)}"
        )
    if rows.dtype != torch.int64:
        raise TypeError(f"gather_routes: rows is {rows.dtype}, expected torch.int64")
    if routes.device != rows.device and not (rows.is_cuda and routes.is_pinned()):
        raise ValueError(
            f"gather_routes: routes is on {routes.device}, rows on {rows.device}, expected one "
            "device, or routes in pinned host memory and rows on a GPU"
        )
    if out_dtype not in (torch.int32, torch.int64, routes.dtype):
        raise TypeError(
            f"gather_routes: out_dtype is {out_dtype}, expected torch.int32, torch.int64 or "
            f"routes' {routes.dtype}"
        )
    top_k, limit = routes.shape[2], torch.iinfo(out_dtype).max + 1
    if not top_k <= num_experts <= limit:
        raise ValueError(
            f"gather_routes: num_experts is {num_experts}, expected {top_k} (the experts of a "
            f"token, which are distinct) to {limit} (what {out_dtype} holds)"
        )
    if not isinstance(layers, Tensor):
        layers = torch.tensor(list(layers), dtype=torch.int64)
    elif layers.dtype != torch.int64 or layers.ndim != 1 or layers.device.type != "cpu":
        raise TypeError(
            f"gather_routes: layers is {layers.dtype} {list(layers.shape)} on {layers.device}, "
            "expected int64 [l] on cpu"
        )
    return op(routes, rows, layers, num_experts, out_dtype)
