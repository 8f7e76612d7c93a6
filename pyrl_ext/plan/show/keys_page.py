"""The schema for others: a page of every key, and a JSON Schema for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from pyrl_ext.plan.language.errors import Key, fields_of, kind_at
from pyrl_ext.plan.language.fields import Section
from pyrl_ext.plan.schema import Config, Rollout
from pyrl_ext.plan.show.explain import about, default_of, type_of

EXTENDS = "parent file, relative to this one; what this file does not say is taken from there"


def page() -> str:
    """`configs/REFERENCE.md`: how values are written, then a table a section."""
    prose = Path(__file__).with_name("language.md").read_text(encoding="utf-8")
    return "\n".join([prose.rstrip(), "", "# Keys", "", *_tables()]) + "\n"


def _tables() -> Iterator[str]:
    alone = {name: field for name, field in fields_of().items() if not fields_of(name)}
    yield "`extends`: " + EXTENDS + "."
    yield ""
    yield from _table((), alone)
    for name in fields_of():
        for key in ((name,), (name, "<name>"), (name, "<name>", "parallel")):
            if fields := fields_of(*key):
                yield from (f"## {'.'.join(key)}", "", str(kind_at(key).__doc__), "")
                yield from _table(key, fields)


def _table(section: Key, fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in fields.items():
        meaning = " ".join(about(field).split())
        row = (
            f"`{name}`",
            type_of(field),
            f"`{default_of(field, (*section, name))}`",
            meaning,
        )
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield ""


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # editors show the key itself


def schema() -> str:
    """JSON Schema of a config file, with descriptions."""
    tree = Config.model_json_schema(schema_generator=_Untitled)
    kinds = {kind.__name__: kind for kind in (*Section.__subclasses__(), Rollout)}
    needed = {"required": tree.pop("required"), "properties": {}}
    owners = {tree["properties"][name].get("$ref"): name for name in fields_of()}
    for name, section in tree["$defs"].items():
        # a required key may come from the parent
        if (required := section.pop("required", None)) and f"#/$defs/{name}" in owners:
            needed["properties"][owners[f"#/$defs/{name}"]] = {"required": required}
        _accept_written_forms(section, kinds[name].model_fields)
    _accept_written_forms(tree, {n: f for n, f in fields_of().items() if not fields_of(n)})
    replay = tree["properties"]["replay"]
    replay["anyOf"] = [{"$ref": replay.pop("$ref")}, {"type": "boolean"}]
    tree["properties"]["extends"] = {"type": ["string", "null"], "description": EXTENDS}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    rest = {"if": {"not": {"required": ["extends"]}}, "then": needed}
    return json.dumps(head | tree | rest, indent=2) + "\n"


def _accept_written_forms(owner: dict[str, Any], fields: dict[str, FieldInfo]) -> None:
    """A whole number may be written as a size."""
    for name, field in fields.items():
        if "whole" not in type_of(field):
            continue
        was = owner["properties"][name]
        kept = {key: was.pop(key) for key in ("description", "default") if key in was}
        size = {"type": "string", "pattern": r"^[-+]?[0-9.]+ ?[kKMGT]i?B?$"}
        owner["properties"][name] = kept | {"anyOf": [was, size]}
