"""Attention over packed, context-parallel sequences, without TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from pyrl_ext.dist.topology import Place
from pyrl_ext.dist.upload import to_device
from pyrl_ext.ops import Inverse, expand_runs, gather_rows, invert_rows
from pyrl_ext.pack.layout import Segment, TokenLayout
from pyrl_ext.pack.microbatch import Microbatch


@dataclass(frozen=True)
class RowMap:
    """The rows of a stream in the order that a kernel wants; a row may be wanted more than once.

    Args:
        host: [M] int64 on the host.
        num_src: N, rows of the stream.
    """

    host: Tensor
    num_src: int
    device: torch.device | None

    @cached_property
    def rows(self) -> Tensor:
        """[M] int64 on the device."""
        return to_device(self.host, self.device)

    @cached_property
    def inverse(self) -> Inverse:
        """For the gradient, on the device."""
        inverse = invert_rows(self.host, self.num_src)
        return Inverse(*(to_device(each, self.device) for each in inverse))

    def take(self, stream: Tensor) -> Tensor:
        """[N, ...] -> [M, ...]; the gradient of a row adds up where it went."""
        inverse = self.inverse if stream.requires_grad else None
        return gather_rows(stream, self.rows, stream.new_zeros(stream.shape[1:]), inverse)


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """The description of a packed microbatch, built once and shared by all layers.

    ``cu_seqlens_q`` and ``cu_seqlens_kv`` stay None on purpose: with them megatron-core 0.19.2
    applies RoPE one sequence at a time in Python and waits for the device twice a layer. Positions
    come from the batch instead (`PackedRotary`).

    Args:
        layout: rows of all ranks.
        place: of this rank; `PackedAttention` gathers over its ``cp_group``.
        positions: [T_local] int64 on the device, position of each row in its sample.
        mtp_tokens: [T_local] each, input of every MTP layer.
    """

    layout: TokenLayout
    place: Place
    positions: Tensor
    mtp_tokens: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, micro: Microbatch) -> PackedSequences:
        longest = micro.layout.max_padded_seqlen
        return cls(
            qkv_format="thd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            layout=micro.layout,
            place=micro.place,
            positions=micro.positions,
            mtp_tokens=tuple(inputs.tokens for inputs in micro.mtp),
        )

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @cached_property
    def chunks(self) -> list[Segment]:
        """The causal chunks of this rank."""
        return list(self.layout.segments(self.place.cp_rank))

    @cached_property
    def packed_order(self) -> RowMap:
        """[cp * T_local] rows, from the all-gathered stream to the packed one."""
        order = self.layout.global_order()
        return RowMap(order, len(order), self.device)

    @cached_property
    def by_shape(self) -> list[_SameShape]:
        """The chunks grouped by shape, so that equal ones are computed in one call."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for q_start, q_len, k_start, k_len in self.chunks:
            groups.setdefault((q_len, k_len), []).append((q_start, k_start))
        return [
            _SameShape.of(shape, starts, self.device) for shape, starts in sorted(groups.items())
        ]

    @cached_property
    def varlen(self) -> dict[str, Any]:
        """Arguments of ``varlen_attn``; "key_rows" reorders the keys unless it is None."""
        q_lens, k_lens = ([c[i] for c in self.chunks] for i in (1, 3))
        key_rows = None
        if q_lens != k_lens:
            starts = torch.tensor([c[2] for c in self.chunks])
            rows = expand_runs(starts, torch.tensor(k_lens), sum(k_lens))
            key_rows = RowMap(rows, sum(self.layout.padded_seqlens), self.device)
        return {
            "cu_seq_q": to_device(_cumulative(q_lens), self.device),
            "cu_seq_k": to_device(_cumulative(k_lens), self.device),
            "max_q": max(q_lens),
            "max_k": max(k_lens),
            "key_rows": key_rows,
        }


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@dataclass
class _SameShape:
    """Chunks of one shape: rows [n, q_len] of the queries and [n, k_len] of the keys."""

    q_rows: Tensor
    k_rows: Tensor
    mask: Tensor | None  # [q_len, k_len]; None where queries and keys are the same rows

    @classmethod
    def of(
        cls, shape: tuple[int, int], starts: list[tuple[int, int]], device: torch.device | None
    ) -> _SameShape:
        q_len, k_len = shape
        first = torch.tensor(starts)
        q_rows = (first[:, :1] + torch.arange(q_len)).to(device)
        k_rows = (first[:, 1:] + torch.arange(k_len)).to(device)
        square = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
        return cls(q_rows, k_rows, None if q_len == k_len else square.tril(k_len - q_len))


def _gather_over(group: Any, rows: Tensor) -> Tensor:
    return gather_from_sequence_parallel_region(
        rows.contiguous(), tensor_parallel_output_grad=True, group=group
    )


class PackedAttention(MegatronModule):
    """softmax(q k^T * scale) v over each packed sequence, causal. It replaces the core attention of
    megatron's local spec, which does not support packed sequences.

    Half precision on a GPU goes through ``torch.nn.attention.varlen`` (FlashAttention), everything
    else through scaled_dot_product_attention, equal shapes in one call.

    Communicates: all-gather of keys and values over the microbatch's context-parallel group.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"PackedAttention: dropout is {dropout}, expected 0 (RL scores tokens)"
            )
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [T_local, heads, D]
        key: Tensor,  # [T_local, heads or a divisor of them, D], as the values
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                f"PackedAttention: packed_seq_params is {type(packed_seq_params).__name__}, "
                "expected PackedSequences; unpacked batches are not computed here"
            )
        if (group := packed_seq_params.place.cp_group) is not None:
            order = packed_seq_params.packed_order
            key, value = (order.take(_gather_over(group, x)) for x in (key, value))
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            return self._varlen(query, key, value, packed_seq_params)
        return self._by_shape(query, key, value, packed_seq_params)

    def _by_shape(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences):
        parts, rows = [], []
        for group in packed.by_shape:
            q, k, v = (
                x.index_select(0, at.flatten()).unflatten(0, at.shape).transpose(1, 2)
                for x, at in ((query, group.q_rows), (key, group.k_rows), (value, group.k_rows))
            )
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(out.transpose(1, 2).flatten(0, 1))
            rows.append(group.q_rows.flatten())
        if not parts:
            return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        if len(parts) == 1 and len(packed.chunks) == 1:
            return parts[0]
        back = torch.cat(rows).argsort()
        return torch.cat(parts).index_select(0, back)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if not packed.chunks:
            return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        sizes = packed.varlen
        if (rows := sizes["key_rows"]) is not None:
            key, value = rows.take(key), rows.take(value)
        # from torch 2.12 on, fewer key/value heads than query heads need an explicit flag
        grouped: dict[str, Any] = {}
        if query.shape[1] != key.shape[1] and "enable_gqa" in signature(varlen_attn).parameters:
            grouped["enable_gqa"] = True
        out = varlen_attn(
            query,
            key,
            value,
            sizes["cu_seq_q"],
            sizes["cu_seq_k"],
            sizes["max_q"],
            sizes["max_k"],
            scale=self.scale,
            window_size=(-1, 0),
            **grouped,
        )
        assert isinstance(out, Tensor)
        return out
