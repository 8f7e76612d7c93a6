"""What a rule is, how all of them are evaluated, and phrases that several share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.schema import Unchecked

Found = str | Iterable[str] | None
Rule = Callable[[Plan], Found]

RULES: list[tuple[str, Rule]] = []


def rule(key: str) -> Callable[[Rule], Rule]:
    """Register a rule; its problem is reported at the line of `key`."""

    def register(function: Rule) -> Rule:
        RULES.append((key, function))
        return function

    return register


def check(plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every rule that `plan` breaks, as far as its fields are right."""
    for key, function in RULES:
        try:
            found = function(plan) or ()
        except Unchecked:
            continue
        for message in [found] if isinstance(found, str) else found:
            yield key, message


# Phrases -----------------------------------------------------------------------------------------


def relative(path: str) -> str:
    """`path` as seen from the working directory, where it lies below it."""
    shown = os.path.relpath(path)
    return path if shown.startswith("..") else shown


def in_config(plan: Plan) -> str:
    """Where the sizes of the model are written."""
    return f"({relative(plan.config_path)})"


def indivisible(
    number: int, wholes: dict[str, int], why: str, *also: int, where: str = ""
) -> Found:
    """The problem that `number` does not divide each of the named `wholes`, with what does.

    Args:
        why: the consequence
        also: what else the advised numbers divide
        where: the file that states the wholes, in brackets
    """
    odd = [f"{name} {whole}" for name, whole in wholes.items() if whole % number]
    if odd:
        each = " of each" if len(wholes) > 1 else ""
        usable = divisors(*filter(None, (*wholes.values(), *also)))
        return (
            f"{number} does not divide {', '.join(odd)}{where and f' {where}'}, expected a "
            f"divisor{each}; {why}. Use {usable}"
        )


def divisors(*numbers: int) -> str:
    """The common divisors as a phrase to choose from."""
    common = [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]
    if len(common) == 1:
        return "1"
    return f"{', '.join(map(str, common[:-1]))} or {common[-1]}"
