"""Launches of every operator's Triton backend with the shapes of real models.

The tensors are on the device ``meta``, so that `tests.helpers.offline_triton` can compile the
kernels without a GPU. Triton compiles a kernel for each set of dtypes, constants and sizes that 16
divides: call each launch with the row counts of `ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops.digest import triton as digest
from pyrl_ext.ops.expert_rows import triton as expert_rows
from pyrl_ext.ops.gather_fields import triton as gather_fields
from pyrl_ext.ops.gather_routes import triton as gather_routes
from pyrl_ext.ops.gather_rows import triton as gather_rows
from pyrl_ext.ops.latent_keys import triton as latent_keys
from pyrl_ext.ops.replay_probs import triton as replay_probs
from pyrl_ext.ops.rms_norm import triton as rms_norm
from pyrl_ext.ops.rotary import triton as rotary
from pyrl_ext.ops.sum_rows import triton as sum_rows
from pyrl_ext.ops.swiglu import triton as swiglu
from pyrl_ext.ops.token_logprob import triton as token_logprob

ROWS = (4096, 4095, 17, 1)  # Triton specializes on multiples of 16 and on 1

BF16 = torch.bfloat16
FP32 = torch.float32
FP64 = torch.float64
UINT8 = torch.uint8
UINT16 = torch.uint16
INT64 = torch.int64


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gather_rows(dtype: torch.dtype, width: int, filled: bool, rows: int) -> None:
    fill = meta(width, dtype=dtype) if filled else None
    gather_rows.gather_rows(meta(rows, width, dtype=dtype), meta(rows, dtype=INT64), fill)


def _digests(dtype: torch.dtype, width: int, finite: bool, rows: int) -> None:
    """At address 0, which is aligned."""
    digest.digests([meta(rows, width, dtype=dtype)], finite)


def _gather_fields(fills: tuple[float, ...], rows: int) -> None:
    """Triton makes an integer argument of 1 a constant, which is no tensor in the kernel."""
    dtypes = [torch.bool, UINT8, BF16, torch.int32, INT64, FP32]
    fields = [meta(64, 3, dtype=dtype) for dtype in dtypes]
    gather_fields.gather_fields(fields, meta(rows, dtype=INT64), [*fills], False)


def _sum_rows(dtype: torch.dtype, width: int, rows: int) -> None:
    order = meta(rows, dtype=INT64)
    starts = meta(rows + 1, dtype=INT64)
    sum_rows.sum_rows(meta(rows, width, dtype=dtype), order, starts, order)


def _gather_routes(dtype: torch.dtype, layers: int, top_k: int, experts: int, rows: int) -> None:
    routes = meta(rows, layers, top_k, dtype=dtype)
    slots = torch.zeros(1, dtype=INT64)
    gather_routes.gather_routes(routes, meta(rows, dtype=INT64), slots, experts)


def _replay_probs(
    dtype: torch.dtype, ids_dtype: torch.dtype, top_k: int, experts: int, rows: int
) -> None:
    scores = meta(rows, experts)
    ids = meta(rows, top_k, dtype=ids_dtype)
    grad = meta(rows, experts, dtype=dtype)
    replay_probs.replay_probs(scores, ids, "sum", 1.8, dtype)
    replay_probs.replay_probs_grad(grad, scores, ids, "sum", 1.8)


def _expert_rows(dtype: torch.dtype, top_k: int, experts: int, rows: int) -> None:
    routing_map = meta(rows, experts, dtype=torch.bool)
    order = meta(rows * top_k, dtype=INT64)
    expert_rows.expert_rows(routing_map, meta(rows, experts, dtype=dtype), top_k)
    expert_rows.expert_rows_grad(meta(rows * top_k, dtype=dtype), order, order, rows, experts)


def _swiglu(dtype: torch.dtype, width: int, rows: int) -> None:
    gate_up = meta(rows, 2 * width, dtype=dtype)
    grad = meta(rows, width, dtype=dtype)
    for weight in (meta(rows), None):
        swiglu.swiglu(gate_up, weight)
        swiglu.swiglu_grad(grad, gate_up, weight)


def _rotary(
    dtype: torch.dtype,
    query: tuple[int, int],
    key: tuple[int, int],
    rotated: int,
    latent: bool,
    rows: int,
) -> None:
    """``query``, ``key``: heads and width of a head."""
    orders = ("neighbours", "halves") if latent else ("halves", "halves")
    for back in (False, True):
        source, result = reversed(orders) if back else orders
        rotary.rotary(
            meta(rows, *query, dtype=dtype),
            meta(rows, *key, dtype=dtype),
            meta(rows, rotated),
            latent,
            source,
            result,
            back,
        )


def _rms_norm(dtype: torch.dtype, heads: int, width: int, row_stride: int, rows: int) -> None:
    row = meta(rows, row_stride, dtype=dtype)
    x = row[:, : heads * width].unflatten(1, (heads, width))
    weight = meta(width, dtype=dtype)
    rms_norm.rms_norm(x, weight, 1e-5)
    for residual_grad in (x, None):
        rms_norm.rms_norm_grad(x, x, weight, meta(rows, heads), residual_grad)


def _latent_keys(
    dtype: torch.dtype, heads: int, plain: int, value: int, shared: int, rows: int
) -> None:
    both = meta(rows, heads, plain + value, dtype=dtype)
    latent_keys.latent_keys(both, meta(rows, shared, dtype=dtype), plain)
    key = meta(rows, heads, plain + shared, dtype=dtype)
    latent_keys.latent_keys_grad(key, meta(rows, heads, value, dtype=dtype), plain)


def _token_logprob(
    dtype: torch.dtype, columns: int, width: int, shards: int, masked: bool, rows: int
) -> None:
    """Statistics of a shard of ``width`` tokens of a vocabulary, and of one that is all of it."""
    logits = meta(rows, columns, dtype=dtype)
    targets = meta(rows, dtype=INT64)
    scale = meta(rows)
    keep = meta(rows, columns, dtype=torch.bool) if masked else None
    vectors = [meta(rows) for _ in range(5)]  # max, log_sum, entropy and two gradients
    first = columns if shards > 1 else 0
    token_logprob.stats(logits, targets, scale, first, width, keep)
    token_logprob.combine(meta(shards, 4, rows), targets, scale, width * shards)
    token_logprob.rows(logits, targets, scale, width, keep)
    token_logprob.grad(logits, targets, scale, first, width, *vectors, keep_mask=keep, dtype=BF16)


# GLM-4.7-Flash, Qwen3-30B-A3B, DeepSeek-V3 with 4 ranks of tensor parallelism, and float32
SHAPES: dict[Callable[..., None], list[tuple[Any, ...]]] = {
    _gather_rows: [
        (BF16, 2048, True),
        (BF16, 5120, False),
        (FP32, 128, False),
        (INT64, 1, True),
        (UINT8, 188, True),
    ],
    _digests: [
        (BF16, 2048, True),
        (BF16, 5, True),
        (FP32, 64, True),
        (FP32, 3, False),
        (UINT8, 1, False),
    ],
    _gather_fields: [((1, 1, 1, 1, 1, 1),), ((0, 1, 1, -1, 1, 2),)],
    _sum_rows: [(BF16, 2048), (FP32, 2048), (FP32, 1), (FP64, 2048)],
    _gather_routes: [
        (UINT8, 46, 4, 64),
        (UINT8, 1, 8, 128),
        (UINT16, 48, 10, 512),
    ],
    _replay_probs: [(FP32, UINT8, 4, 64), (BF16, UINT8, 8, 256), (FP32, UINT16, 8, 384)],
    _expert_rows: [(FP32, 4, 64), (FP32, 8, 256), (BF16, 2, 8)],
    _swiglu: [(BF16, 1536), (FP32, 32)],
    _rotary: [
        (BF16, (20, 256), (1, 64), 64, True),
        (BF16, (32, 128), (4, 128), 128, False),
        (FP32, (96, 128), (8, 128), 64, False),
    ],
    _rms_norm: [
        (BF16, 1, 2048, 2048),
        (BF16, 1, 512, 576),
        (BF16, 1, 7168, 7168),
        (BF16, 4, 128, 5120),
        (FP32, 1, 64, 64),
    ],
    _latent_keys: [(BF16, 20, 192, 256, 64), (FP32, 32, 128, 128, 64)],
    _token_logprob: [
        (FP32, 154880, 154880, 1, False),
        (BF16, 154880, 154880, 1, False),
        (FP32, 32320, 32320, 4, True),
        (BF16, 32320, 32317, 4, True),
    ],
}


def launch_shapes() -> dict[str, Callable[[int], None]]:
    """Launches forward and backward of a given number of rows, by operator and shape."""
    launches: dict[str, Callable[[int], None]] = {}
    for run, shapes in SHAPES.items():
        for shape in shapes:
            sizes = " ".join(str(size).removeprefix("torch.") for size in shape)
            launches[f"{run.__name__[1:]} {sizes}"] = partial(run, *shape)
    return launches
