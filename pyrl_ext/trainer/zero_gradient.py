"""Whether a gradient of exactly 0 is a fault, or what the samples of a minibatch ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from pyrl_ext.pack.batch import Batch

_MIN_ADVANTAGE = 1e-3
_MAX_LOGPROB = -1e-3  # above it the probability is nearly 1, and the gradient nearly 0


def check_zero_gradient(minibatch: Batch, metrics: Mapping[str, float], update: str) -> None:
    """Refuse a gradient of exactly 0, under the built-in loss, that no state of a run explains.

    Args:
        minibatch, metrics: as in `tokens_with_gradient`.
        update: names the optimizer step, for the message.

    Raises:
        FloatingPointError: some tokens must have had a gradient.
    """
    if tokens := tokens_with_gradient(minibatch, metrics):
        raise FloatingPointError(
            f"Policy.update: the gradient norm of {update} is exactly 0, expected a gradient from "
            f"{tokens} tokens with an advantage; nothing is trained. Look for code that switches "
            "gradients off or freezes the weights"
        )


def tokens_with_gradient(minibatch: Batch, metrics: Mapping[str, float]) -> int:
    """How many loss tokens must have moved the weights under the built-in loss; a lower bound.

    A token has no gradient if its sample's advantage is 0, if its probability is 1, or if its ratio
    is clipped or clamped; and equal samples with opposite advantages cancel each other. What is
    left has one, so that a gradient of 0 means that gradients are switched off.

    Args:
        minibatch: with ``old_logprobs``.
        metrics: of the loss over this minibatch.

    Syncs: if the batch is on a device. Only called where a gradient is 0.
    """
    assert minibatch.old_logprobs is not None
    counted = minibatch.loss_mask & (minibatch.old_logprobs < _MAX_LOGPROB)
    advantages = torch.where(counted, minibatch.advantages, 0)
    net: defaultdict[tuple[int, ...], Tensor | float] = defaultdict(float)
    for first, last in zip(minibatch.starts[:-1], minibatch.starts[1:], strict=True):
        tokens = (*minibatch.tokens[first:last].tolist(), int(minibatch.targets[last - 1]))
        net[tokens] = net[tokens] + advantages[first:last]
    moving = sum(int((torch.as_tensor(x).abs() > _MIN_ADVANTAGE).sum()) for x in net.values())
    stopped = metrics.get("policy/clip_fraction", 0) + metrics.get("policy/guarded_fraction", 0)
    return max(0, moving - round(stopped * minibatch.num_loss_tokens))
