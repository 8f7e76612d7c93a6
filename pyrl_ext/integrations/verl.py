"""Our pieces in verl 0.9.1's Megatron engine: `install`, or ``VERL_USE_EXTERNAL_MODULES`` with this
module's name, which verl imports in every process. docs/library.md has what each piece changes.

Left to verl: contiguous and dynamic context parallelism, buckets of lengths, FP8's padding, Ascend
devices, distillation, sums of squared probabilities, routes that are not jagged, and padded batches
(``preprocess_packed_seqs``), which its engine does not make.
"""

# verl has no types, and is not there when this is checked
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.integrations.patches import Replaced, replace_all
from pyrl_ext.loss import vocab_parallel
from pyrl_ext.ops import gather_rows
from pyrl_ext.pack import TokenLayout, packed_seq_params, unpack_rows
from pyrl_ext.replay import RoutedExperts
from pyrl_ext.schedule import equal_parts

VERSION = "0.9.1"
LAYOUT = "pyrl_layout"  # attribute of PackedSeqParams: the layout of rows that we packed


def _mpu() -> Any:
    from verl.models.mcore import util

    return util.mpu


def _place() -> tuple[int, int, int, int]:
    """Context-parallel ranks and which this is, tensor-parallel ranks and which this is."""
    mpu = _mpu()
    cp = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    return *cp, mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()


def _tp_group() -> Any:
    return _mpu().get_tensor_model_parallel_group()


def log_probs(theirs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return vocab_parallel.logprobs(logits, labels, _tp_group())


def entropy(theirs: Any, vocab_parallel_logits: Tensor, chunk_size: int = 0) -> Tensor:
    return vocab_parallel.entropy(vocab_parallel_logits, _tp_group())


def lm_head(
    theirs: Any, self: Any, logits: Tensor, label: Tensor, temperature: Tensor, **options: Any
) -> dict[str, Tensor]:
    others = "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"
    if any(options[name] for name in others):
        return theirs(self, logits, label, temperature, **options)
    positive = torch.where(temperature > 0, temperature, 1.0)  # it is 0 in padding rows
    found = vocab_parallel.logprobs(
        logits, label, _tp_group(), temperature=positive.float(), with_entropy=True
    )
    names = ("log_probs", "entropy") if options["calculate_entropy"] else ("log_probs",)
    return dict(zip(names, found))


def iter_model_routers(theirs: Any, model: Any) -> Iterator[tuple[int, Any]]:
    """(1-based layer number, RouterReplay) of every router but those of MTP layers, whose numbers
    begin at 1 again."""
    from verl.utils.megatron.router_replay_utils import TopKRouter

    for chunk in model if isinstance(model, list | tuple) else [model]:
        for module in chunk.modules():
            if isinstance(module, TopKRouter) and not module.is_mtp_layer:
                replay = getattr(module, "router_replay", None)
                if replay is not None and module.layer_number is not None:
                    yield module.layer_number, replay


def set_router_replay_data(
    theirs: Any, layers_topk_idx: Any, mask: Any, tf_config: Any, *rest: Any, **named: Any
) -> None:
    """Give the routers of ``model`` their rows of ``layers_topk_idx``, jagged [B, j, L, K].

    Raises: RuntimeError for columns L that are not of all layers or of all with experts;
    ValueError for experts that no token can have, naming sample, token and layer.
    """
    from verl.utils.megatron import router_replay_utils as utils

    model = named.get("model")
    others = named.get("local_cp_size") or tf_config.fp8 or not layers_topk_idx.is_nested
    if model is None or others or utils._context_parallel_layout(tf_config) != "zigzag":
        return theirs(layers_topk_idx, mask, tf_config, *rest, **named)
    layers = list(range(tf_config.num_layers))
    with_experts = [layer for layer in layers if utils.is_moe_layer(tf_config, layer)]
    columns = {len(with_experts): with_experts, len(layers): layers}
    if layers_topk_idx.shape[-2] not in columns:
        raise RuntimeError(
            f"set_router_replay_data: routes of {layers_topk_idx.shape[-2]} layers, expected "
            f"{len(layers)}, all layers, or {len(with_experts)}, those with experts. Look at what "
            "the engine returns"
        )
    found = list(utils.iter_model_routers(model))
    mine = [number - 1 for number, _ in found]
    cp_size, cp_rank, tp_size, tp_rank = _place()
    known = named.get("replay_mask")
    routes = RoutedExperts.from_ragged(
        layers_topk_idx.values(),
        layers_topk_idx.offsets().diff().tolist(),
        num_experts=tf_config.num_moe_experts,
        layer_ids=columns[layers_topk_idx.shape[-2]],
        layers=mine,
        cp_size=cp_size,
        cp_rank=cp_rank,
        tp_size=tp_size if tf_config.sequence_parallel else 1,
        tp_rank=tp_rank if tf_config.sequence_parallel else 0,
        align=tp_size * (2 * cp_size if cp_size > 1 else 1),  # sequence parallel or not
        known=None if known is None else known.values(),
        device=layers_topk_idx.device,
    )
    recomputed = tf_config.recompute_granularity is not None and torch.is_grad_enabled()
    for (_, router), chosen in zip(found, routes.of_layers(mine)):
        assert chosen is not None  # all of mine are among the columns
        router.set_target_indices(chosen.ids.long(), chosen.use)
        if not recomputed:  # nothing would take them out again
            router.replay_backward_list.clear()
            router.replay_backward_mask_list.clear()


def forward_backward_batch(theirs: Any, self: Any, data: Any, *rest: Any, **named: Any) -> Any:
    """Replay begins with this engine's routers, whichever was built last, and leaves nothing.

    Raises: RuntimeError for replay without packed sequences, whose rows theirs orders wrongly.
    """
    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.utils.tensordict_utils import get_non_tensor_data

    replays = get_non_tensor_data(data, "enable_routing_replay", False)
    if replays and not self.engine_config.use_remove_padding:
        raise RuntimeError(
            "forward_backward_batch: router_replay with use_remove_padding=False, expected packed "
            "sequences. Set use_remove_padding=True"
        )
    held = (getattr(module, "router_replay", None) for m in self.module for module in m.modules())
    RouterReplay.router_instances[:] = [hook for hook in held if isinstance(hook, RouterReplay)]
    self.mini_layer_topk_idx_list = []
    try:
        return theirs(self, data, *rest, **named)
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


def preprocess_thd_engine(
    theirs: Any, input_ids: Any, pre_process: bool = True, need_roll: bool = False, **others: Any
) -> tuple[Tensor, Any, Tensor | None]:
    """Jagged [B, j, ...] -> ([1, num_local, ...], PackedSeqParams, [1, num_local] positions).

    Padding rows are 0. With ``need_roll`` a row holds what follows its token in its sequence, and
    the last token's row is 0, where theirs has padding or a token of some sequence.
    Syncs: reads the lengths.
    """
    from verl.models.mcore.util import is_npu_available

    if set(others.values()) - {None, False, "zigzag"} or is_npu_available:
        return theirs(input_ids, pre_process, need_roll, **others)
    cp_size, cp_rank, tp_size, _ = _place()
    device = input_ids.device
    layout = TokenLayout(tuple(input_ids.offsets().diff().tolist()), cp_size, tp_size)
    params = packed_seq_params(layout.seqlens, cp_size, tp_size=tp_size, device=device)
    setattr(params, LAYOUT, layout)
    if not pre_process:
        return input_ids, params, None
    rows = layout.following(cp_rank) if need_roll else layout.rows(cp_rank)
    positions = layout.positions(cp_rank).clamp(min=0).to(device)
    return gather_rows(input_ids.values(), rows.to(device))[None], params, positions[None]


def postprocess_thd_engine(
    theirs: Any, output: Tensor, packed_seq_params: Any, ids: Any, *rest: Any, **named: Any
) -> Tensor:
    """[1, num_local, ...] -> jagged [B, j, ...]; rows that verl packed are unpacked by verl."""
    only_pass_on = any(option is False for option in (*rest, *named.values()))  # `post_process`
    if only_pass_on or not hasattr(packed_seq_params, LAYOUT):
        return theirs(output, packed_seq_params, ids, *rest, **named)
    layout = getattr(packed_seq_params, LAYOUT)
    group = _mpu().get_context_parallel_group() if layout.cp_size > 1 else None
    tokens = unpack_rows(output[0], layout, group)
    return torch.nested.nested_tensor_from_jagged(tokens, ids.offsets())


def balanced_partitions(
    theirs: Any, seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    parts = theirs(seqlen_list, k_partitions, equal_size)
    if not equal_size:
        return parts
    both = parts, equal_parts(seqlen_list, k_partitions)
    return min(both, key=lambda each: max(sum(seqlen_list[i] for i in ids) for ids in each))


_UTIL = "verl.models.mcore.util:"
_VOCAB = "verl.utils.megatron.tensor_parallel:vocab_parallel_"
_REPLAY = "verl.utils.megatron.router_replay_utils:"
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
PIECES: dict[str, dict[str, Callable[..., Any]]] = {
    "replay": {
        _REPLAY + "set_router_replay_data": set_router_replay_data,  # padding is K times expert 0
        _REPLAY + "iter_model_routers": iter_model_routers,  # MTP layers inside a wrapper
        _ENGINE + ".forward_backward_batch": forward_backward_batch,  # state after an exception
    },
    "logprobs": {
        _VOCAB + "log_probs_from_logits": log_probs,  # writes over fp32 logits
        _VOCAB + "entropy": entropy,  # three collectives, an error of 1e-4
        _VOCAB + "entropy_with_chunking": entropy,  # bounds memory that ours does not take
        _ENGINE + "WithLMHead._lm_head_logits_processor": lm_head,  # copies the logits
    },
    "packing": {  # loops over sequences
        _UTIL + "preprocess_thd_engine": preprocess_thd_engine,
        _UTIL + "postprocess_thd_engine": postprocess_thd_engine,
    },
    "balance": {  # up to 1.5 times the mean
        "verl.utils.seqlen_balancing:get_seqlen_balanced_partitions": balanced_partitions
    },
}


def install(only: Collection[str] = tuple(PIECES)) -> list[Replaced]:
    """Replace verl's functions by ours in this process; the second time changes nothing.

    Args:
        only: names of `PIECES`.

    Returns: what was replaced, and who holds it.
    Raises: RuntimeError for another version of verl; ValueError for an unknown name.
    """
    if unknown := sorted(set(only) - set(PIECES)):
        raise ValueError(f"verl.install: only has {unknown}, expected some of {list(PIECES)}")
    chosen = {theirs: ours for name in only for theirs, ours in PIECES[name].items()}
    return replace_all("verl.install", "verl", VERSION, chosen)


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install()
