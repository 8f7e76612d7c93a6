"""TransformerEngine's core attention over packed, context-parallel sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.pack.thd import thd_params


class TEAttention(MegatronModule):
    """softmax(q k^T * scale) v over each packed sequence, as `PackedAttention`, by the kernel that
    TransformerEngine chooses for the shape: cuDNN's, or FlashAttention's where that is installed.

    Padding counts as rows of its sequence: it comes last, so that no other row sees it, and
    kernels that cannot leave out rows between sequences stay in the choice.

    Communicates: over the microbatch's context-parallel group, by ``config.cp_comm_type``. p2p:
        keys and values go round the ranks, while these attend. all_gather: every rank gathers
        them. a2a: a rank gets all rows of some heads, and sends back their output.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
        **_: Any,
    ):
        super().__init__(config=config)
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        if TEDotProductAttention.cp_stream is None:  # megatron makes none where cp is 1
            TEDotProductAttention.cp_stream = torch.cuda.Stream()
        # values of latent attention are widened to the keys: of packed sequences, few kernels have
        # two widths
        self.kernels = TEDotProductAttention(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=softmax_scale,
            k_channels=k_channels,
            v_channels=k_channels,
            pg_collection=pg_collection,
        )
        # megatron passes it on where cp is above 1, and dynamic groups are made of cp 1 too
        self.kernels.cp_comm_type = config.cp_comm_type

    def forward(
        self,
        query: Tensor,  # [T_local, heads, D]
        key: Tensor,  # [T_local, heads or a divisor of them, D]
        value: Tensor,  # as the keys, of at most their width
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None
        packed = packed_seq_params
        width = value.shape[2]
        causal = AttnMaskType.padding_causal
        wide = F.pad(value, (0, key.shape[2] - width)) if key.shape[2] != width else value
        place = packed.place
        bounds = thd_params(
            packed.cu_seqlens,
            packed.max_seqlen_q,
            local_cp_size=place.cp_size,
            cp_group=place.cp_group,
        )
        out = self.kernels(query, key, wide, None, causal, packed_seq_params=bounds)
        return out.unflatten(-1, (query.shape[1], -1))[..., :width]
