"""Packed attention against a loop over single rows; the index arithmetic of its two kernels."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pyrl_ext.megatron.packed_attention import PackedAttention, PackedSequences, RowMap
from pyrl_ext.megatron.rotary import PackedRotary
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.plan.model.family import read_sizes
from tests.helpers.configs import hf_of

HEADS = 4
DIM = 8


def packed_of(layout, rank, device: torch.device | str = "cpu"):
    place = RankCoords(layout.cp_size, rank, tp_size=layout.tp_size)
    positions = torch.zeros(layout.num_local, dtype=torch.int64, device=device)
    return PackedSequences(layout=layout, place=place, positions=positions)


def one_row_at_a_time(q, k, v, starts, ends, scale):
    """Row i of ``q`` attends to packed rows starts[i] .. ends[i] - 1."""
    out = torch.empty(q.shape[0], HEADS, v.shape[2], dtype=q.dtype)
    for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
        for h in range(HEADS):
            of = h * k.shape[1] // HEADS  # the key/value head of this query head
            weight = torch.softmax(k[a:b, of] @ q[i, h] * scale, 0)
            out[i, h] = weight @ v[a:b, of]
    return out


def ragged_attention(q, k, v, sizes, scale):
    """The same as ``varlen_attn``: per segment, causal, the last query sees the last key."""
    if (rows := sizes["key_rows"]) is not None:
        k = rows.take(k)
        v = rows.take(v)
    starts = []
    ends = []
    for s in range(len(sizes["cu_seq_q"]) - 1):
        q0, q1 = sizes["cu_seq_q"][s : s + 2].tolist()
        k0, k1 = sizes["cu_seq_k"][s : s + 2].tolist()
        assert q1 - q0 <= sizes["max_q"] and k1 - k0 <= sizes["max_k"]
        starts += [k0] * (q1 - q0)
        ends += [k1 - (q1 - q0) + i + 1 for i in range(q1 - q0)]
    return one_row_at_a_time(q, k, v, starts, ends, scale)


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("seqlens", [(5, 1, 9, 5), (16,), (0, 3), (1,)])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_PackedAttention_equals_a_loop_by_both_kernels(cp_size, seqlens, kv_heads):
    layout = TokenLayout(seqlens, cp_size=cp_size, tp_size=2)
    scale = 0.3
    g = torch.Generator().manual_seed(0)
    total = sum(layout.padded_seqlens)
    q, k, v = (
        torch.randn(total, heads, d, generator=g, dtype=torch.float64)
        for heads, d in ((HEADS, DIM), (kv_heads, DIM), (kv_heads, 6))
    )
    cu = [0, *accumulate(layout.padded_seqlens)]
    starts = [a for a, b in pairwise(cu) for _ in range(b - a)]
    exact = one_row_at_a_time(q, k, v, starts, range(1, total + 1), scale)
    gathered_to_packed = layout.global_order().argsort()
    k = k[gathered_to_packed]
    v = v[gathered_to_packed]
    for rank in range(cp_size):
        mine = gathered_to_packed.chunk(cp_size)[rank]  # packed row of each local row
        chunks = packed_of(layout, rank).over_ranks
        attention = PackedAttention.__new__(PackedAttention)
        torch.nn.Module.__init__(attention)
        attention.scale = scale
        torch.testing.assert_close(attention._by_shape(q[mine], k, v, chunks), exact[mine])
        if chunks.segments:
            out = ragged_attention(q[mine], k, v, chunks.varlen, scale)
            torch.testing.assert_close(out, exact[mine])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn runs on a GPU")
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_PackedAttention_on_a_gpu_equals_the_plain_one(kv_heads):
    """bfloat16 through ``varlen_attn`` against float32, and the gradients."""
    layout = TokenLayout((5, 1, 130, 64), cp_size=1, tp_size=1)
    device = torch.device("cuda")
    chunks = packed_of(layout, 0, device).over_ranks
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.scale = None
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(200, heads, 64, device=device).bfloat16().requires_grad_()
        for heads in (HEADS, kv_heads, kv_heads)
    )
    exact_q, exact_k, exact_v = (x.detach().float().requires_grad_() for x in (q, k, v))
    out = attention._varlen(q, k, v, chunks)
    want = attention._by_shape(exact_q, exact_k, exact_v, chunks)
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
    gradient = torch.randn_like(want)
    found = torch.autograd.grad(out, (q, k, v), gradient.bfloat16())
    wanted = torch.autograd.grad(want, (exact_q, exact_k, exact_v), gradient)
    for got, exact in zip(found, wanted, strict=True):
        assert (got.float() - exact).norm() < 2e-2 * exact.norm()


def test_RowMap_and_its_gradient_equal_indexing():
    """Two maps: a permutation, and one that repeats rows."""
    layout = TokenLayout((5, 1, 9), cp_size=2)
    once = RowMap(layout.global_order(), 24, torch.device("cpu"))
    often = packed_of(layout, 1).over_ranks.varlen["key_rows"]
    assert len(often.rows.unique()) < len(often.rows)
    for rows in (once, often):
        ours = torch.randn(24, 2, 3, requires_grad=True)
        plain = ours.detach().requires_grad_()
        out = rows.take(ours)
        want = plain[rows.rows]
        assert torch.equal(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(ours.grad, plain.grad)


def test_PackedRotary_gives_position_times_frequency():
    rotary = PackedRotary(8, 100.0, torch.device("cpu"))
    angles = rotary(torch.tensor([0, 7, 3]))
    assert angles.shape == (3, 1, 8)
    for row, position in enumerate((0, 7, 3)):
        for i in range(4):
            want = position / math.pow(100.0, 2 * i / 8)
            assert angles[row, 0, i].item() == pytest.approx(want, rel=1e-6)
            assert angles[row, 0, i + 4].item() == pytest.approx(want, rel=1e-6)


def test_PackedRotary_stretches_wavelengths_as_llama_3_does():
    """The wavelengths of megatron-core and transformers, and angles past the original context."""
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(hf_of("llama31_8b")))
    sizes = read_sizes(hf_of("llama31_8b"))
    rotary = PackedRotary(
        sizes.rotary_width, sizes.rope_base, torch.device("cpu"), sizes.rope_scaling
    )
    of_megatron = RotaryEmbedding(
        kv_channels=128,
        rotary_percent=1.0,
        rotary_base=500_000,
        rope_scaling=True,
        rope_scaling_factor=8.0,
        use_cpu_initialization=True,
    )
    plain = PackedRotary(sizes.rotary_width, sizes.rope_base, torch.device("cpu"))
    ratio = plain.inv_freq / rotary.inv_freq
    assert ratio.min() == 1 and ratio.max() == 8 and ((ratio > 1.5) & (ratio < 7)).any()
    torch.testing.assert_close(rotary.inv_freq, of_megatron.inv_freq, rtol=3e-7, atol=0)
    torch.testing.assert_close(rotary.inv_freq, theirs.inv_freq, rtol=3e-7, atol=0)
    positions = torch.tensor([0, 8191, 8192, 30_000, 131_071])
    cos, sin = theirs(torch.zeros(1), positions[None])
    angles = rotary(positions)[:, 0]
    torch.testing.assert_close(angles.cos(), cos[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(angles.sin(), sin[0], rtol=0, atol=1e-3)
