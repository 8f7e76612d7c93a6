"""The clipped policy gradient loss of GRPO, with its KL, entropy and mismatch terms."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrl_ext.loss.inputs import (
    LossInputs,
    ObjectiveConfig,
    Sums,
    clamp_log_ratio,
    masked,
    missing_input,
)


def grpo_loss(
    logprobs: Tensor, entropy: Tensor | None, fields: LossInputs, config: ObjectiveConfig
) -> tuple[Tensor, Tensor, Sums]:
    """``sum over tokens of  w * max(-r A, -clip(r) A) + kl_coef * k3 - entropy_coef * H``.

    r = exp(logprob - old), clip to [1 - clip_low, 1 + clip_high]; w = min(exp(old - rollout),
    tis_cap) without a gradient, 1 if tis_cap is None; k3 = s - 1 - log s with s = exp(ref -
    logprob). Log-ratios are clamped to +-20 before exp; a clamped one has no gradient and is
    counted in ``policy/guarded_fraction``.

    Args:
        logprobs: [T] float32 with gradient, of the target in the policy now [nats].
        entropy: [T] float32 of the policy's distribution [nats], with gradient if entropy_coef
            is used; or None.
        fields: the other token-wise inputs.
        config: clip_low, clip_high, kl_coef, entropy_coef, tis_cap.

    Returns:
        Sum over local tokens (scalar of the dtype of ``logprobs``), count of local loss tokens
        (int64 scalar), and metrics as name -> (sum, count).

    Raises:
        ValueError: a coefficient asks for an input that is None.

    Source: PPO, https://arxiv.org/abs/1707.06347; separate clips, DAPO,
    https://arxiv.org/abs/2503.14476; truncated importance sampling,
    https://fengyao.notion.site/off-policy-rl; k3, http://joschu.net/blog/kl-approx.html.
    """
    mask = fields.loss_mask
    logp, old = masked(logprobs, mask), masked(fields.old_logprobs, mask)
    policy, metrics, guarded = _policy_terms(logp, old, fields, config)
    loss, parts = policy, {"loss/policy": policy}

    if fields.ref_logprobs is not None:
        log_s, guarded_ref = clamp_log_ratio(masked(fields.ref_logprobs, mask) - logp)
        ref_kl = torch.expm1(log_s) - log_s
        guarded = guarded | guarded_ref
        metrics["policy/ref_kl"] = ref_kl
        if config.kl_coef:
            parts["loss/ref_kl"] = config.kl_coef * ref_kl
            loss = loss + parts["loss/ref_kl"]
    elif config.kl_coef:
        raise ValueError(missing_input("kl_coef", config.kl_coef, "ref_logprobs"))

    if entropy is not None:
        metrics["policy/entropy"] = masked(entropy, mask)
        if config.entropy_coef:
            parts["loss/entropy"] = -config.entropy_coef * metrics["policy/entropy"]
            loss = loss + parts["loss/entropy"]
    elif config.entropy_coef:
        raise ValueError(missing_input("entropy_coef", config.entropy_coef, "entropy"))

    count = mask.sum()
    metrics |= parts | {"loss": loss, "policy/guarded_fraction": guarded}
    sums = {name: (x.detach().sum(dtype=torch.float64), count) for name, x in metrics.items()}
    return loss.sum(), count, sums


def _policy_terms(
    logp: Tensor, old: Tensor, fields: LossInputs, config: ObjectiveConfig
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The clipped and weighted policy term, its metrics, and where a log-ratio was clamped."""
    mask = fields.loss_mask
    advantages = masked(fields.advantages, mask)
    log_ratio, guarded = clamp_log_ratio(logp - old)
    ratio = log_ratio.exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    metrics = {"policy/ppo_kl": old - logp.detach(), "policy/clip_fraction": clipped}
    if config.tis_cap is not None:
        log_weight, guarded_weight = clamp_log_ratio(old - masked(fields.rollout_logprobs, mask))
        weight = log_weight.detach().exp().clamp(max=config.tis_cap)
        loss = loss * weight
        guarded = guarded | guarded_weight
        metrics["policy/tis_mean"] = masked(weight, mask)
    return loss, metrics, guarded
