"""The loss of supervised fine-tuning: negative log-likelihood of the loss tokens."""

from __future__ import annotations

from torch import Tensor

from pyrl_ext.loss.inputs import LossInputs, Sums, masked


def sft_loss(
    logprobs: Tensor, entropy: Tensor | None, fields: LossInputs
) -> tuple[Tensor, Tensor, Sums]:
    """``sum over loss tokens of  -logprob``, the cross entropy with the given tokens.

    Args:
        logprobs: [T] float32 with gradient, of the target in the policy now [nats].
        entropy: [T] float32 of the policy's distribution [nats]; a metric here; or None.
        fields: of which the loss mask is read.

    Returns:
        Sum over local tokens (scalar of the dtype of ``logprobs``), count of local loss tokens
        (int64 scalar), and metrics as name -> (sum, count).
    """
    count = fields.loss_mask.sum()
    loss = -masked(logprobs, fields.loss_mask).sum()
    sums: Sums = {"loss": (loss.detach().double(), count)}
    if entropy is not None:
        total = masked(entropy.detach(), fields.loss_mask).double().sum()
        sums["policy/entropy"] = (total, count)
    return loss, count, sums
