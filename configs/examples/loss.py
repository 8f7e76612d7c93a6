"""A loss: policy gradient in which bad samples fade as the policy leaves them."""

import torch


def tapered(logprobs, entropy, fields, config):
    """-A logp where A > 0; -A min(r, 1) logp where A < 0, r = exp(logp - old) without its gradient.

    Args:
        logprobs, entropy: [T] float32, of the policy now
        fields: ``old_logprobs``, ``advantages``, ``loss_mask`` [T] and more (`LossInputs`)
        config: the objective section of the YAML file

    Returns:
        the sum over loss tokens, their number, metrics as (sum, number)
    """
    mask = fields.loss_mask
    advantages = fields.advantages
    # rows outside the mask may hold anything, so they are replaced before they are used
    ratio = torch.where(mask, logprobs.detach() - fields.old_logprobs, 0).clamp(-20, 20).exp()
    taper = torch.where(advantages < 0, ratio.clamp(max=1), 1)
    loss = -advantages * taper * logprobs - config.entropy_coef * entropy
    count = mask.sum()
    tapered = (mask & (taper < 1)).sum()
    return torch.where(mask, loss, 0).sum(), count, {"policy/tapered": (tapered, count)}
