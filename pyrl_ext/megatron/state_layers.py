"""Layers that carry a state along packed sequences in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from pyrl_ext.dist.topology import Place
from pyrl_ext.megatron.local_layers import RMSNorm
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.ops import causal_conv1d, gated_delta_rule
from pyrl_ext.plan.model.sizes import ModelSizes

# under the square root of a query's or key's length
EPSILON = 1e-6


def put_states(block: Any, sizes: ModelSizes, layers: Sequence[int]) -> None:
    """Give the layers of megatron's block spec that carry a state their mixer.

    Args:
        layers: 0-based global ids of the block's.
    """
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, RMSNorm, RowParallelLinear)
    mixer = ModuleSpec(PackedDeltaNet, submodules=parts)
    block.layer_specs = [
        replace(spec, submodules=replace(spec.submodules, self_attention=mixer))
        if sizes.layer_kinds[layer].has_state
        else spec
        for spec, layer in zip(block.layer_specs, layers, strict=True)
    ]


class PackedDeltaNet(GatedDeltaNet):
    """megatron's gated delta net, computed by this package's operators over packed sequences.

    The ranks of a microbatch's context-parallel group have whole sequences here, for a part of the
    heads each. Group and order of rows are the microbatch's, so nothing is switched in the module.

    Communicates: two all-to-alls over the microbatch's context-parallel group.
    """

    # megatron declares them as numbers or None
    key_head_dim: Any
    value_head_dim: Any
    num_key_heads: Any
    num_value_heads: Any

    def __init__(self, *args: Any, **more: Any):
        # megatron refuses to build the layer without the package fla, whose kernels it would call
        # in the forward that is not used here
        common.HAVE_FLA = True
        super().__init__(*args, **more)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule: Any = gated_delta_rule  # fla's is None, which megatron refuses

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        packed: PackedSequences = packed_seq_params
        place, dtype = packed.place, hidden_states.dtype
        sections = [*self.in_proj_split_sections]  # queries, keys, values, gates, betas, alphas
        rows, _ = self.in_proj(hidden_states)
        rows = _rows_to_heads(rows.squeeze(1), sections, packed)
        mine = [section // place.cp_size for section in sections]
        channels, gate, beta, alpha = rows.split([sum(mine[:3]), *mine[3:]], dim=-1)
        taps = _of_rank(self.conv1d.weight.squeeze(1), sections[:3], place)
        channels = causal_conv1d(channels.contiguous(), taps, None, packed.cu_seqlens)
        query, key, value = channels.split(mine[:3], dim=-1)
        decay, step = (_of_rank(x, [len(x)], place).float() for x in (self.A_log, self.dt_bias))
        mixed = self.gated_delta_rule(
            self._normed(query),
            self._normed(key),
            value.unflatten(-1, (-1, self.value_head_dim)).contiguous(),
            -decay.exp() * F.softplus(alpha.float() + step),
            beta.sigmoid(),
            packed.cu_seqlens,
        )
        gate = F.silu(gate.unflatten(-1, (-1, self.value_head_dim)).float())
        mixed = (self.out_norm(mixed) * gate).to(dtype).flatten(1)
        return self.out_proj(_heads_to_rows(mixed, packed)[:, None])

    def _normed(self, heads: Tensor) -> Tensor:
        """[T, h * K] -> [T, H, K], of length 1, each for as many value heads as share it."""
        wide = heads.unflatten(-1, (-1, self.key_head_dim)).float()
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)
        return wide.to(heads.dtype).repeat_interleave(self.num_value_heads // self.num_key_heads, 1)


def _of_rank(weights: Tensor, sections: list[int], place: Place) -> Tensor:
    """The part of each section for the heads of a context-parallel rank."""
    parts = [part.chunk(place.cp_size)[place.cp_rank] for part in weights.split(sections)]
    return torch.cat(parts)


def _rows_to_heads(rows: Tensor, sections: list[int], packed: PackedSequences) -> Tensor:
    """[T_local, W], all heads of this rank's rows -> [T, W / cp], a part of the heads of all rows,
    in packed order."""
    place = packed.place
    if place.cp_group is None:
        return rows
    by_rank = zip(*(part.chunk(place.cp_size, -1) for part in rows.split(sections, -1)))
    rows = torch.cat([torch.cat(each, -1) for each in by_rank])
    return packed.from_ranks.take(all_to_all(place.cp_group, rows))


def _heads_to_rows(heads: Tensor, packed: PackedSequences) -> Tensor:
    """[T, W / cp] -> [T_local, W]: the inverse."""
    place = packed.place
    if place.cp_group is None:
        return heads
    rows = all_to_all(place.cp_group, packed.to_ranks.take(heads))
    return torch.cat(rows.chunk(place.cp_size), -1)
