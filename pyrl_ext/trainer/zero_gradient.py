"""Whether a gradient of exactly 0 is a fault, or what the samples of a minibatch ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan.schema.objective import LOSSES

_MIN_ADVANTAGE = 1e-3
_MAX_LOGPROB = -1e-3  # above it the probability is nearly 1, and the gradient nearly 0


def check_zero_gradient(
    loss: str, minibatch: BatchShard, metrics: Mapping[str, float], update: str, topo: Topology
) -> None:
    """Refuse a gradient of exactly 0, under a built-in loss, that no state of a run explains.

    The gradient of fine-tuning is 0 only where all loss tokens are certain, so that the loss is 0
    as well.

    Args:
        loss: name of the loss; nothing is known of the gradients of a user's own.
        minibatch, metrics, topo: as in `tokens_with_gradient`.
        update: names the optimizer step, for the message.

    Raises:
        FloatingPointError: some tokens must have had a gradient.
    """
    tokens = 0
    why = "with an advantage"
    if loss in LOSSES and loss != "sft":
        tokens = tokens_with_gradient(minibatch, metrics, topo)
    elif loss == "sft" and metrics["loss"] > -_MAX_LOGPROB:
        tokens = minibatch.loss_tokens[0][0]
        why = f"whose mean loss is {metrics['loss']:.3g}"
    if tokens:
        raise FloatingPointError(
            f"Policy.update: the gradient norm of {update} is exactly 0, expected a gradient from "
            f"{tokens} tokens {why}; nothing is trained. Look for code that switches gradients off "
            "or freezes the weights"
        )


def tokens_with_gradient(
    minibatch: BatchShard, metrics: Mapping[str, float], topo: Topology
) -> int:
    """Number of loss tokens must have moved the weights under the built-in loss; a lower bound.

    A token has no gradient if its sample's advantage is 0, if its probability is 1, or if its ratio
    is clipped or clamped; and equal samples with opposite advantages cancel each other. What is
    left has one, so that a gradient of 0 means that gradients are switched off.

    Args:
        minibatch: with ``old_logprobs``.
        metrics: of the loss over this minibatch.

    Communicates: one number; if any token has an advantage, the tokens of samples with one. Only
        called where a gradient is 0.
    """
    advantages = _advantages(minibatch)
    with_one = (advantages.abs() > _MIN_ADVANTAGE).sum()[None].double()
    if not sum_over_ranks(with_one, topo).item():
        return 0
    parts = gather_objects(_rows_by_sample(minibatch, advantages, topo), topo.world)
    tokens: defaultdict[int, dict[int, int]] = defaultdict(dict)
    values: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for sample, position, token, advantage in (row for part in parts for row in part):
        tokens[sample][position], values[sample][position] = token, advantage
    net: defaultdict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for sample, found in tokens.items():
        total = net[tuple(found[position] for position in sorted(found))]
        for position, advantage in values[sample].items():
            total[position] = total.get(position, 0.0) + advantage
    moving = sum(abs(x) > _MIN_ADVANTAGE for total in net.values() for x in total.values())
    names = ("clip_fraction", "guarded_fraction", "opsm_fraction")
    stopped = sum(metrics.get(f"policy/{name}", 0) for name in names)
    return max(0, moving - round(stopped * minibatch.loss_tokens[0][0]))


def _advantages(minibatch: BatchShard) -> Tensor:
    """[N] the advantages of loss tokens that are not almost certain, 0 elsewhere."""
    columns = minibatch.columns
    if not minibatch.role.last_stage:
        return torch.zeros(0)
    counted = columns["loss_mask_0"] & (columns["old_logprobs"] < _MAX_LOGPROB)
    for weight in (columns[name] for name in ("weights", "corrections") if name in columns):
        counted &= weight != 0
    return torch.where(counted, columns["advantages"], 0)


def _rows_by_sample(
    minibatch: BatchShard, advantages: Tensor, topo: Topology
) -> list[tuple[int, int, int, float]]:
    """(sample, position, target, advantage) of this rank's rows, and the first token of a sample
    at position -1; each row on one rank."""
    if not minibatch.role.last_stage or topo.tp_rank:
        return []
    rows = minibatch.rows.tokens
    columns = minibatch.columns
    samples = minibatch.lengths.sample_of(rows)
    positions = rows - minibatch.lengths.starts[samples]
    first = (positions == 0).nonzero()[0].tolist()
    firsts = [(int(samples[i]), -1, int(columns["tokens"][i]), 0.0) for i in first]
    targets = columns["targets_0"].tolist()
    table = zip(samples.tolist(), positions.tolist(), targets, advantages.tolist(), strict=True)
    return [*table, *firsts]
