"""The advantage and the loss that a plan names: built-in functions, or functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor

from pyrl_ext.loss import advantages
from pyrl_ext.loss.inputs import AdvantageFn, LossFn, LossInputs, Sums
from pyrl_ext.loss.objective import policy_loss, sft_loss
from pyrl_ext.loss.policy_terms import TERMS
from pyrl_ext.loss.reductions import numbered
from pyrl_ext.parallel.user_code import load_function
from pyrl_ext.plan.schema.objective import ADVANTAGES, LOSSES, Objective


def build_advantage(config: Objective) -> AdvantageFn:
    """The advantage function that ``objective.advantage`` names: (rewards, groups, loss tokens) of
    J trajectories -> [J]; a user's own takes the first two."""
    name = config.advantage
    if name not in ADVANTAGES:
        own = _load("objective.advantage", name, 2, ADVANTAGES, config)
        return lambda rewards, groups, tokens: own(rewards, groups)
    built_in: Any = {
        "grpo": partial(
            advantages.grpo,
            normalize_std=config.normalize_std,
            leave_one_out=config.leave_one_out,
        ),
        "reinforce_pp_baseline": partial(advantages.reinforce_pp, baseline=True),
    }.get(name) or getattr(advantages, name)

    def of_trajectories(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
        # sums and means of equal float32 rewards are exact in float64
        given = advantages.Trajectories(rewards.double(), numbered(groups), tokens.double())
        return built_in(given).float()

    return of_trajectories


def build_loss(config: Objective) -> LossFn:
    """The loss function that ``objective.loss`` names: (logprobs, entropy, LossInputs) -> sums."""
    if config.loss in TERMS:
        return partial(policy_loss, config=config)
    if config.loss == "sft":
        return sft_loss
    loss = _load("objective.loss", config.loss, 3, LOSSES, config)
    return _checked(f"objective.loss: {config.loss!r}", loss)


def _load(
    key: str, name: str, num_args: int, builtin: Sequence[str], config: Objective
) -> Callable[..., Any]:
    """A user's function, whose import and calls must leave grad mode and default dtype alone."""
    where = f"{key}: {name!r}"
    with _settings_kept(f"{where}: its import"):
        function = load_function(key, name, num_args, builtin, config=config)

    @wraps(function)
    def call(*args: Any) -> Any:
        with _settings_kept(where):
            return function(*args)

    return call


@contextmanager
def _settings_kept(where: str) -> Generator[None]:
    """Restore grad mode and default dtype.

    Raises:
        ValueError: naming a setting that user code changed
    """
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        found = torch.is_grad_enabled(), torch.get_default_dtype()
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
    names = "torch.is_grad_enabled()", "torch.get_default_dtype()"
    for name, before, after in zip(names, (grad, dtype), found, strict=True):
        if before != after:
            raise ValueError(
                f"{where}: changed {name} from {before} to {after}, expected it unchanged, since "
                "the training runs in this process. Restore it in the function"
            )


def _checked(where: str, loss: Callable[..., Any]) -> LossFn:
    """A user's loss whose result is checked; a sum without a gradient would train nothing.

    Raises:
        ValueError: the result is not (sum, count, metrics); or the sum has no gradient although
            there are loss tokens. Only then the device is waited for.
    """

    @wraps(loss)
    def call(
        logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs
    ) -> tuple[Tensor, Tensor, Sums]:
        result: Any = loss(logprobs, entropy, inputs)
        parts = cast(tuple[Any, ...], result if isinstance(result, tuple) else (result,))
        if len(parts) != 3 or not all(map(isinstance, parts, (Tensor, Tensor, dict))):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise ValueError(
                f"{where}: returned {kinds}, expected (sum of the losses: Tensor, count of loss "
                "tokens: Tensor, metrics: dict of name -> (sum, count))"
            )
        total, count, sums = parts
        if total.ndim or count.ndim:
            raise ValueError(
                f"{where}: returned a sum of shape {list(total.shape)} and a count of shape "
                f"{list(count.shape)}, expected one number each"
            )
        trains = logprobs.requires_grad and torch.is_grad_enabled()
        if trains and not total.requires_grad and bool(inputs.loss_mask.any()):
            raise ValueError(
                f"{where}: returned a sum without a gradient, expected one computed from logprobs "
                "without detach() or no_grad(); it would train nothing"
            )
        return total, count, sums

    return call
