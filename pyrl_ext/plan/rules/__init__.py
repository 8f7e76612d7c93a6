"""Conditions between fields: one named function a rule, a file a topic.

A rule returns None, or its message: `<what, with value>, expected <rule>[; <consequence>][. <what
to do>]`. Ranges of a single field are in the schema. A rule that reads a field which is itself
wrong raises `InvalidField` by that read, and is skipped.
"""

from pyrl_ext.plan.rules import (  # noqa: F401 (each registers its rules)
    batching,
    data,
    dynamic_cp,
    hardware,
    kernels,
    logprob,
    model,
    optimizer,
    parallel,
    passthrough,
    pipeline,
    replay,
    rollout,
)
from pyrl_ext.plan.rules._rule import RULES, changed, check, relative, rule, sentence

__all__ = ["RULES", "changed", "check", "relative", "rule", "sentence"]
