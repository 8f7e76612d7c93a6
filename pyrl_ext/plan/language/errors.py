"""How problems are worded: pydantic's errors and unknown keys as sentences to act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pyrl_ext.plan.language.fields import Section
from pyrl_ext.plan.schema import Config

Key = tuple[str, ...]


class Problem(NamedTuple):
    """One line of a `ConfigError`: where, the line number to sort by, and what is wrong."""

    where: str
    line: int
    message: str


class ConfigError(ValueError):
    """Every problem at once, one a line: `file:line: key: what, expected ...`."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_order))
        super().__init__("\n".join(_one_line(f"{p.where}: {p.message}") for p in self.problems))


def _order(problem: Problem) -> tuple[str, int]:
    """Problems without a line first, then file by file."""
    return problem.where.rpartition(":")[0] if problem.line else "", problem.line


def _one_line(text: str) -> str:
    """Keys and paths may hold line breaks and terminal codes; a report must not."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fields_of(section: str | None = None) -> dict[str, FieldInfo]:
    """Field name -> pydantic's field info, of a section or of the top level."""
    if section is None:
        return Config.model_fields
    kind = Config.model_fields[section].annotation if section in Config.model_fields else None
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else {}


# pydantic's error type -> the rule, filled in from the error's context
_EXPECTED = {
    "missing": "a value",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "at least one character",
    "string_pattern_mismatch": "a name such as module:function",
    "literal_error": "{expected}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_long": "at most {max_length} values",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_TYPE_NAMES = {
    bool: "a truth value", int: "a whole number", float: "a fraction", str: "text",
    list: "a list", dict: "a mapping", type(None): "no value",
}  # fmt: skip


def describe(error: ErrorDetails) -> str:
    """A pydantic error of the schema as `<what, with value>, expected <rule>[; <the field>]`."""
    key = tuple(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown(key)
    if error["type"] == "value_error":  # a section's own check
        return str(error.get("ctx", {})["error"])
    if len(key) == 1 and (keys := fields_of(key[0])):
        return f"{_given(error)}, expected a mapping of {', '.join(keys)}{_about(key)}"
    return f"{expectation(error)}{_about(key)}"


def expectation(error: ErrorDetails) -> str:
    """A pydantic error of any model as `<what, with value>, expected <rule>`."""
    context = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        for name, bound in error.get("ctx", {}).items()
    }
    rule = _EXPECTED.get(error["type"])
    expected = rule.format(**context).replace("'", "") if rule else error["msg"]
    return f"{_given(error)}, expected {expected}"


def _given(error: ErrorDetails) -> str:
    """The value that was given, with its type where that is what is wrong."""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return "missing"
    if kind.endswith("_type") and value is not None:
        return f"{show(value)} is {_TYPE_NAMES.get(type(value), type(value).__name__)}"
    return show(value)


def unknown(key: Key) -> str:
    """The message for a key that no section has, with the likeliest one that was meant."""
    *parents, last = key
    known = [*fields_of(*parents), *([] if parents else ["extends"])]
    elsewhere = [f"{name}.{last}" for name in fields_of() if last in fields_of(name)]
    if elsewhere:
        return f"unknown key here. Did you mean {' or '.join(elsewhere)}?"
    if close := difflib.get_close_matches(last, known, n=1, cutoff=0.6):
        meant = ".".join((*parents, close[0]))
        return f"unknown key. Did you mean {meant}?"
    return f"unknown key, expected one of {', '.join(known)}"


def suggest_path(key: Key) -> str | None:
    """Why `key` cannot be set from the command line, or None where it can."""
    if key == ("extends",):
        return None
    if key[0] not in fields_of():
        return unknown(key[:1])
    section = fields_of(key[0])
    if len(key) == 1:
        if not section or key[0] in ("replay", "objective"):
            return None
        example = f"{key[0]}.{next(iter(section))}=value"
        return f"{key[0]} is a section, expected one of its keys. For example {example}"
    if not section:
        return f"{key[0]} is a single value, expected {key[0]}=value"
    if key[1] not in section:
        return unknown(key[:2])
    if len(key) > 2 and section[key[1]].annotation != dict[str, Any]:
        return f"{key[0]}.{key[1]} has no keys, expected {key[0]}.{key[1]}=value"
    return None


def show(value: object) -> str:
    """`value` as it would be written, shortened."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _about(key: Key) -> str:
    fields = fields_of(key[0]) if len(key) > 1 else fields_of()
    owner = fields.get(key[min(1, len(key) - 1)])
    return "; " + " ".join(owner.description.split()) if owner and owner.description else ""
