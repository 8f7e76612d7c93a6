"""The last pipeline stage: log-probs and entropies from hidden states, not logits.

megatron-core's GPTModel hands its hidden states and output layer to an ``output_processor``;
`score_tokens` is one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.loss import vocab_parallel
from pyrl_ext.loss.fused_head import linear_logprob, linear_logprob_loss
from pyrl_ext.loss.fused_head.divergence import Teacher
from pyrl_ext.loss.inputs import LossFn, LossInputs, Sums
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.plan import Plan


def score_tokens(
    plan: Plan,
    group: dist.ProcessGroup,
    micro: Microbatch,
    every_row: bool,
    loss: LossFn | None = None,
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    depth: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Sums]:
    """Log-probs of the targets of ``micro`` at ``depth``, and entropies, [M] fp32 each.

    With ``logprob.head: fused`` no logits outlive their chunk, but for the cache. Where ``micro``
    has kept sets, the next tokens are scored over them, those at MTP's depths over all tokens.

    Args:
        every_row: False: with ``fused``, only rows of loss tokens are scored, the others are NaN.
        loss: with ``fused``, what it makes of the next token's is returned instead.
        hidden_states: [M / tp, 1, H], the shard of the rows that sequence parallelism leaves here;
            [M, 1, H] without.
        output_layer, output_weight: megatron's; the weight is given where it is the embedding's, or
            detached. None: the layer's own.

    Communicates: over ``group``, as `linear_logprob` or the output layer and
    `vocab_parallel.logprobs`.
    """
    kept = None if depth else micro.kept
    how = plan.logprob
    depths = [micro.targets, *(inputs.targets for inputs in micro.mtp)]
    common: dict[str, Any] = {
        "temperature": plan.rollout.temperature,
        "valid_vocab": plan.sizes.vocab_size,
    }
    with record_function("pyrl: logprob"):
        if how.head == "logits":
            logits = output_layer(hidden_states, weight=output_weight)[0].flatten(0, 1)
            return vocab_parallel.logprobs(
                logits,
                depths[depth],
                group,
                inplace=True,  # nobody else reads them
                with_entropy=True,
                keep_mask=None if kept is None else kept.mask(group.rank(), logits),
                **common,
            )
        weight = output_layer.weight if output_weight is None else output_weight
        common |= {
            "rows": None if every_row else micro.loss_rows[depth],
            "chunk_bytes": plan.head_chunk_bytes,
            "sequence_parallel": output_layer.sequence_parallel,
            "kept": kept,
            "main_grad": torch.is_grad_enabled() and hasattr(weight, "main_grad"),
        }
        of_head = (hidden_states.flatten(0, 1), weight, depths[depth])
        if loss is None or depth:
            cache = how.cache_bytes // len(depths)
            return linear_logprob(*of_head, group, cache_bytes=cache, **common)
        assert micro.inputs is not None  # the head is on the last stage
        parts = _Parts(loss, micro.inputs)
        if micro.teacher is not None:
            hidden, head = micro.teacher
            kind = plan.objective.distill
            common["teacher"] = Teacher(hidden, *head, kind, plan.objective.distill_share)
        return linear_logprob_loss(*of_head, parts, group, **common), parts.count, parts.sums


class TeacherOutput:
    """Takes a teacher's hidden states in place of its log-probs, as an ``output_processor``.

    Attributes:
        head: the LM head of this rank [V_t / tp, H_t]; None before the first microbatch.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.head: Tensor | None = None

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any
    ) -> tuple[Tensor]:
        """[M, H_t] of all rows of the microbatch.

        Communicates: with sequence parallelism an all-gather over ``group``.
        """
        self.head = output_layer.weight if output_weight is None else output_weight
        hidden = hidden_states.flatten(0, 1)
        if not output_layer.sequence_parallel or self.group.size() == 1:
            return (hidden,)
        return (self._gathered(hidden),)

    def head_for(self, columns: int) -> Tensor:
        """The rows of the head [columns, H_t] for this rank's shard of a vocabulary that is
        padded differently.

        Communicates: an all-gather of the head over ``group``, if the shards differ.
        """
        assert self.head is not None  # every pass has a microbatch, if only of padding
        rows = self.head.detach()
        if self.group.size() > 1 and len(rows) != columns:
            first = self.group.rank() * columns
            rows = self._gathered(rows)[first : first + columns].clone()
        rows = rows[:columns]
        if len(rows) == columns:
            return rows
        return torch.cat([rows, rows.new_zeros(columns - len(rows), rows.shape[1])])

    def _gathered(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, rank after rank."""
        whole = rows.new_empty(self.group.size() * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=self.group)
        return whole


class _Parts:
    """A loss of chunks of tokens, with the sums of their counts and metrics."""

    def __init__(self, loss: LossFn, inputs: LossInputs):
        self.loss = loss
        self.inputs = inputs
        self.count: Any = 0
        self.sums: Sums = {}

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, tokens: Tensor, divergence: Tensor | None = None
    ) -> Tensor:
        given = ((f.name, getattr(self.inputs, f.name)) for f in fields(self.inputs))
        taken: dict[str, Any] = {n: None if x is None else x[tokens] for n, x in given}
        taken["divergence"] = divergence
        total, count, sums = self.loss(logprobs, entropy, LossInputs(**taken))
        self.count = self.count + count
        for name, (value, number) in sums.items():
            before = self.sums.get(name, (0, 0))
            self.sums[name] = (value.detach() + before[0], number + before[1])
        return total
