"""Mamba-2 layers over packed sequences, computed by this package's operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from pyrl_ext.megatron.head_exchange import heads_to_rows, of_rank, rows_to_heads
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.ops import causal_conv1d, ssd_scan
from pyrl_ext.parallel.topology import Place


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
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


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
        shared = [self._copies(each, place) for each in shared]
        sections = [inner, *(each.shape[-1] for each in shared), self.nheads_local_tp]
        rows = rows_to_heads(torch.cat([x, *shared, step], -1), sections, packed)
        mine = [section // place.cp_size for section in sections]
        channels, step = rows.split([sum(mine[:3]), mine[3]], dim=-1)
        taps = self._channels(self.conv1d_weight.squeeze(1), place)
        bias = self._channels(self.conv1d_bias, place)
        channels = causal_conv1d(channels.contiguous(), taps, bias, packed.cu_seqlens)
        x, *shared = channels.split(mine[:3], dim=-1)
        x = x.unflatten(-1, (-1, self.headdim)).contiguous()
        B, C = (each.unflatten(-1, (-1, self.d_state)).contiguous() for each in shared)
        decay, skip, first = (
            of_rank(each, [len(each)], place).float() for each in (self.A_log, self.D, self.dt_bias)
        )
        step = step.contiguous()
        mixed = ssd_scan(x, step, -decay.exp(), B, C, skip, first, packed.cu_seqlens)
        mixed = heads_to_rows(mixed.flatten(1), packed)
        return self.out_proj(self.norm(mixed, gate)[:, None])

    @property
    def _shared(self) -> list[int]:
        """Widths of B and C."""
        return [self.ngroups_local_tp * self.d_state] * 2

    def _copies(self, shared: Tensor, place: Place) -> Tensor:
        """[..., groups * state], B or C, with each group as often as ranks have heads of it."""
        if (copies := place.cp_size // self.ngroups_local_tp) < 2:
            return shared
        groups = shared.unflatten(-1, (self.ngroups_local_tp, -1))
        return groups.repeat_interleave(copies, -2).flatten(-2)

    def _channels(self, weights: Tensor, place: Place) -> Tensor:
        """The part of the convolution's weights or biases for a context-parallel rank's heads."""
        x, *shared = weights.split([self.d_inner_local_tp, *self._shared])
        shared = [self._copies(each.movedim(0, -1), place).movedim(-1, 0) for each in shared]
        return of_rank(torch.cat([x, *shared]), [len(each) for each in (x, *shared)], place)
