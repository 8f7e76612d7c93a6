"""Rewards that have a name without a module."""

from __future__ import annotations

import difflib
from importlib.util import find_spec

from pyrl_ext.plan.gym_tasks import INSTALL
from pyrl_ext.plan.language.errors import show

NAMED_REWARDS = {
    "exact_match": "pyrl_ext.data.rewards:exact_match",
    "number_match": "pyrl_ext.data.rewards:number_match",
    "math_verify": "pyrl_ext.data.math_reward:math_verify",
}


def reward_function(name: str) -> str:
    """``module:function`` of a reward."""
    return NAMED_REWARDS.get(name, name)


def named_reward_problem(name: str) -> str | None:
    """Why a reward is neither a named one nor written ``module:function``; None: it is one."""
    function = reward_function(name)
    if ":" not in function:
        close = difflib.get_close_matches(name, NAMED_REWARDS, n=1)
        hint = f". Did you mean {close[0]}?" if close else ""
        names = ", ".join(NAMED_REWARDS)
        return f"{show(name)}, expected module:function or one of {names}{hint}"
    if function == NAMED_REWARDS["math_verify"] and find_spec("math_verify") is None:
        return f"{name} without the package math-verify, expected it. Run {INSTALL}"
    return None
