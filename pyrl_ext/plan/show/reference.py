"""`configs/REFERENCE.md` and the JSON Schema for editors, both written from the schema."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from pyrl_ext.plan.language.defaults import FILLED
from pyrl_ext.plan.language.errors import Key, fields_of, kind_at, show
from pyrl_ext.plan.language.fields import NO_BOUNDS, Section
from pyrl_ext.plan.language.kind import REQUIRED
from pyrl_ext.plan.schema import Config

EXTENDS = (
    "parent file, relative to this one, with the keys that this file does not set; or a list of "
    "them, of which later ones win"
)
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def page() -> str:
    """`configs/REFERENCE.md`: how values are written, then a table a section."""
    prose = Path(__file__).with_name("language.md").read_text(encoding="utf-8")
    return "\n".join([prose.rstrip(), "", "# Keys", "", *_tables()]) + "\n"


def _tables() -> Iterator[str]:
    yield f"`extends`: {EXTENDS}."
    yield ""
    yield from _table((), {name: each for name, each in fields_of().items() if not fields_of(name)})
    for name in fields_of():
        inner = ((name, nested) for nested in fields_of(name))
        for key in ((name,), *inner, (name, "<name>"), (name, "<name>", "parallel")):
            if fields := fields_of(*key):
                yield from (f"## {'.'.join(key)}", "", str(kind_at(key).__doc__), "")
                yield from _table(key, fields)


def _table(section: Key, fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in fields.items():
        meaning = " ".join((field.description or "").split())
        kind = _type_of(field.annotation, field.metadata)
        row = (f"`{name}`", kind, f"`{_default_of(field, (*section, name))}`", meaning)
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield ""


def _default_of(field: FieldInfo, key: Key) -> str:
    """The default as it would be written."""
    if key in FILLED:
        return FILLED[key]
    if field.is_required():
        return "required"
    for rollouts, word in ((True, "with"), (False, "without")):
        if key in REQUIRED[rollouts]:
            return f"required {word} rollouts"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, str):
        return default
    if isinstance(default, Section):
        return "{}"
    return show(list(default) if isinstance(default, tuple) else default)


def _type_of(annotation: Any, marks: Iterable[object] = ()) -> str:
    """A type in words, with its bounds."""
    kind = get_origin(annotation)
    inner = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type_of(inner[0], annotation.__metadata__)
    if kind in (Union, types.UnionType):
        return ", or ".join(map(_type_of, inner))
    if kind is Literal:
        return " | ".join(inner)
    if annotation is type(None):
        return "null"
    if kind is list:
        return f"list, each a {_type_of(inner[0])}"
    if kind is tuple:
        first = _type_of(inner[0])
        last = _type_of(inner[-1])
        items = f"each a {first}" if first == last else f"a {first}; then each a {last}"
        return f"list of {len(inner)}, {items}"
    if kind is dict or issubclass(annotation, Section):
        return "mapping"
    return ", ".join([_KINDS[annotation], *_bounds(marks)])


def _bounds(marks: Iterable[object]) -> Iterator[str]:
    for mark in marks:
        yield from _bounds(getattr(mark, "metadata", ()))  # pydantic's Field inside Annotated
        for name, words in _BOUNDS.items():
            bound = getattr(mark, name, None)
            if bound is not None and bound not in NO_BOUNDS:
                yield f"{words} {bound}"


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # editors show the key itself


def schema() -> str:
    """JSON Schema of a config file, with descriptions. Required keys may come from the parent."""
    tree = Config.model_json_schema(schema_generator=_Untitled)
    del tree["required"]
    for section in (tree, *tree["$defs"].values()):
        section.pop("required", None)
        for field in section.get("properties", {}).values():
            _accept_sizes(field)
    short = [{"type": "boolean"}, {"const": "trainer"}]
    tree["properties"]["replay"] = {"anyOf": [tree["properties"]["replay"], *short]}
    names = {"type": "array", "items": {"type": "string"}}
    extends = {"anyOf": [{"type": ["string", "null"]}, names], "description": EXTENDS}
    tree["properties"]["extends"] = extends
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(head | tree, indent=2) + "\n"


def _accept_sizes(field: dict[str, Any]) -> None:
    """Let a whole number be written as a size."""
    kinds = field.get("anyOf", [field])
    if any(kind.get("type") == "integer" for kind in kinds):
        kept = {key: field.pop(key) for key in ("description", "default") if key in field}
        size = {"type": "string", "pattern": r"^[-+]?[0-9.]+ ?[kKMGT]i?B?$"}
        plain = dict(field)
        field.clear()
        field.update(kept | {"anyOf": [plain, size]})
