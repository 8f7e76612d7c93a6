"""Attention over packed, context-parallel sequences, without TransformerEngine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from pyrl_ext.ops import Inverse, expand_runs, gather_rows, invert_rows
from pyrl_ext.ops.tensors import on_gpu, to_device
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.parallel.topology import RankCoords


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
        return gather_rows(stream, self.rows, inverse=inverse)


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """The description of a packed microbatch, built once and shared by all layers.

    ``cu_seqlens_q`` and ``cu_seqlens_kv`` stay None on purpose: with them megatron-core 0.19.2
    applies RoPE one sequence at a time in Python and waits for the device twice a layer. Positions
    come from the batch instead (`PackedRotary`); `TEAttention` makes its own at the call.

    Args:
        layout: rows of all ranks.
        place: of this rank; `PackedAttention` gathers over its ``cp_group``.
        positions: [T_local] int64 on the device, position of each row in its sample, or
            [3, T_local]: in time, height and width.
        mtp_tokens: [T_local] each, input of every MTP layer.
        causal: True if a row sees only the rows before it; False: all of its sequence.
        ahead: depth of an MTP layer -> `FeatureGPT`'s features, in place of its input's embeddings.
        turns: `PackedRotary` -> its cosines and sines of these rows, once they are computed.
    """

    layout: TokenLayout
    place: RankCoords
    positions: Tensor
    mtp_tokens: tuple[Tensor, ...] = ()
    causal: bool = True
    ahead: Mapping[int, Sequence[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    turns: dict[Any, Tensor] = field(default_factory=dict)

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

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32 on the device, where the padded sequences end, from 0."""
        return to_device(_cumulative([*self.layout.padded_seqlens]), self.positions.device)

    @cached_property
    def from_ranks(self) -> RowMap:
        """From rows gathered over the context-parallel group, rank after rank, to packed rows."""
        order = self.layout.global_order()
        return RowMap(order, len(order), self.positions.device)

    @cached_property
    def to_ranks(self) -> RowMap:
        """The inverse of `from_ranks`."""
        order = self.layout.global_order().argsort()
        return RowMap(order, len(order), self.positions.device)

    @cached_property
    def over_ranks(self) -> CausalChunks:
        """For keys gathered over the context-parallel group: rank after rank."""
        return CausalChunks(self, self.layout.global_order())

    @cached_property
    def over_shards(self) -> CausalChunks:
        """For keys gathered over the context-parallel group and then over the ranks that share a
        sequence: shard after shard, in each of them rank after rank."""
        layout = self.layout
        place = self.place
        of_rank = torch.arange(place.cp_size * layout.num_local).chunk(place.cp_size)
        shards = [layout.shard(rows, t) for t in range(place.tp_size) for rows in of_rank]
        return CausalChunks(self, torch.cat(shards).argsort()[layout.global_order()])


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class CausalChunks:
    """The causal chunks of this rank and the rows of the keys that each one sees.

    Args:
        key_rows: [cp * T_local] int64 on the host, place of the key of each packed row.
    """

    def __init__(self, packed: PackedSequences, key_rows: Tensor):
        self.segments = packed.layout.segments(packed.place.cp_rank)
        self.causal = packed.causal
        self.device = packed.positions.device
        self._key_rows = key_rows

    @cached_property
    def by_shape(self) -> _ByShape:
        """The chunks ordered by shape, so that equal ones are computed in one call."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for q_start, q_len, k_start, k_len in self.segments:
            groups.setdefault((q_len, k_len), []).append((q_start, k_start))
        shapes: list[_Shape] = []
        q_rows = []
        k_rows = []
        for (q_len, k_len), starts in sorted(groups.items()):
            first = torch.tensor(starts)
            q_rows.append((first[:, :1] + torch.arange(q_len)).flatten())
            k_rows.append((first[:, 1:] + torch.arange(k_len)).flatten())
            square = torch.ones(q_len, k_len, dtype=torch.bool, device=self.device)
            mask = None if q_len == k_len else square.tril(k_len - q_len)
            shapes.append(_Shape(len(starts), q_len, k_len, mask))
        order = torch.cat(q_rows)
        keys = self._key_rows[torch.cat(k_rows)]
        return _ByShape(
            RowMap(order, len(order), self.device),
            RowMap(keys, len(self._key_rows), self.device),
            RowMap(order.argsort(), len(order), self.device),
            shapes,
        )

    @cached_property
    def varlen(self) -> dict[str, Any]:
        """Arguments of ``varlen_attn``; "key_rows" reorders the keys unless it is None."""
        q_lens, k_lens = ([segment[i] for segment in self.segments] for i in (1, 3))
        key_rows = None
        if q_lens != k_lens:
            starts = torch.tensor([segment.k_start for segment in self.segments])
            rows = expand_runs(starts, torch.tensor(k_lens), sum(k_lens))
            key_rows = RowMap(self._key_rows[rows], len(self._key_rows), self.device)
        return {
            "cu_seq_q": to_device(_cumulative(q_lens), self.device),
            "cu_seq_k": to_device(_cumulative(k_lens), self.device),
            "max_q": max(q_lens),
            "max_k": max(k_lens),
            "key_rows": key_rows,
        }


class _Shape(NamedTuple):
    """``number`` chunks of ``q_len`` queries and ``k_len`` keys."""

    number: int
    q_len: int
    k_len: int
    mask: Tensor | None  # [q_len, k_len]; None where queries and keys are the same rows


class _ByShape(NamedTuple):
    """The rows of all chunks, shape after shape. They are taken in one go: the gradient of a piece
    of the stream is as large as the stream."""

    queries: RowMap
    keys: RowMap
    back: RowMap
    shapes: list[_Shape]


def gather_over(group: Any, rows: Tensor) -> Tensor:
    """[N, ...] of every rank of ``group``, rank after rank; the gradient is reduce-scattered."""
    return gather_from_sequence_parallel_region(
        rows.contiguous(), tensor_parallel_output_grad=True, group=group
    )


class PackedAttention(MegatronModule):
    """softmax(q k^T * scale) v over each packed sequence, causal unless that says otherwise. It
    replaces the core attention of megatron's local spec, which does not support packed sequences.

    Half precision on a GPU goes through ``torch.nn.attention.varlen`` (FlashAttention), everything
    else through scaled_dot_product_attention, equal shapes in one call.

    Communicates: all-gather of keys and values over the microbatch's context-parallel group, and
        reduce-scatter of their gradients, unless they come gathered (`LatentAttention`).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [T_local, heads, D]
        key: Tensor,  # [T_local, heads or a divisor of them, D]
        value: Tensor,  # as the keys, of any width
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        chunks: CausalChunks | None = None,  # not None: keys, values are gathered, in its order
    ) -> Tensor:
        assert packed_seq_params is not None
        group = packed_seq_params.place.cp_group
        if chunks is None and group is not None:
            key, value = (gather_over(group, x) for x in (key, value))
        chunks = chunks or packed_seq_params.over_ranks
        if on_gpu(query) and query.dtype in (torch.float16, torch.bfloat16):
            return self._varlen(query, key, value, chunks)
        return self._by_shape(query, key, value, chunks)

    def _by_shape(self, query: Tensor, key: Tensor, value: Tensor, chunks: CausalChunks) -> Tensor:
        if not chunks.segments:
            return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        order = chunks.by_shape
        q_sizes = [each.number * each.q_len for each in order.shapes]
        k_sizes = [each.number * each.k_len for each in order.shapes]
        queries = order.queries.take(query).split(q_sizes)
        keys, values = (order.keys.take(x).split(k_sizes) for x in (key, value))
        parts = []
        for each, *rows in zip(order.shapes, queries, keys, values, strict=True):
            q, k, v = (x.unflatten(0, (each.number, -1)).transpose(1, 2) for x in rows)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=each.mask,
                is_causal=chunks.causal and each.mask is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return order.back.take(torch.cat(parts)) if len(chunks.segments) > 1 else parts[0]

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, chunks: CausalChunks) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if not chunks.segments:
            return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        sizes = chunks.varlen
        if (rows := sizes["key_rows"]) is not None:
            key = rows.take(key)
            value = rows.take(value)
        # FlashAttention-2, all that varlen_attn runs on without a package of another, has one width
        narrow = query.shape[2] - value.shape[2]
        if narrow:
            value = F.pad(value, (0, narrow))
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
            window_size=(-1, 0 if chunks.causal else -1),
            **grouped,
        )
        assert isinstance(out, Tensor)
        return out[..., : out.shape[2] - narrow]
