"""Conditions between fields: one named function a rule, a file a topic.

A rule returns None, or its message: `<what, with value>, expected <rule>[; <consequence>][. <what
to do>]`. Ranges of a single field are in the schema. A rule that reads a field which is itself
wrong raises `InvalidField` by that read, and is skipped.
"""

import importlib
import pkgutil

from pyrl_ext.plan.rules._rule import RULES, changed, check, relative, rule, sentence

__all__ = ["RULES", "changed", "check", "relative", "rule", "sentence"]

for _topic in pkgutil.iter_modules(__path__):  # by name; each registers its rules
    importlib.import_module(f"{__name__}.{_topic.name}")
