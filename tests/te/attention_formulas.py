"""Formulas of the kernels that TransformerEngine's core attention calls on packed sequences.

Attention itself, as cuDNN's fused kernels compute it, and what joins the steps of context
parallelism: halves of sequences, log-sums of exponentials, and the zigzag. Written from what their
callers in ``context_parallel.py`` do with the results; shares no code with `PackedAttention` or
`TokenLayout`. Rows that a kernel leaves alone hold NaN here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# of NVTE_Bias_Type, NVTE_Softmax_Type, NVTE_Fused_Attn_Backend
NO_BIAS = 0
VANILLA = 0
FUSED = 0
THD = 2
MASKS = {1: None, 3: False, 5: True}  # NVTE_Mask_Type -> aligned to the last row; None: no mask


# attention ---------------------------------------------------------------------------------------


def get_fused_attn_backend(params: Any) -> tuple[int, str]:
    """cuDNN has a kernel for the shapes that these formulas are asked for."""
    del params
    return FUSED, ""


def _pieces(
    cu_q: Tensor, cu_kv: Tensor, at_q: Tensor, at_kv: Tensor
) -> Iterator[tuple[slice, slice]]:
    """Rows of the queries and of the keys of each sequence: as many as ``cu`` counts, from ``at``
    on."""
    table = zip(cu_q.diff().tolist(), cu_kv.diff().tolist(), at_q.tolist(), at_kv.tolist())
    for q_len, k_len, q_at, k_at in table:
        if q_len and k_len:
            yield slice(q_at, q_at + q_len), slice(k_at, k_at + k_len)


def _scores(q: Tensor, k: Tensor, scale: float, mask_type: int) -> Tensor:
    """[heads, Q, K], in 32 bits at least; -inf where the mask hides a key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = scale * torch.einsum("qhd,khd->hqk", q.to(wide), k.to(wide))
    if (to_last := MASKS[int(mask_type)]) is not None:
        queries, keys = scores.shape[1:]
        ahead = keys - queries if to_last else 0
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1 + ahead)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def fused_attn_fwd(max_q, max_kv, is_training, scale, dropout, zero_fill, layout, o_format,
                   scale_inv_format, bias_type, mask_type, softmax_type, window, bottom_right,
                   cu_q, cu_kv, q, k, v, dtype, at_q, at_kv, page_k, page_v, s_quantizer,
                   o_quantizer, bias, offset, rng, rng_elements, max_logit, graph):  # fmt: skip
    """Output, and the log-sum-exp of every row: [T, heads, 1]."""
    _only_packed(dropout=dropout, o_format=int(o_format) != THD, page_k=page_k, bias=bias,
                 bias_type=int(bias_type) != NO_BIAS, softmax_type=int(softmax_type) != VANILLA,
                 s_quantizer=s_quantizer, offset=offset, max_logit=max_logit,
                 window=max(window) > 0)  # fmt: skip
    out = q.new_full((*q.shape[:2], v.shape[2]), float("nan"))
    sums = torch.full((*q.shape[:2], 1), float("nan"))
    groups = q.shape[1] // k.shape[1]
    for rows, keys in _pieces(cu_q, cu_kv, at_q, at_kv):
        assert rows.stop - rows.start <= max_q and keys.stop - keys.start <= max_kv
        scores = _scores(q[rows], k[keys], scale, mask_type)
        values = v[keys].to(scores.dtype).repeat_interleave(groups, dim=1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        sums[rows] = scores.logsumexp(-1).T[..., None].float()
    return [out, sums, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(max_q, max_kv, scale, dropout, zero_fill, layout, o_format, do_format,
                   dqkv_layout, scale_inv_format, do_scale_inv_format, bias_type, mask_type,
                   softmax_type, window, bottom_right, deterministic, cu_q, cu_kv, q, k, v, o, d_o,
                   dtype, aux, at_q, at_kv, s_quantizer, dp_quantizer, dqkv_quantizer,
                   graph):  # fmt: skip
    """Gradients by the output and the log-sum-exp that are given, which may be of more keys."""
    _only_packed(dropout=dropout, bias_type=int(bias_type) != NO_BIAS, dp_quantizer=dp_quantizer)
    sums, *_ = aux
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    for rows, keys in _pieces(cu_q, cu_kv, at_q, at_kv):
        scores = _scores(q[rows], k[keys], scale, mask_type)
        chances = (scores - sums[rows].to(scores.dtype).transpose(0, 1)).exp()
        wide_q, wide_k, wide_v, wide_o, wide_do = (
            x.to(scores.dtype) for x in (q[rows], k[keys], v[keys], o[rows], d_o[rows])
        )
        wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (wide_k, wide_v))
        inner = (wide_o * wide_do).sum(-1).T[..., None]
        by_chance = torch.einsum("qhd,khd->hqk", wide_do, wide_v)
        by_score = scale * chances * (by_chance - inner)
        dq[rows] = torch.einsum("hqk,khd->qhd", by_score, wide_k).to(q.dtype)
        dk_heads = torch.einsum("hqk,qhd->khd", by_score, wide_q)
        dv_heads = torch.einsum("hqk,qhd->khd", chances, wide_do)
        dk[keys] = dk_heads.unflatten(1, (-1, groups)).sum(2).to(k.dtype)
        dv[keys] = dv_heads.unflatten(1, (-1, groups)).sum(2).to(v.dtype)
    return [dq, dk, dv, None, None]


def _only_packed(**features: Any) -> None:
    if used := [name for name, value in features.items() if value]:
        raise NotImplementedError(f"tests.te.attention_formulas: {', '.join(used)} given")


# steps of the ring -------------------------------------------------------------------------------


def _half(cu: Tensor, second: int) -> Tensor:
    """Rows of the first or second half of every sequence."""
    parts = [
        torch.arange(begin, end).chunk(2)[second]
        for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist())
        if end > begin
    ]
    return torch.cat(parts)


def thd_read_half_tensor(rows, cu, half):
    return rows[_half(cu, half)]


def thd_read_second_half_lse(sums, cu, packed, length):
    assert packed
    found = sums[:, _half(cu, 1)]
    assert found.shape[1] == length
    return found


def thd_second_half_lse_correction(sums, step, cu, packed):
    assert packed
    rows = _half(cu, 1)
    sums[:, rows] = torch.logaddexp(sums[:, rows], step)


def thd_out_correction(out, step, before, sums, step_sums, cu, only_second_half, packed):
    """out = out e^(before - sums) + step e^(step_sums - sums), of all rows or of second halves."""
    assert packed
    rows = _half(cu, 1) if only_second_half else torch.arange(len(out))
    kept = (before - sums)[:, rows].exp()
    added = (step_sums - sums[:, rows]).exp()
    mixed = out[rows].float() * kept.T[..., None] + step.float() * added.T[..., None]
    out[rows] = mixed.to(out.dtype)


def thd_grad_correction(grad, step, cu, first, second):
    """Each half of every sequence: left alone, zeroed, replaced or added to. A step that is of one
    half has rows of that half only."""
    for half, what in enumerate((first, second)):
        rows = _half(cu, half)
        if what == "zero":
            grad[rows] = 0
        elif what in ("copy", "add"):
            part = step if len(step) < len(grad) else step[rows]
            grad[rows] = part + (grad[rows] if what == "add" else 0)
        else:
            assert what == "none", what


# gathered rows -----------------------------------------------------------------------------------


def thd_copy_valid_tokens_from_per_split_to_rank_local(into, step, at, cu):
    for begin, length in zip(at.tolist(), cu.diff().tolist()):
        into[begin : begin + length] = step[begin : begin + length]


def _zigzag(cu: Tensor, cp: int) -> Tensor:
    """Row in the order of the sequences of each row in the order of the ranks: of 2 cp chunks of a
    sequence, rank r has chunks r and 2 cp - 1 - r."""
    found = []
    for rank in range(cp):
        for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist()):
            chunks = torch.arange(begin, end).reshape(2 * cp, -1)
            found += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(found)


def thd_sequence_order_to_cp_rank_order(rows, cu, cp, total):
    assert total == len(rows)
    return rows[_zigzag(cu, cp)]


def thd_cp_rank_order_to_sequence_order(rows, cu, cp, total):
    assert total == len(rows)
    return rows[_zigzag(cu, cp).argsort()]


FORMULAS = (
    get_fused_attn_backend, fused_attn_fwd, fused_attn_bwd, thd_read_half_tensor,
    thd_read_second_half_lse, thd_second_half_lse_correction, thd_out_correction,
    thd_grad_correction, thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_sequence_order_to_cp_rank_order, thd_cp_rank_order_to_sequence_order,
)  # fmt: skip
