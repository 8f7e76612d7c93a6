"""JSON as text with a line a field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from typing import Any


def json_text(tree: dict[str, Any]) -> str:
    """`tree` with a line for each of its fields, and of theirs."""
    return "{\n" + ",\n".join(_lines(tree, "  ", depth=2)) + "\n}\n"


def _lines(tree: dict[str, Any], indent: str, depth: int) -> Iterator[str]:
    for name, value in tree.items():
        start = f"{indent}{json.dumps(name)}: "
        if depth > 1 and isinstance(value, dict) and value:
            inner = ",\n".join(_lines(value, indent + "  ", depth - 1))
            yield f"{start}{{\n{inner}\n{indent}}}"
        elif isinstance(value, list | tuple) and any(
            isinstance(item, dict | list | tuple) for item in value
        ):
            items = ",\n".join(f"{indent}  {json.dumps(item)}" for item in value)
            yield f"{start}[\n{items}\n{indent}]"
        else:
            yield start + json.dumps(value)


def flatten(tree: dict[str, Any], ignored: Set[str], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name, without those in ``ignored`` and what is below them."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if prefix + name in ignored:
            continue
        if isinstance(value, dict) and value:
            flat |= flatten(value, ignored, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
