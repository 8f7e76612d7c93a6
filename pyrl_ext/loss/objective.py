"""The objective made of named parts, as the loss of a pass.

``sum over loss tokens of  u (c P + kl_coef K + distill_coef D - entropy_coef H)``: P the policy
term of the ratio, c the corrections' weight, K the KL term, D the divergence from a teacher, H the
entropy, u the reduction's weight. Each part is one
function and reads no other: `pyrl_ext.loss.objective`, `policy_terms`, `kl`, `corrections`,
`reductions`, `advantages`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyrl_ext.loss.inputs import (
    LossInputs,
    Sequences,
    Sums,
    clamp_log_ratio,
    masked,
    missing_input,
)
from pyrl_ext.loss.kl import VALUES, kl_terms
from pyrl_ext.loss.policy_terms import TERMS, Scored
from pyrl_ext.plan.schema.objective import Objective


def policy_loss(
    logprobs: Tensor, entropy: Tensor | None, fields: LossInputs, config: Objective
) -> tuple[Tensor, Tensor, Sums]:
    """The sum over this rank's loss tokens of the loss that ``config`` describes.

    Log-ratios are clamped to +-20 before exp; a clamped one has no gradient and is counted in
    ``policy/guarded_fraction``.

    Args:
        logprobs: [T] float32 with gradient, of the target in the policy now [nats].
        entropy: [T] float32 of the policy's distribution [nats], with gradient if entropy_coef
            is used; or None.
        fields: the other token-wise inputs.
        config: the ``objective`` section.

    Returns:
        Sum over local tokens (scalar of the dtype of ``logprobs``), count of local loss tokens
        (int64 scalar), and metrics as name -> (sum, count).

    Communicates: what `Sequences.mean` does, for a part that needs whole sequences.
    Raises:
        ValueError: a part asks for an input that is None.
    """
    mask = fields.loss_mask
    logp = masked(logprobs, mask)
    old = masked(fields.old_logprobs, mask)
    _check_inputs(fields, config)
    anchor = old if config.anchor == "old" else masked(fields.rollout_logprobs, mask)
    d, guarded = clamp_log_ratio(log_ratios(config.ratio, logp - anchor, fields.sequences))
    advantages = masked(fields.advantages, mask)
    scored = Scored(d, logp, anchor, advantages, fields.sequences)
    policy, clipped = TERMS[config.loss](scored, config)
    metrics = {"policy/ppo_kl": old - logp.detach(), "policy/clip_fraction": clipped}
    if fields.corrections is not None:
        policy = policy * masked(fields.corrections, mask)
    if config.opsm is not None and fields.sequences is not None:
        fell = fields.sequences.mean((old - logp).detach()) > config.opsm
        dropped = mask & (advantages < 0) & fell
        policy = torch.where(dropped, 0, policy)
        metrics["policy/opsm_fraction"] = dropped
    parts = {"loss/policy": policy}
    if fields.ref_logprobs is not None:
        k, guarded_ref = clamp_log_ratio(logp - masked(fields.ref_logprobs, mask))
        guarded = guarded | guarded_ref
        metrics["policy/ref_kl"] = VALUES[config.kl](k.detach())
        if config.kl_coef and config.kl_in == "loss":
            parts["loss/ref_kl"] = config.kl_coef * kl_terms(config, k, logp - anchor)
    elif config.kl_coef:
        raise ValueError(missing_input("kl_coef", config.kl_coef, "ref_logprobs"))
    if entropy is not None:
        metrics["policy/entropy"] = masked(entropy, mask)
        if config.entropy_coef:
            parts["loss/entropy"] = -config.entropy_coef * metrics["policy/entropy"]
    elif config.entropy_coef:
        raise ValueError(missing_input("entropy_coef", config.entropy_coef, "entropy"))
    if config.compares_distributions:
        if fields.divergence is None:
            raise ValueError(missing_input("distill_coef", config.distill_coef, "divergence"))
        divergence = masked(fields.divergence, mask)
        metrics["policy/divergence"] = divergence.detach()
        parts["loss/distill"] = config.distill_coef * divergence
    loss, count, sums = _summed(fields, parts, metrics | {"policy/guarded_fraction": guarded})
    return loss, count, sums | _by_age(fields, clipped)


def _check_inputs(fields: LossInputs, config: Objective) -> None:
    """Refuse inputs without what a part needs: it would be left out in silence."""
    needed = {
        "sequences": config.needs_sequences,
        "weights": config.reduction != "token",
        "corrections": config.corrects,
    }
    for name, asked in needed.items():
        if asked and getattr(fields, name) is None:
            raise ValueError(f"policy_loss: {name} is None, expected it; call weigh_tokens before")


def _by_age(fields: LossInputs, clipped: Tensor) -> Sums:
    """The clip fraction of the tokens of each age."""
    if fields.ages is None:
        return {}
    of_age = (fields.ages & fields.loss_mask[:, None]).T
    pairs = zip((of_age & clipped).sum(1).double(), of_age.sum(1), strict=True)
    return {f"age/clip_fraction_{age}": pair for age, pair in enumerate(pairs)}


def _summed(
    fields: LossInputs, parts: dict[str, Tensor], metrics: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Sums]:
    """The parts, weighed by the reduction and added up; and all sums with the number of tokens."""
    if fields.weights is not None:
        weights = masked(fields.weights, fields.loss_mask)
        parts = {name: part * weights for name, part in parts.items()}
    loss = torch.stack([*parts.values()]).sum(0)
    count = fields.loss_mask.sum()
    inside = {name: masked(values, fields.loss_mask) for name, values in metrics.items()}
    named = inside | parts | {"loss": loss}
    sums = {name: (x.detach().sum(dtype=torch.float64), count) for name, x in named.items()}
    return loss.sum(), count, sums


def log_ratios(kind: str, d: Tensor, sequences: Sequences | None) -> Tensor:
    """[T] log-ratio of each token, before it is clamped.

    ==============  ==================================================
    kind            log-ratio
    ==============  ==================================================
    token           d
    sequence        mean of d over the sequence's loss tokens
    sequence_token  that mean without its gradient, with the one of d
    ==============  ==================================================

    Args:
        d: [T] logp - anchor, 0 outside the loss mask.

    Source: GSPO and GSPO-token, https://arxiv.org/abs/2507.18071.
    """
    if kind == "token":
        return d
    assert sequences is not None
    if kind == "sequence":
        return sequences.mean(d)
    own = d.detach()
    return sequences.mean(own) + (d - own)


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
