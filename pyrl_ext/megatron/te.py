"""TransformerEngine's layers and kernels (``model.backend: te``).

Its linears, norms and grouped products; core attention is this package's, as in the local backend,
or with ``model.te_attention`` its own.
Names of weights and keys of checkpoints are those of the local backend, so everything beyond the
model's build sees no difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import get_total_norm

from pyrl_ext.plan import Plan

# live tensor of TransformerEngine's layers -> its name in the local backend, in order
_NAMES = (
    (r"\.self_attention\.linear_qkv\.layer_norm_weight$", ".input_layernorm.weight"),
    (
        r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$",
        r".self_attention.\1_layernorm.weight",
    ),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
)
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)")
# key of a checkpoint that TransformerEngine's layers write -> the key that local layers write; of
# models with latent attention, and of others
_LATENT_KEYS = _NAMES[1:]
_GROUPED_KEYS = ((r"\.pre_mlp_layernorm\.weight$", ".mlp.linear_fc1.layer_norm_weight"),)
_STATE = "_extra_state"


def local_name(name: str, first_expert: int) -> str:
    """The local backend's name of a live tensor; names of the local backend stay as they are.

    Args:
        first_expert: global id of the rank's first expert.
    """
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.local_experts.{first_expert + int(expert[3])}.{expert[2]}.weight"
    for pattern, plain in _NAMES:
        name = re.sub(pattern, plain, name)
    return name


def te_fields(plan: Plan) -> dict[str, Any]:
    """Fields of megatron's config that differ from the local backend's; none for that one."""
    if plan.model.backend != "te":
        return {}
    fields = {
        "transformer_impl": "transformer_engine",
        "moe_grouped_gemm": bool(plan.sizes.num_experts),
        "cp_comm_type": plan.model.te_attention,  # None: core attention is `PackedAttention`
    }
    if recipe := plan.model.fp8:
        # the range of e5m2 is for gradients that share one scale a tensor; blocks have their own
        form = "hybrid" if recipe == "tensorwise" else "e4m3"
        fields |= {"fp8": form, "fp8_recipe": recipe}
    return fields


def use_kernels(backend: str) -> None:
    """Let megatron take ``backend``'s Adam, its kernels of norm, scale and copy, and its product of
    routers.

    megatron-core 0.19.2 takes TransformerEngine's wherever it can be imported, for models of local
    layers too: their arithmetic would depend on what else is installed. Its own norm without that
    waits for the device once a tensor, and its scaling writes each product to new memory first;
    `l2_norm` and `scale_all` replace them.
    """
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as mixed
    from megatron.core.transformer.moe import moe_utils

    norms = vars(clip_grads)
    mixes = vars(mixed)
    builds = vars(optimizer)
    if backend == "te":
        from megatron.core.extensions.transformer_engine import te_general_gemm as route
        from transformer_engine.pytorch import optimizers as te

        adam = te.FusedAdam
        apply = te.multi_tensor_applier
        scale = te.multi_tensor_scale
        norm = te.multi_tensor_l2norm
        scale_by_tensor = te.multi_tensor_scale_tensor
    else:
        from torch.optim import AdamW as adam

        route = None
        apply = utils.local_multi_tensor_applier
        scale = scale_all
        norm = l2_norm
        scale_by_tensor = None
    moe_utils.te_general_gemm = route  # type: ignore[assignment]
    builds |= {"Adam": adam, "USING_PYTORCH_OPTIMIZER": backend != "te"}
    norms |= {"multi_tensor_applier": apply, "l2_norm_impl": norm, "multi_tensor_scale_impl": scale}
    norms["multi_tensor_scale_tensor_impl"] = scale_by_tensor
    mixes |= {"multi_tensor_applier": apply, "multi_tensor_scale_impl": scale}


def l2_norm(
    _chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """The norm of all tensors of the one list together, [1] float32; no norms by tensor."""
    (tensors,) = lists
    return get_total_norm(tensors).float().view(1), None


def scale_all(
    _chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: float
) -> None:
    """Write ``factor * x`` of the first list into the second; both may be the same tensors."""
    for source, target in zip(*lists, strict=True):
        torch.mul(source, factor, out=target)


# checkpoints -------------------------------------------------------------------------------------


def with_local_keys(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """A model's sharded state with the same keys under both backends, and without the states of
    scales: recipes that the plan allows keep none. Renames in place.

    Args:
        state: name of a live tensor -> its part of a checkpoint.
        config: megatron's.
    """
    kept = {name: part for name, part in state.items() if _STATE not in name}
    if config.transformer_impl != "transformer_engine":
        return kept
    renamed = _LATENT_KEYS if config.multi_latent_attention else _GROUPED_KEYS
    for part in kept.values():
        for pattern, key in renamed:
            part.key = re.sub(pattern, key, part.key)
    return kept


def without_states(model: Module) -> dict[str, None]:
    """Empty states of scales, which ``load_state_dict`` of ``model`` expects too."""
    return dict.fromkeys(name for name in model.state_dict() if name.endswith(_STATE))
