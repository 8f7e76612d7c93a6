"""The grids of the CUDA kernels walked on the host, thread by thread.

An extension built with PYRL_TESTS has them: `make build` makes one, wheels do without.
"""

from math import prod

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of
from pyrl_ext.ops.expert_rows.native import arguments as expert_rows_arguments
from pyrl_ext.ops.expert_rows.native import grad_arguments as expert_rows_grad_arguments
from pyrl_ext.ops.expert_rows.reference import new_outputs
from pyrl_ext.ops.gather_fields import flat_layout, pattern
from pyrl_ext.ops.gather_routes.native import arguments as routes_arguments
from pyrl_ext.ops.gather_rows.native import rows_of
from pyrl_ext.ops.latent_keys.native import arguments as keys_arguments
from pyrl_ext.ops.replay_probs.native import arguments as probs_arguments
from pyrl_ext.ops.rotary.native import arguments as rotary_arguments
from pyrl_ext.ops.sum_rows.native import arguments as sum_arguments
from pyrl_ext.ops.swiglu.native import arguments as swiglu_arguments
from pyrl_ext.ops.token_logprob.native import Shard, new_rows, row_grad, shard_stats


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor | None) -> Tensor:
    out = src.new_empty(len(rows), *src.shape[1:])
    field = C.Field(
        src=src.data_ptr(),
        stride=src.stride(0) * src.element_size(),
        out=out.data_ptr(),
        row_bytes=prod(src.shape[1:]) * src.element_size(),
        fill=0 if fill is None else fill.data_ptr(),
    )
    C.gather_rows_emulated(fields=[field], rows=rows.data_ptr(), num_out=len(rows))
    return out


def gather_fields(fields: list[Tensor], rows: Tensor, fills: list[float]) -> Tensor:
    fields = [rows_of(field) for field in fields]
    starts, row_bytes = flat_layout(fields, len(rows))
    flat = torch.empty(starts[-1], dtype=torch.uint8)
    table = [
        C.Field(
            src=field.data_ptr(),
            stride=field.stride(0) * field.element_size(),
            out=flat.data_ptr() + start,
            row_bytes=row_size,
            pattern=pattern(field.dtype, fill),
        )
        for field, start, row_size, fill in zip(fields, starts, row_bytes, fills)
    ]
    C.gather_rows_emulated(fields=table, rows=rows.data_ptr(), num_out=len(rows))
    return flat


def gather_routes(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = routes.new_empty(len(layers), len(rows), routes.shape[2])
    C.gather_routes_emulated(args=routes_arguments(routes, rows, layers, num_experts, out))
    return out


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    out = src.new_empty(len(starts) - 1, *src.shape[1:])
    C.sum_rows_emulated(args=sum_arguments(src, starts, order, out))
    return out


def swiglu(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    C.swiglu_emulated(args=swiglu_arguments(gate_up, weight, None, out, None))
    return out


def swiglu_grad(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(gate_up)
    weight_grad = torch.empty(len(gate_up) if weight is not None else 0)
    C.swiglu_emulated(args=swiglu_arguments(gate_up, weight, grad, out, weight_grad))
    return out, weight_grad


def replay_probs(
    scores: Tensor, ids: Tensor, norm: str, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out = torch.empty(scores.shape, dtype=out_dtype)
    routing_map = torch.empty(scores.shape, dtype=torch.bool)
    args = probs_arguments(scores, ids, norm, scale, None, out, routing_map)
    C.replay_probs_emulated(args=args, first=0)
    return out, routing_map


def replay_probs_grad(grad: Tensor, scores: Tensor, ids: Tensor, norm: str, scale: float) -> Tensor:
    out = torch.empty_like(scores)
    C.replay_probs_emulated(
        args=probs_arguments(scores, ids, norm, scale, grad, out, None), first=0
    )
    return out


def token_logprob_stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None = None,
) -> Tensor:
    shard = Shard(logits, targets, scale, keep_mask)
    out = scale.new_empty(4, logits.shape[0])
    scratch = scale.new_empty(C.token_logprob_scratch(tokens=logits.shape[0], width=width))
    C.token_logprob_stats_emulated(
        shard=shard.columns(first, width),
        out=C.StatsOut(stats=out.data_ptr()),
        scratch=scratch.data_ptr(),
    )
    return out


def token_logprob_rows(
    logits: Tensor, targets: Tensor, scale: Tensor, width: int, keep_mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    shard, (out, addresses) = Shard(logits, targets, scale, keep_mask), new_rows(scale)
    scratch = scale.new_empty(C.token_logprob_scratch(tokens=logits.shape[0], width=width))
    C.token_logprob_stats_emulated(
        shard=shard.columns(0, width),
        out=C.StatsOut(rows=addresses),
        scratch=scratch.data_ptr(),
    )
    return out


def token_logprob_combine(
    stats: Tensor, targets: Tensor, scale: Tensor, valid_vocab: int
) -> tuple[Tensor, ...]:
    out, addresses = new_rows(scale)
    shards = shard_stats(stats, targets, scale, valid_vocab)
    C.token_logprob_combine_emulated(shards=shards, rows=addresses)
    return out


def token_logprob_grad(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    keep_mask: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    shard = Shard(logits, targets, scale, keep_mask)
    out = torch.empty_like(shard.logits, dtype=dtype) if out is None else out
    rows = [r.contiguous() for r in (max, log_sum, entropy, grad_logprob, grad_entropy)]
    C.token_logprob_grad_emulated(
        shard=shard.columns(first, width),
        row=row_grad(rows),
        out=out.data_ptr(),
        dtype=dtype_of(out),
    )
    return out


def rotary(
    query: Tensor, key: Tensor, turns: Tensor, last: bool, source: str, result: str, back: bool
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape), key.new_empty(key.shape)
    args = rotary_arguments((query, key), turns, last, source, result, back, out)
    C.rotary_emulated(args=args)
    return out


def latent_keys(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    key = both.new_empty(*both.shape[:2], plain + shared.shape[1])
    value = both.new_empty(*both.shape[:2], both.shape[2] - plain)
    C.latent_keys_emulated(args=keys_arguments(key, value, both, shared, back=False))
    return key, value


def latent_keys_grad(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    both = key.new_empty(*key.shape[:2], plain + value.shape[2])
    shared = key.new_empty(len(key), key.shape[2] - plain)
    C.latent_keys_emulated(args=keys_arguments(key, value, both, shared, back=True))
    return both, shared


def expert_rows(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, ...]:
    out = new_outputs(probs, top_k)
    scratch = torch.empty(C.expert_rows_scratch(*probs.shape), dtype=torch.int32)
    args = expert_rows_arguments(routing_map.contiguous(), probs.contiguous(), top_k, out)
    C.expert_rows_emulated(args=args, scratch=scratch.data_ptr())
    return out


def expert_rows_grad(
    grad: Tensor, order: Tensor, places: Tensor, tokens: int, experts: int
) -> Tensor:
    out = grad.new_empty(tokens, experts)
    C.expert_rows_grad_emulated(args=expert_rows_grad_arguments(grad, order, places, out))
    return out
