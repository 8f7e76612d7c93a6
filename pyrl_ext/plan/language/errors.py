"""Messages for pydantic's errors and for unknown keys."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pyrl_ext.plan.language.fields import Section, section_of
from pyrl_ext.plan.language.synonyms import meant
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


def kind_at(key: Key) -> Any:
    """The type of what the schema has at `key`, an entry of a mapping under any name; None where it
    has nothing."""
    kind: Any = Config
    for name in key:
        if section := section_of(kind):
            field = section.model_fields.get(name)
            kind = field.annotation if field else None
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
    return section_of(kind) or kind


def fields_of(*key: str) -> dict[str, FieldInfo]:
    """Field name -> pydantic's field info, at the top level or of the section at `key`."""
    section = section_of(kind_at(key))
    return section.model_fields if section else {}


def field_key(key: Key) -> Key:
    """The key of the field that `key` is in."""
    return next((key[:n] for n in range(len(key), 0, -1) if fields_of(*key[: n - 1])), ())


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
_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_NUMBER = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_TYPE_NAMES = {
    bool: "a truth value", int: "a whole number", float: "a fraction", str: "text",
    list: "a list", dict: "a mapping", type(None): "no value",
}  # fmt: skip


def describe(error: ErrorDetails, required: Sequence[str] = ()) -> str:
    """A pydantic error of the schema as `<what, with value>, expected <rule>[; <the field>]`.

    Args:
        required: keys that the section has to have, where the error is about a section
    """
    key = tuple(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown(key)
    if error["type"] == "value_error":  # a section's own check
        return str(error.get("ctx", {})["error"])
    if keys := fields_of(*key):
        if required:
            rule = f"a mapping; required: {', '.join(required)}"
        else:
            rule = f"a mapping of {', '.join(keys)}"
        return f"{_given(error)}, expected {rule}{_about(key)}"
    if error["type"] == "missing":
        return f"missing, expected {_wanted(kind_at(key))}{_about(key)}"
    return f"{expectation(error)}{_about(key)}{_advice(error)}"


def _wanted(kind: Any) -> str:
    """The accepted values of a field, in words: `cpu or cuda`, `a whole number`."""
    if hasattr(kind, "__metadata__") or get_origin(kind) in (Union, types.UnionType):
        return _wanted(get_args(kind)[0])  # null may stay; it is not what is missing
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return _WANTED.get(kind, "a value")


def _advice(error: ErrorDetails) -> str:
    """Advice for a number in quotes."""
    value = error["input"]
    of_number = error["type"] in ("int_type", "float_type")
    if of_number and isinstance(value, str) and _NUMBER.fullmatch(value):
        return f". Write {value} without quotes"
    return ""


def expectation(error: ErrorDetails) -> str:
    """A pydantic error of any model as `<what, with value>, expected <rule>`."""
    context = {
        name: int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        for name, bound in error.get("ctx", {}).items()
    }
    is_address = "//" in str(context.get("pattern"))
    rule = "an address, http://host:port" if is_address else _EXPECTED.get(error["type"])
    expected = rule.format(**context).replace("'", "") if rule else error["msg"]
    return f"{_given(error)}, expected {expected}"


def _given(error: ErrorDetails) -> str:
    """The value that was given, with its type where that is what is wrong."""
    kind = error["type"]
    value = error["input"]
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
    if other := meant(tuple(parents), last):
        return f"unknown key. Did you mean {' or '.join(other)}?"
    if elsewhere:
        rule = f", expected one of {', '.join(known)}" if parents[1:] else ""
        return f"unknown key here{rule}. Did you mean {' or '.join(elsewhere)}?"
    if close := difflib.get_close_matches(last, known, n=1, cutoff=0.6):
        likeliest = ".".join((*parents, close[0]))
        return f"unknown key. Did you mean {likeliest}?"
    return f"unknown key, expected one of {', '.join(known)}"


def suggest_path(key: Key) -> str | None:
    """Why `key` cannot be set from the command line, or None where it can."""
    if key == ("extends",):
        return None
    around = ".".join(field_key(key))
    name = ".".join(key)
    if (field := field_key(key))[-1] not in fields_of(*field[:-1]):
        return unknown(field)
    if (section := fields_of(*key)) and key not in (("replay",), ("objective",), ("lora",)):
        example = f"{name}.{next(iter(section))}=value"
        return f"{name} is a section, expected one of its keys. For example {example}"
    if key != field and get_origin(kind_at(field)) is not dict:
        what = "has no keys" if field[1:] else "is a single value"
        return f"{around} {what}, expected {around}=value"
    return None


def show(value: object) -> str:
    """`value` as it would be written, shortened."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    text = repr(value.model_dump() if isinstance(value, Section) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _about(key: Key) -> str:
    field = field_key(key)
    owner = fields_of(*field[:-1]).get(field[-1])
    return "; " + " ".join(owner.description.split()) if owner and owner.description else ""
