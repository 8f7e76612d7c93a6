"""Which rules read a field, as `plan/rules/reads.yaml` declares it."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import yaml

from pyrl_ext.plan import rules
from pyrl_ext.plan.language.errors import Key


@cache
def declared_reads() -> dict[str, list[str]]:
    """Name of a rule -> the fields that it reads, each as `section.key`."""
    path = Path(rules.__file__).with_name("reads.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@cache
def rules_of_fields() -> dict[Key, list[tuple[str, str]]]:
    """Field -> (key at which it reports, its sentence) of every rule that reads the field."""
    readers: dict[Key, list[tuple[str, str]]] = defaultdict(list)
    for key, rule in rules.RULES:
        for field in declared_reads()[rule.__name__]:
            readers[tuple(field.split("."))].append((key, rules.sentence(rule)))
    return readers
