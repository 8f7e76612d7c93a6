"""Layers of the local backend that megatron-core takes from TransformerEngine otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """megatron's ``WrappedTorchNorm`` refuses sequence parallelism; all torch's norm lacks is the
    mark that its gradient must be summed over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentAttention(MLASelfAttention):
    """Multi-latent attention of the parts that its spec names. Where queries are not compressed,
    megatron-core 0.19.2 refuses a norm of keys and values alone."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*names, "q_layernorm", "kv_layernorm")}


class ReplicatedLinear(MegatronModule):
    """y = x W^T with the same W on every tensor-parallel rank, on the rank's shard of the sequence.

    What TELinear(parallel_mode="duplicated") is to the TE spec. megatron's local spec has
    column-parallel down projections in multi-latent attention instead, and then the rotary key's
    gradient is not summed over tensor-parallel ranks (off by 9e-3 of its maximum).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        parallel_mode: str | None = None,
        bias: bool = False,
        **_: Any,
    ):
        super().__init__(config=config)
        self.tp_group: Any = None  # set by model.build; megatron passes none to a replicated linear
        if bias or parallel_mode != "duplicated":
            raise ValueError(
                f"ReplicatedLinear: bias={bias}, parallel_mode={parallel_mode!r}, "
                "expected no bias and 'duplicated'"
            )
        device = torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.allreduce = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
