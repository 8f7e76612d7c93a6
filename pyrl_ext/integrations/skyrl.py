"""SkyRL 0.3.0 with this package's router replay, token log-probs and packing.

Call `install` in every process that trains, before it makes its worker: with Ray,
``runtime_env={"worker_process_setup_hook": "pyrl_ext.integrations.skyrl.install"}``. SkyRL has no
registry for these functions, so each is replaced in every module of SkyRL that holds it.

The loss, the scatter of log-probs to padded rows, batches without packing (`remove_left_padding`)
and balancing stay SkyRL's. ``logprobs_chunk_size`` bounds what is in memory with
``fused_lm_head_logprob``; without it nothing of the size of logits is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from pyrl_ext import loss, ops, pack, replay
from pyrl_ext.integrations.patches import Replaced, replace_all

VERSION = "0.3.0"
THEIRS = "skyrl.backends.skyrl_train"
MODEL = f"{THEIRS}.workers.megatron.megatron_model_wrapper"
MEGATRON = f"{THEIRS}.distributed.megatron"
REPLAY = "pyrl_replay"  # attribute of a model's first chunk, with which it goes

# the chunk whose forward runs now
_forward: ContextVar[tuple[replay.Replay, nn.Module]] = ContextVar("_forward")


def install() -> list[Replaced]:
    """Replace SkyRL's functions in this process; again: harmless. Returns what was replaced.

    Raises: RuntimeError if skyrl 0.3.0 is not installed.
    """
    values = f"{MEGATRON}.model_utils"
    replacements: dict[str, Callable[..., Any]] = {
        # knows the model's chunks, so that routes go to routers, not to a list of the process
        f"{MODEL}:get_forward_backward_func": _schedule,
        # layers by their ids, rows as the routers have them, distinct experts in padding
        f"{THEIRS}.utils.replay_utils:setup_per_microbatch_replay_forward": _use_routes,
        # one read and one collective, in float32
        f"{values}:DistributedLogprob.apply": _logprob,
        f"{values}:ChunkedDistributedLogprob.apply": _logprob,
        f"{values}:vocab_parallel_entropy": _entropy,
        # the same from hidden states
        f"{values}:_fused_lm_head_logprob_apply": _fused_logprob,
        f"{values}:_fused_vocab_parallel_entropy_from_hidden": _fused_entropy,
        # the gradient of hidden states is summed over ranks there, which this one did
        f"{MODEL}:_fused_lm_head_output_processor": _hidden_states,
        # one copy to the host and one kernel instead of a loop over sequences
        f"{MEGATRON}.megatron_utils:preprocess_packed_seqs": _pack,
    }
    return replace_all("skyrl.install", "skyrl", VERSION, replacements)


# router replay ------------------------------------------------------------------------------------


def _schedule(theirs: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """megatron's schedule, in a session of `Replay` if the model replays."""
    run = theirs()

    def run_replayed(*, forward_step_func: Any, model: Sequence[nn.Module], **more: Any) -> Any:
        if not _theirs("megatron_utils").get_model_config(model[0]).moe_enable_routing_replay:
            return run(forward_step_func=forward_step_func, model=model, **more)
        if not hasattr(model[0], REPLAY):
            setattr(model[0], REPLAY, replay.Replay(model))
        routers: replay.Replay = getattr(model[0], REPLAY)

        def step(batches: Iterator[dict[str, Any]], chunk: nn.Module) -> Any:
            # SkyRL takes the routes out of the batch, which the rank's next chunk gets as well
            batch = dict(next(batches))
            routers.use(chunk, None)
            running = _forward.set((routers, chunk))
            try:
                return forward_step_func(iter([batch]), chunk)
            finally:
                _forward.reset(running)

        with routers.session():
            return run(forward_step_func=step, model=model, **more)

    return run_replayed


def _use_routes(
    theirs: Any,
    rollout_expert_indices: Tensor,
    attention_mask: Tensor,
    model_config: Any,
    remove_microbatch_padding: bool = False,
) -> None:
    """Use the routes [B, S, L, K] of a microbatch in the forward that runs now. Where all experts
    of a token are 0, which SkyRL fills in for what the engine did not return, routers choose.

    Raises: ValueError if L is below the model's layers, or experts are out of range or repeated.
    """
    routers, chunk = _forward.get()
    columns = rollout_expert_indices.shape[2]
    if columns < model_config.num_layers:
        raise ValueError(
            f"skyrl replay: routes of {columns} layers, expected those of all "
            f"{model_config.num_layers}, dense ones too. Use an engine that returns them"
        )
    place = _sizes(_theirs("packing_utils").is_fp8_enabled(model_config.fp8))
    place["cp_rank"] = _mpu().get_context_parallel_rank()
    place["tp_rank"] = _mpu().get_tensor_model_parallel_rank()
    if not remove_microbatch_padding:
        rows = _sequence_major(attention_mask, place["align"])
        place["rows"] = rows.chunk(place["tp_size"])[place["tp_rank"]].flatten()
    routes = replay.RoutedExperts.from_padded(
        rollout_expert_indices,
        attention_mask,
        num_experts=model_config.num_moe_experts,
        layers=[layer for layer in routers.layers if layer < columns],  # an MTP layer has none
        known=(rollout_expert_indices != 0).flatten(2).any(-1),
        **place,
    )
    routers.use(chunk, routes)


def _sequence_major(attention_mask: Tensor, align: int) -> Tensor:
    """[longest, B] int64 on the host: where in [B * S] the first tokens of all samples are, then
    all second ones, as megatron's rows without packing; -1 = padding."""
    mask = attention_mask.bool().cpu()
    batch, length = mask.shape
    longest = -(-int(mask.sum(1).max()) // align) * align
    rows = torch.full((longest, batch), -1)
    sample, column = mask.nonzero(as_tuple=True)
    rows[mask.cumsum(1)[mask] - 1, sample] = sample * length + column
    return rows


# log-probs ----------------------------------------------------------------------------------------


def _logprob(theirs: Any, logits: Tensor, target: Tensor, *more: Any) -> Tensor:
    """[B, S] float32 log-prob of ``target`` [B, S] in ``logits`` [B, S, V_local]."""
    group = more[-2]  # after the shard's bounds and perhaps a chunk; then, whether without gradient
    return loss.vocab_parallel.logprobs(logits, target, group)


def _entropy(theirs: Any, logits: Tensor) -> Tensor:
    """[...] float32 entropy of ``logits`` [..., V_local] in nats."""
    return loss.vocab_parallel.entropy(logits, _mpu().get_tensor_model_parallel_group())


def _fused_logprob(
    theirs: Any, backend: str, hidden: Tensor, weight: Tensor, target: Tensor, *more: Any
) -> Tensor:
    """`_logprob` of ``hidden`` [B, S, H] times the head's shard ``weight`` [V_local, H]. The
    gradient of ``hidden`` is that of all ranks."""
    chunk_size, group = more[2:4]
    return _from_hidden(hidden, weight, target, group, chunk_size)[0]


def _fused_entropy(theirs: Any, hidden: Tensor, weight: Tensor, group: Any, **more: Any) -> Tensor:
    """[B, S] float32 entropy, as `_fused_logprob`."""
    any_target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return _from_hidden(hidden, weight, any_target, group, **more)[1]


def _from_hidden(
    hidden: Tensor, weight: Tensor, target: Tensor, group: Any, chunk_size: int | None, **more: Any
) -> list[Tensor]:
    """[log-prob, entropy], each [B, S]."""
    rows = target.numel() if chunk_size is None else len(target) * chunk_size
    hidden = hidden.flatten(0, -2).to(weight.dtype)
    more["chunk_bytes"] = max(rows, 1) * len(weight) * 8  # logits and their gradients in float32
    both = loss.linear_logprob(hidden, weight, target.flatten(), group, **more)
    return [values.view(target.shape) for values in both]


def _hidden_states(theirs: Any, **model: Any) -> Tensor:
    """megatron's output processor: [B, S, H] hidden states; the context gets the head's weight."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

    head = model["output_layer"]
    weight = model["output_weight"]
    model["context"]["lm_head_weight"] = head.weight if weight is None else weight
    hidden = model["hidden_states"]
    if head.sequence_parallel:  # every rank has the whole gradient, and keeps its rows
        hidden = gather(hidden, tensor_parallel_output_grad=False)
    return hidden.transpose(0, 1).contiguous()


def _pack(
    theirs: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    pre_process: bool = True,
    sub_seq_lengths: list[list[int]] | None = None,
    fp8_enabled: bool = False,
) -> tuple[Tensor, Any]:
    """``input_ids`` [B, S, ...] -> ([1, this rank's rows, ...], megatron's PackedSeqParams).

    Raises: ValueError if ``sub_seq_lengths`` are not those of the rows.
    """
    sizes = _sizes(fp8_enabled)
    align = sizes["align"]
    mask = attention_mask.bool().cpu()
    inner = mask.sum(1, keepdim=True).tolist() if sub_seq_lengths is None else sub_seq_lengths
    lengths = [rows for each in inner for rows in each]
    if sub_seq_lengths is not None:
        mask = torch.zeros(mask.shape, dtype=torch.bool)
        for row, each in zip(mask, inner, strict=False):
            start = 0
            for rows in each:
                row[start : start + rows] = True
                start += -(-rows // align) * align
    places = mask.flatten().nonzero().flatten()
    if len(inner) != len(mask) or len(places) != sum(lengths):
        raise ValueError(
            f"skyrl packing: sub_seq_lengths {inner}, expected sequences that fill the rows of "
            f"input_ids {list(input_ids.shape)}, each padded to a multiple of {align}. Give those "
            "of this batch"
        )
    params = pack.packed_seq_params(lengths, **sizes, device=input_ids.device)
    if not pre_process:
        return input_ids, params
    rows = pack.TokenLayout(tuple(lengths), **sizes).rows(_mpu().get_context_parallel_rank())
    rows = torch.where(rows < 0, rows, places[rows])
    return ops.gather_rows(input_ids.flatten(0, 1), rows.to(input_ids.device))[None], params


def _sizes(fp8: bool) -> dict[str, Any]:
    """Sizes of the `TokenLayout` that pads sequences as SkyRL does."""
    tp_size = _mpu().get_tensor_model_parallel_world_size()
    cp_size = _mpu().get_context_parallel_world_size()
    align = _theirs("packing_utils").get_packed_seq_align_size(tp_size, cp_size, fp8)
    return {"tp_size": tp_size, "cp_size": cp_size, "align": align}


def _mpu() -> Any:
    return _theirs("megatron_utils").mpu


def _theirs(name: str) -> Any:
    return import_module(f"{MEGATRON}.{name}")
