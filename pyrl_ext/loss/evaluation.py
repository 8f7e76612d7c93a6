"""The training objective on numbers of your own, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pyrl_ext.loss.corrections import correct
from pyrl_ext.loss.inputs import LossInputs, Sequences
from pyrl_ext.loss.objective import policy_loss
from pyrl_ext.loss.reductions import numbered, reduction_weights
from pyrl_ext.plan.schema.objective import Objective, with_preset

Numbers = Sequence[float] | Tensor


def evaluate(
    objective: str | Mapping[str, Any],
    *,
    logprobs: Numbers,
    old_logprobs: Numbers,
    rollout_logprobs: Numbers,
    ref_logprobs: Numbers | None = None,
    entropy: Numbers | None = None,
    divergence: Numbers | None = None,
    advantages: Numbers,
    loss_mask: Sequence[bool] | Tensor,
    lengths: Sequence[int],
    groups: Sequence[int] | None = None,
    trajectories: Sequence[int] | None = None,
) -> tuple[float, Tensor, dict[str, float]]:
    """``(loss, d loss / d logprobs, metrics)`` of one minibatch, by the code that trains.

    Args:
        objective: name of a preset, or the ``objective`` section as in YAML.
        logprobs, old_logprobs, rollout_logprobs, ref_logprobs, entropy: [T], sample after sample,
            of the policy now, before the update, of the engine, and of the reference [nats].
        divergence: [T] of the policy now from a teacher (``distill``) [nats].
        advantages: [T], or [S] one a sample.
        loss_mask: [T].
        lengths: [S] rows of each sample; their sum is T.
        groups: [S] prompt of each sample (reduction prompt); None: one sample a prompt.
        trajectories: [S] samples with the same number are parts of one trajectory, which reductions
            and corrections count as one sequence; None: each is one.

    Returns: the loss; its gradient [T] float64, 0 outside the mask; means over loss tokens.
    Raises: ValueError for numbers that do not fit each other, or parts that contradict each other.
    """
    section = {"preset": objective} if isinstance(objective, str) else dict(objective)
    config = Objective.model_validate(with_preset(section))
    samples = torch.arange(len(lengths)).repeat_interleave(torch.tensor([*lengths]))
    if len(advantages) == len(lengths):
        advantages = torch.as_tensor(advantages, dtype=torch.float64)[samples]
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    given |= {"rollout_logprobs": rollout_logprobs, "divergence": divergence}
    given |= {"advantages": advantages, "loss_mask": loss_mask}
    known: dict[str, Any] = {name: _column(name, x, len(samples)) for name, x in given.items()}
    leaf = known.pop("logprobs").requires_grad_()
    spread = _column("entropy", entropy, len(samples))
    mask = known["loss_mask"] = known["loss_mask"].bool()
    each = torch.arange(len(lengths))
    prompts = each if groups is None else torch.as_tensor([*groups])
    parts = each if trajectories is None else numbered(torch.as_tensor([*trajectories]))
    tokens = _sums(mask.double(), samples, len(each))
    of_parts = _sums(tokens, parts, len(each)), prompts.index_copy(0, parts, prompts)
    weights = reduction_weights(config.reduction, *of_parts, config.reduction_constant)[parts]
    shares = torch.where(mask, 1 / tokens.clamp(min=1)[samples], 0)
    known["sequences"] = Sequences(samples, len(lengths), shares)
    rejected: dict[str, Tensor] = {}
    if config.corrects:
        pair = known["old_logprobs"], known["rollout_logprobs"]
        found = correct(config, *pair, mask, parts[samples], len(lengths), lambda sums: sums)
        known["corrections"], rejected = found
    fields = LossInputs(**known, weights=weights[samples])
    loss, count, sums = policy_loss(leaf, spread, fields, config)
    loss = loss / count.clamp(min=1)
    gradient = cast(Tensor, torch.autograd.grad(loss, leaf)[0])
    metrics = {name: float(value / n) for name, (value, n) in sums.items() if n}
    metrics |= {name: float(value / count) for name, value in rejected.items()}
    return float(loss.detach()), gradient, metrics


def _sums(values: Tensor, at: Tensor, count: int) -> Tensor:
    """[count] float64, the sums of ``values`` by their places ``at``."""
    return values.new_zeros(count).index_add(0, at, values)


def _column(name: str, values: Numbers | None, total: int) -> Tensor | None:
    """[T] float64 on the host, checked."""
    if values is None:
        return None
    found = torch.as_tensor(values, dtype=torch.float64).detach().clone()
    if found.shape != (total,):
        rule = f"expected [{total}], the sum of lengths"
        raise ValueError(f"evaluate: {name} {list(found.shape)}, {rule}")
    return found
