"""Advantages and losses, one function each, with the corrections for rollout/trainer mismatch.

A loss returns (sum over its local tokens, local loss-token count, metrics as sums with their
counts); the caller divides once, by the minibatch's token count over all ranks. The result
therefore does not depend on how samples were split into microbatches or ranks.

Rows outside the loss mask may hold anything, NaN included: they are replaced before any
arithmetic, so neither values nor gradients leak from them. NaN inside the mask propagates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pyrl_ext.named import load_function

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: a larger ratio carries no information, only overflow

Sums = dict[str, tuple[Tensor, Tensor]]
AdvantageFn = Callable[[Tensor, Tensor], Tensor]
LossFn = Callable[[Tensor, Tensor | None, "LossInputs"], tuple[Tensor, Tensor, Sums]]


class ObjectiveConfig(Protocol):
    """The ``objective`` section of the plan."""

    @property
    def advantage(self) -> str: ...
    @property
    def normalize_std(self) -> bool: ...
    @property
    def loss(self) -> str: ...
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def entropy_coef(self) -> float: ...
    @property
    def tis_cap(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss sees beside the current log-probs, all [T] on their device.

    Args:
        old_logprobs: float32, of the target in the policy before the update [nats].
        rollout_logprobs: float32, in the engine's distribution [nats].
        ref_logprobs: float32, in the reference policy [nats]; or None.
        advantages: float32.
        loss_mask: bool; padding rows are False.
    """

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor


def grpo(rewards: Tensor, groups: Tensor, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """``(reward - mean of its group) / (std of its group + eps)``, the division optional.

    Args:
        rewards: [S] float32.
        groups: [S] int64, samples with the same number form a group, in any order.
        normalize_std: divide by the sample standard deviation (n - 1) of the group.
        eps: added to the standard deviation [reward].

    Returns:
        [S] float32; exactly 0 in a group whose rewards are all equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300.
    """
    _, group = groups.unique(return_inverse=True)
    size = group.bincount().double()
    values = rewards.double()  # sums and means of equal float32 rewards are then exact

    def total(x: Tensor) -> Tensor:
        return torch.zeros_like(size).index_add(0, group, x)

    centred = values - (total(values) / size)[group]
    if normalize_std:
        std = (total(centred.square()) / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (std[group] + eps)
    return centred.float()


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
    logp, old = _masked(logprobs, mask), _masked(fields.old_logprobs, mask)
    policy, metrics, guarded = _policy_terms(logp, old, fields, config)
    loss, parts = policy, {"loss/policy": policy}

    if fields.ref_logprobs is not None:
        log_s, guarded_ref = _guard(_masked(fields.ref_logprobs, mask) - logp)
        ref_kl = torch.expm1(log_s) - log_s
        guarded = guarded | guarded_ref
        metrics["policy/ref_kl"] = ref_kl
        if config.kl_coef:
            parts["loss/ref_kl"] = config.kl_coef * ref_kl
            loss = loss + parts["loss/ref_kl"]
    elif config.kl_coef:
        raise ValueError(_missing("kl_coef", config.kl_coef, "ref_logprobs"))

    if entropy is not None:
        metrics["policy/entropy"] = _masked(entropy, mask)
        if config.entropy_coef:
            parts["loss/entropy"] = -config.entropy_coef * metrics["policy/entropy"]
            loss = loss + parts["loss/entropy"]
    elif config.entropy_coef:
        raise ValueError(_missing("entropy_coef", config.entropy_coef, "entropy"))

    count = mask.sum()
    metrics |= parts | {"loss": loss, "policy/guarded_fraction": guarded}
    sums = {name: (x.detach().sum(dtype=torch.float64), count) for name, x in metrics.items()}
    return loss.sum(), count, sums


def _policy_terms(
    logp: Tensor, old: Tensor, fields: LossInputs, config: ObjectiveConfig
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The clipped and weighted policy term, its metrics, and where a log-ratio was clamped."""
    mask = fields.loss_mask
    advantages = _masked(fields.advantages, mask)
    log_ratio, guarded = _guard(logp - old)
    ratio = log_ratio.exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    metrics = {"policy/ppo_kl": old - logp.detach(), "policy/clip_fraction": clipped}
    if config.tis_cap is not None:
        log_weight, guarded_weight = _guard(old - _masked(fields.rollout_logprobs, mask))
        weight = log_weight.detach().exp().clamp(max=config.tis_cap)
        loss = loss * weight
        guarded = guarded | guarded_weight
        metrics["policy/tis_mean"] = _masked(weight, mask)
    return loss, metrics, guarded


def build_advantage(config: ObjectiveConfig) -> AdvantageFn:
    """The advantage function that ``objective.advantage`` names: (rewards, groups) -> [S]."""
    if config.advantage == "grpo":
        return partial(grpo, normalize_std=config.normalize_std)
    return _user_function("objective.advantage", config.advantage, 2, config)


def build_loss(config: ObjectiveConfig) -> LossFn:
    """The loss function that ``objective.loss`` names: (logprobs, entropy, LossInputs) -> sums."""
    if config.loss == "grpo":
        return partial(grpo_loss, config=config)
    return _user_function("objective.loss", config.loss, 3, config)


def _user_function(key: str, name: str, num_args: int, config: ObjectiveConfig) -> Callable:
    """The function ``module:function``; a parameter called ``config`` gets the objective section.

    Raises:
        ValueError: it is not there, or does not take ``num_args`` positional arguments.
    """
    function = load_function(key, name, builtin=("grpo",))
    if "config" in inspect.signature(function).parameters:
        function = partial(function, config=config)
    try:
        inspect.signature(function).bind(*range(num_args))
    except TypeError as error:
        raise ValueError(
            f"{key}: {name!r} takes {inspect.signature(function)}, expected {num_args} "
            "positional arguments"
        ) from error
    return function


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0)


def _guard(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The log-ratio clamped so that exp cannot overflow, and where that changed it."""
    return (
        log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
        log_ratio.detach().abs() > LOG_RATIO_LIMIT,
    )


def _missing(coefficient: str, value: float, needed: str) -> str:
    return f"grpo_loss: {coefficient} is {value} and {needed} is None, expected {needed}"
