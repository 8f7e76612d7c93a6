"""The rule decorator, the evaluation of all rules, and phrases that several share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from pyrl_ext.plan.language.fields import InvalidField, Section
from pyrl_ext.plan.language.paths import DATA_FILES, relative, similar
from pyrl_ext.plan.plan import Plan

# A message, or several; (name, message) is about the entry `name` of the rule's key.
Found = str | Iterable[str | tuple[str, str]] | None
Rule = Callable[[Plan], Found]

# torch's grouped product takes rows of whole 16 bytes
ROW_BYTES = 16

RULES: list[tuple[str, Rule]] = []


def rule(key: str) -> Callable[[Rule], Rule]:
    """Register a rule; its problem is reported at the line of `key`."""

    def register(function: Rule) -> Rule:
        RULES.append((key, function))
        return function

    return register


def sentence(rule: Rule) -> str:
    """The demand of a rule in words: its name is a sentence."""
    return rule.__name__.replace("_", " ")


def check(plan: Plan, rules: Iterable[tuple[str, Rule]] = RULES) -> Iterator[tuple[str, str]]:
    """(key, message) of every rule that `plan` breaks, as far as its fields are right."""
    for key, function in rules:
        try:
            found = function(plan)
            messages = [found] if isinstance(found, str) else found or ()
            for each in messages:  # those before a wrong field are found
                yield (key, each) if isinstance(each, str) else (f"{key}.{each[0]}", each[1])
        except InvalidField:
            continue


def changed(section: Section, name: str) -> bool:
    """True if the field `name` has another value than its default."""
    field = type(section).model_fields[name]
    return getattr(section, name) != field.get_default(call_default_factory=True)


# Phrases -----------------------------------------------------------------------------------------


def data_file_problem(plan: Plan, name: str, or_dataset: bool = True) -> str | None:
    """Why `name` is no file of records; None: it is one, or a dataset where one may be."""
    path = plan.resolve(name)
    if or_dataset and plan.is_dataset(name):
        if find_spec("datasets") is None:
            return (
                f"{name} is a folder or an id of the hub, expected the package datasets, which "
                "loads it. Run pip install 'pyrl-ext[tasks]', or name a .jsonl or .parquet file"
            )
        return None
    if not or_dataset and os.path.isdir(path):
        if any(Path(path).glob("*.safetensors")):
            return None
        rule = "expected a .jsonl or .parquet file, or a folder that rollout.record wrote"
        return f"no *.safetensors in {relative(path)}, {rule}"
    if not path.endswith(DATA_FILES):
        others = (
            ", a folder, or a dataset's id" if or_dataset else ", or a folder of rollout.record"
        )
        return f"{name!r}, expected a .jsonl or .parquet file{others}"
    if not os.path.isfile(path):
        rule = "expected a file; relative to the YAML file"
        return f"{relative(path)} does not exist, {rule}{similar(path)}"
    return None


def in_config(plan: Plan) -> str:
    """The file that holds the sizes of the model."""
    return f"({relative(plan.config_path)})"


def indivisible(number: int, wholes: dict[str, int], why: str, where: str = "") -> str | None:
    """The problem that `number` does not divide each of the named `wholes`, with what does.

    Args:
        why: the consequence
        where: the file that states the wholes, in brackets
    """
    odd = [f"{name} {whole}" for name, whole in wholes.items() if whole % number]
    if odd:
        each = " of each" if len(wholes) > 1 else ""
        usable = choice(divisors(*wholes.values()))
        return (
            f"{number} does not divide {', '.join(odd)}{where and f' {where}'}, expected a "
            f"divisor{each}; {why}. Use {usable}"
        )


def unfit_for_heads(plan: Plan, tp: int, why: str) -> str | None:
    """The problem that `tp` ranks cannot hold whole key/value heads."""
    if (groups := plan.sizes.query_groups) and groups % tp and tp % groups:
        return (
            f"{tp} neither divides num_key_value_heads {groups} nor is a multiple of it "
            f"{in_config(plan)}, expected one or the other; {why}. Use {choice(divisors(groups))}, "
            f"or a multiple of {groups}"
        )


def divisors(*numbers: int) -> list[int]:
    """The common divisors, rising."""
    common = math.gcd(*numbers)
    small = [n for n in range(1, math.isqrt(common) + 1) if common % n == 0]
    return sorted({*small, *(common // n for n in small)})


def choice(numbers: list[int]) -> str:
    """`2, 4 or 8`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
