"""Packed attention against a loop over single rows; the index arithmetic of its two kernels."""

import math
from itertools import pairwise

import pytest
import torch

from pyrl_ext.layout import TokenLayout
from pyrl_ext.megatron.attention import PackedAttention, PackedRotary, PackedSequences

HEADS, DIM = 2, 8


def one_row_at_a_time(q, k, v, starts, ends, scale):
    """Row i of ``q`` attends to packed rows starts[i] .. ends[i] - 1."""
    out = torch.empty(q.shape[0], HEADS, v.shape[2], dtype=q.dtype)
    for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
        for h in range(HEADS):
            weight = torch.softmax(k[a:b, h] @ q[i, h] * scale, 0)
            out[i, h] = weight @ v[a:b, h]
    return out


def ragged_attention(q, k, v, sizes, scale):
    """What ``varlen_attn`` computes: per segment, causal, the last query sees the last key."""
    if (rows := sizes["key_rows"]) is not None:
        k, v = k[rows], v[rows]
    starts, ends = [], []
    for s in range(len(sizes["cu_seq_q"]) - 1):
        q0, q1 = sizes["cu_seq_q"][s : s + 2].tolist()
        k0, k1 = sizes["cu_seq_k"][s : s + 2].tolist()
        assert q1 - q0 <= sizes["max_q"] and k1 - k0 <= sizes["max_k"]
        starts += [k0] * (q1 - q0)
        ends += [k1 - (q1 - q0) + i + 1 for i in range(q1 - q0)]
    return one_row_at_a_time(q, k, v, starts, ends, scale)


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("seqlens", [(5, 1, 9, 5), (16,), (0, 3), (1,)])
def test_both_kernels_equal_a_loop(cp_size, seqlens):
    layout, scale = TokenLayout(seqlens, cp_size=cp_size, tp_size=2), 0.3
    g = torch.Generator().manual_seed(0)
    total = sum(layout.padded_seqlens)
    q, k, v = (
        torch.randn(total, HEADS, d, generator=g, dtype=torch.float64) for d in (DIM, DIM, 6)
    )
    cu = layout.cu_seqlens(padded=True).tolist()
    starts = [a for a, b in pairwise(cu) for _ in range(b - a)]
    exact = one_row_at_a_time(q, k, v, starts, range(1, total + 1), scale)
    gathered_to_packed = layout.global_order().argsort()
    for rank in range(cp_size):
        mine = gathered_to_packed.chunk(cp_size)[rank]  # packed row of each local row
        packed = PackedSequences.of(layout, rank, torch.device("cpu"))
        attention = PackedAttention.__new__(PackedAttention)
        torch.nn.Module.__init__(attention)
        attention.scale = scale
        torch.testing.assert_close(attention._by_shape(q[mine], k, v, packed), exact[mine])
        if packed.chunks:
            out = ragged_attention(q[mine], k, v, packed.varlen, scale)
            torch.testing.assert_close(out, exact[mine])


def test_rotary_angles_are_position_times_frequency():
    rotary = PackedRotary(8, 100.0, torch.device("cpu"))
    angles = rotary(torch.tensor([0, 7, 3]))
    assert angles.shape == (3, 1, 8)
    for row, position in enumerate((0, 7, 3)):
        for i in range(4):
            want = position / math.pow(100.0, 2 * i / 8)
            assert angles[row, 0, i].item() == pytest.approx(want, rel=1e-6)
            assert angles[row, 0, i + 4].item() == pytest.approx(want, rel=1e-6)
