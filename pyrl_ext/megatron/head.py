"""What the last pipeline stage makes of hidden states: log-probs and entropies, not logits.

megatron-core's GPTModel hands its hidden states and output layer to an ``output_processor``;
`score_tokens` is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.batch import Batch
from pyrl_ext.linear_logprob import linear_logprob
from pyrl_ext.logprob import vocab_parallel_logprob
from pyrl_ext.microbatch import Microbatch
from pyrl_ext.plan import Plan


def loss_rows(micro: Microbatch, batch: Batch, depth: int = 0) -> Tensor:
    """[N] int64 on the host, the local rows whose target at ``depth`` is a loss token.

    Args:
        batch: on the host, what ``micro`` was taken from.
        depth: of multi-token prediction; 0: the next token.
    """
    at = batch.ahead(micro.rows, depth)
    return ((at >= 0) & batch.loss_mask[at.clamp(min=0)]).nonzero()[:, 0]


def score_tokens(
    plan: Plan,
    group: dist.ProcessGroup,
    micro: Microbatch,
    batch: Batch | None,
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    depth: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets of ``micro`` at ``depth``, and entropies, [M] fp32 each.

    With ``logprob.head: fused`` no logits outlive their chunk, but for the cache.

    Args:
        batch: on the host, what ``micro`` was taken from: with ``fused``, only rows of loss tokens
            are scored and the others are NaN. None: all rows are scored.
        hidden_states: [M / tp, 1, H], the shard of the rows that sequence parallelism leaves here;
            [M, 1, H] without.
        output_layer, output_weight: megatron's; the weight is given where it is the embedding's, or
            detached. None: the layer's own.

    Communicates: over ``group``, as `linear_logprob` or the output layer and
    `vocab_parallel_logprob`.
    """
    how, depths = plan.logprob, [micro.targets, *(ahead.targets for ahead in micro.ahead)]
    with record_function("pyrl: logprob"):
        if how.head == "logits":
            logits, _bias = output_layer(hidden_states, weight=output_weight)
            return vocab_parallel_logprob(
                *(logits.flatten(0, 1), depths[depth], group),
                temperature=plan.rollout.temperature,
                valid_vocab=plan.shape.vocab_size,
                inplace=True,  # nobody else reads them
                with_entropy=True,
            )
        weight = output_layer.weight if output_weight is None else output_weight
        return linear_logprob(
            *(hidden_states.flatten(0, 1), weight, depths[depth], group),
            temperature=plan.rollout.temperature,
            valid_vocab=plan.shape.vocab_size,
            rows=None if batch is None else loss_rows(micro, batch, depth),
            chunk_bytes=how.chunk_bytes,
            cache_bytes=how.cache_bytes // len(depths),
            sequence_parallel=output_layer.sequence_parallel,
            main_grad=torch.is_grad_enabled() and hasattr(weight, "main_grad"),
        )
