"""Layers that carry a state along packed sequences in place of keys and values, and layers of one
block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from pyrl_ext.megatron.local_layers import RMSNorm, sharded_weight
from pyrl_ext.megatron.normed_attention import NormedAttention
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.ops import causal_conv1d, gated_delta_rule, ssd_scan
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.plan.model.sizes import ModelSizes

# under the square root of a query's or key's length
EPSILON = 1e-6


def put_kinds(block: Any, sizes: ModelSizes, layers: Sequence[int]) -> None:
    """Give the layers of megatron's block spec the blocks of their kind: a mixer that carries a
    state where they have one, attention without positions where heads have none or with norms over
    all heads, and nothing in the place of a block that they have not.

    Args:
        layers: 0-based global ids of the block's.
    """
    for place, layer in enumerate(layers):
        kind = sizes.layer_kinds[layer]
        spec = block.layer_specs[place]
        changes: dict[str, Any] = {}
        if kind.has_state:
            changes["self_attention"] = _mixer(sizes)
        elif kind.mixer and not sizes.rotary_width:
            plain = replace(spec.submodules.self_attention, module=SelfAttention)
            changes["self_attention"] = plain
        elif sizes.normalizes_all_heads:
            normed = replace(spec.submodules.self_attention, module=NormedAttention)
            changes["self_attention"] = normed
        if kind.mixer is None:
            changes |= {"input_layernorm": IdentityOp, "self_attention": IdentityOp}
            changes["self_attn_bda"] = IdentityFuncOp
        if kind.feed_forward is None:
            changes |= {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp}
            changes["mlp_bda"] = IdentityFuncOp
        block.layer_specs[place] = replace(spec, submodules=replace(spec.submodules, **changes))


def _mixer(sizes: ModelSizes) -> ModuleSpec:
    assert sizes.state_mixer is not None
    if sizes.state_mixer.name == "mamba":
        parts = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
        return ModuleSpec(PackedMamba, {"taps": sizes.state_mixer.taps}, parts)
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, RMSNorm, RowParallelLinear)
    return ModuleSpec(PackedDeltaNet, submodules=parts)


# rows of all heads <-> all rows of some heads ----------------------------------------------------


def of_rank(weights: Tensor, sections: Sequence[int], place: RankCoords) -> Tensor:
    """The part of each section for the heads of a context-parallel rank."""
    parts = [part.chunk(place.cp_size)[place.cp_rank] for part in weights.split([*sections])]
    return torch.cat(parts)


def rows_to_heads(rows: Tensor, sections: Sequence[int], packed: PackedSequences) -> Tensor:
    """[T_local, W], all heads of this rank's rows -> [T, W / cp], a part of the heads of all rows,
    in packed order.

    Communicates: an all-to-all over the microbatch's context-parallel group.
    """
    place = packed.place
    if place.cp_group is None:
        return rows
    by_section = [part.chunk(place.cp_size, -1) for part in rows.split([*sections], -1)]
    by_rank = [torch.cat(parts, -1) for parts in zip(*by_section, strict=True)]
    rows = torch.cat(by_rank)
    return packed.from_ranks.take(all_to_all(place.cp_group, rows))


def heads_to_rows(heads: Tensor, packed: PackedSequences) -> Tensor:
    """[T, W / cp] -> [T_local, W]: the inverse, and as much to communicate."""
    place = packed.place
    if place.cp_group is None:
        return heads
    rows = all_to_all(place.cp_group, packed.to_ranks.take(heads))
    return torch.cat(rows.chunk(place.cp_size), -1)


# mixers ------------------------------------------------------------------------------------------


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
        place = packed.place
        dtype = hidden_states.dtype
        sections = [*self.in_proj_split_sections]  # queries, keys, values, gates, betas, alphas
        rows, _ = self.in_proj(hidden_states)
        rows = rows_to_heads(rows.squeeze(1), sections, packed)
        widths = [section // place.cp_size for section in sections]
        channels, gate, beta, alpha = rows.split([sum(widths[:3]), *widths[3:]], dim=-1)
        taps = of_rank(self.conv1d.weight.squeeze(1), sections[:3], place)
        channels = causal_conv1d(channels.contiguous(), taps, None, packed.cu_seqlens)
        query, key, value = channels.split(widths[:3], dim=-1)
        decay, step = (of_rank(x, [len(x)], place).float() for x in (self.A_log, self.dt_bias))
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
        return self.out_proj(heads_to_rows(mixed, packed)[:, None])

    def _normed(self, heads: Tensor) -> Tensor:
        """[T, h * K] -> [T, H, K], of length 1, each for as many value heads as share it."""
        wide = heads.unflatten(-1, (-1, self.key_head_dim)).float()
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)
        return wide.to(heads.dtype).repeat_interleave(self.num_value_heads // self.num_key_heads, 1)


class GatedGroupNorm(torch.nn.Module):
    """``y = w * x silu(z) / sqrt(mean((x silu(z))^2) + eps)``, with a mean for each group of
    channels. Tensor-parallel ranks have whole groups each, so its weights are split as they are."""

    tp_group: Any  # set by megatron's mixer

    def __init__(
        self, width: int, *, group_size: int, eps: float, device: Any, dtype: torch.dtype, **_: Any
    ):
        super().__init__()
        self.group_size = group_size
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        groups = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * groups.flatten(-2).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        return sharded_weight(self, self.tp_group, prefix, sharded_offsets, metadata)


class PackedMamba(mamba_mixer.MambaMixer):
    """megatron's Mamba-2 mixer, computed over packed sequences.

    The ranks of a microbatch's context-parallel group have whole sequences in convolution and scan,
    for a part of the heads each; where they are more than the groups of heads, several have the
    same B and C. Gates stay with their rows, and so the norm sees whole groups. Group and order of
    rows are the microbatch's, so nothing is switched in the module.

    Args:
        taps: of the convolution.

    Communicates: two all-to-alls over the microbatch's context-parallel group.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        pg_collection: Any,
        taps: int,
        **_: Any,
    ):
        # megatron refuses to build the layer without the package mamba_ssm, whose kernels it would
        # call in the forward that is not used here, and has a mock in the place of its norm
        mamba_mixer.HAVE_MAMBA_SSM = True
        mamba_mixer.ExtendedRMSNorm = GatedGroupNorm  # type: ignore[assignment,misc]
        super().__init__(
            config,
            submodules,
            config.hidden_size,
            d_conv=taps,
            layer_number=layer_number,
            pg_collection=pg_collection,
        )
        self.norm.eps = config.layernorm_epsilon  # megatron's is 1e-5
        del self.cp  # it would exchange heads over a group of fixed size

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        packed: PackedSequences = packed_seq_params
        place = packed.place
        inner = self.d_inner_local_tp
        rows, _bias = self.in_proj(hidden_states)
        gate, x, *shared, step = rows.squeeze(1).split(
            [inner, inner, *self._shared, self.nheads_local_tp], dim=-1
        )
        shared = [self._copies(part, place) for part in shared]
        sections = [inner, *(part.shape[-1] for part in shared), self.nheads_local_tp]
        rows = rows_to_heads(torch.cat([x, *shared, step], -1), sections, packed)
        widths = [section // place.cp_size for section in sections]
        channels, step = rows.split([sum(widths[:3]), widths[3]], dim=-1)
        taps = self._channels(self.conv1d_weight.squeeze(1), place)
        bias = self._channels(self.conv1d_bias, place)
        channels = causal_conv1d(channels.contiguous(), taps, bias, packed.cu_seqlens)
        x, *shared = channels.split(widths[:3], dim=-1)
        x = x.unflatten(-1, (-1, self.headdim)).contiguous()
        B, C = (part.unflatten(-1, (-1, self.d_state)).contiguous() for part in shared)
        decay, skip, first = (
            of_rank(x, [len(x)], place).float() for x in (self.A_log, self.D, self.dt_bias)
        )
        step = step.contiguous()
        mixed = ssd_scan(x, step, -decay.exp(), B, C, skip, first, packed.cu_seqlens)
        mixed = heads_to_rows(mixed.flatten(1), packed)
        return self.out_proj(self.norm(mixed, gate)[:, None])

    @property
    def _shared(self) -> list[int]:
        """Widths of B and C."""
        return [self.ngroups_local_tp * self.d_state] * 2

    def _copies(self, shared: Tensor, place: RankCoords) -> Tensor:
        """[..., groups * state], B or C, with each group as often as ranks have heads of it."""
        if (copies := place.cp_size // self.ngroups_local_tp) < 2:
            return shared
        groups = shared.unflatten(-1, (self.ngroups_local_tp, -1))
        return groups.repeat_interleave(copies, -2).flatten(-2)

    def _channels(self, weights: Tensor, place: RankCoords) -> Tensor:
        """The part of the convolution's weights or biases for a context-parallel rank's heads."""
        x, *shared = weights.split([self.d_inner_local_tp, *self._shared])
        shared = [self._copies(part.movedim(0, -1), place).movedim(-1, 0) for part in shared]
        parts = [x, *shared]
        return of_rank(torch.cat(parts), [len(part) for part in parts], place)
