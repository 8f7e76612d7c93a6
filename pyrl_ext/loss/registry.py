"""The advantage and the loss that a plan names, built in or the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from pyrl_ext.dist.named import load_function
from pyrl_ext.loss.advantages import grpo
from pyrl_ext.loss.grpo import grpo_loss
from pyrl_ext.loss.inputs import AdvantageFn, LossFn, ObjectiveConfig


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
