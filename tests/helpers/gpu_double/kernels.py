"""Operators that a CPU has no kernel for, in terms of those that it has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401, registers torch_attn

aten = torch.ops.aten


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


def _addmm(
    total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    product = torch.mm(a.to(out_dtype), b.to(out_dtype))
    return beta * total.to(out_dtype) + alpha * product


def _addmm_out(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: Tensor,
) -> Tensor:
    return out.copy_(_addmm(total, a, b, out_dtype, beta=beta, alpha=alpha))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    _max_q: int,
    _max_k: int,
    causal: bool = False,
    scale: float | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of packed sequences; a causal mask is aligned to the last row and column."""
    out = torch.zeros_like(query)
    lse = query.new_zeros(query.shape[:2], dtype=torch.float32).T
    for q, k in _segments(cu_q, cu_k):
        probs, lse[:, q] = _probs(query[q], key[k], causal, scale)
        out[q] = torch.einsum("hqk,khd->qhd", probs, _heads(value[k], query)).to(out.dtype)
    return out, lse.contiguous(), torch.zeros(2, dtype=torch.uint64)


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _out: Tensor,
    _lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    _max_q: int,
    _max_k: int,
    causal: bool = False,
    _rng: Tensor | None = None,
    scale: float | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query_grad = torch.zeros_like(query, dtype=torch.float32)
    key_grad = torch.zeros_like(key, dtype=torch.float32)
    value_grad = torch.zeros_like(value, dtype=torch.float32)
    for q, k in _segments(cu_q, cu_k):
        out_grad = grad[q].float()
        probs = _probs(query[q], key[k], causal, scale)[0]
        probs_grad = torch.einsum("qhd,khd->hqk", out_grad, _heads(value[k], query))
        mean = (probs_grad * probs).sum(-1, keepdim=True)
        scores_grad = probs * (probs_grad - mean) * factor
        query_grad[q] = torch.einsum("hqk,khd->qhd", scores_grad, _heads(key[k], query))
        keys = torch.einsum("hqk,qhd->khd", scores_grad, query[q].float())
        key_grad[k] = keys.unflatten(1, (key.shape[1], -1)).sum(2)
        values = torch.einsum("hqk,qhd->khd", probs, out_grad)
        value_grad[k] = values.unflatten(1, (value.shape[1], -1)).sum(2)
    return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype)


def _segments(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
    ends_q = cu_q.tolist()
    ends_k = cu_k.tolist()
    queries = [slice(a, b) for a, b in pairwise(ends_q)]
    keys = [slice(a, b) for a, b in pairwise(ends_k)]
    return list(zip(queries, keys, strict=True))


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values in fp32, one head a head of queries."""
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], 1)


def _probs(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query.float(), _heads(key, query)) * factor
    if causal:
        rows, columns = scores.shape[1:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: _mm,
    aten.addmm.dtype: _addmm,
    aten.addmm.dtype_out: _addmm_out,
    torch.ops.torch_attn._varlen_attn.default: _attention,
    torch.ops.torch_attn._varlen_attn_backward.default: _attention_backward,
}
