"""Layers that carry a state along packed sequences in place of keys and values, and layers of one
block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from pyrl_ext.megatron.head_exchange import heads_to_rows, of_rank, rows_to_heads
from pyrl_ext.megatron.local_layers import RMSNorm
from pyrl_ext.megatron.mamba import PackedMamba
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.ops import causal_conv1d, gated_delta_rule
from pyrl_ext.plan.model.sizes import ModelSizes

# under the square root of a query's or key's length
EPSILON = 1e-6


def put_kinds(block: Any, sizes: ModelSizes, layers: Sequence[int]) -> None:
    """Give the layers of megatron's block spec the blocks of their kind: a mixer that carries a
    state where they have one, attention without positions where heads have none, and nothing in the
    place of a block that they have not.

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
        mine = [section // place.cp_size for section in sections]
        channels, gate, beta, alpha = rows.split([sum(mine[:3]), *mine[3:]], dim=-1)
        taps = of_rank(self.conv1d.weight.squeeze(1), sections[:3], place)
        channels = causal_conv1d(channels.contiguous(), taps, None, packed.cu_seqlens)
        query, key, value = channels.split(mine[:3], dim=-1)
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
