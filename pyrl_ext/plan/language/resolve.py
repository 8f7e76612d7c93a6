"""Values as they are meant: sizes as numbers, and a parent's paths as seen from the main file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, get_args

from pydantic.fields import FieldInfo

from pyrl_ext.plan.language.errors import Key, fields_of
from pyrl_ext.plan.language.fields import RelativePath
from pyrl_ext.plan.language.paths import is_hub_id, path_beside
from pyrl_ext.plan.language.yaml_tree import Place, Source

_REFERENCE = re.compile(r"\$\{[^{}]*\}")
_SIZE = re.compile(r"([-+]?[0-9][0-9_]{0,17}(?:\.[0-9]{1,9})?) ?([kmgt])(i?)(b?)", re.IGNORECASE)
_UNIT = re.compile(r"\[(\w+)\]")


def resolve(source: Source) -> None:
    """Replace what `source.tree` holds by what it means; values without a meaning have failed."""
    source.tree = _resolved(source, (), source.tree)


def _resolved(source: Source, key: Key, written: Any) -> Any:
    if isinstance(written, dict):
        return {name: _resolved(source, (*key, name), value) for name, value in written.items()}
    if isinstance(written, list):
        return [_resolved(source, (*key, str(i)), value) for i, value in enumerate(written)]
    if not isinstance(written, str):
        return written
    if reference := _REFERENCE.search(written):
        rule = "expected the value itself; references to other keys were removed"
        source.fail(key, f"{reference[0]}, {rule}. Write the value that it stood for")
        return written
    if (field := fields_of(*key[:-1]).get(key[-1])) is None:
        return written
    kinds = _kinds(field)
    if int in kinds:
        try:
            return read_size(written, unit_of(field))
        except ValueError as error:
            source.fail(key, str(error))
            return written
    if mark := next((kind for kind in kinds if isinstance(kind, RelativePath)), None):
        return _from_main_file(source, key, written, mark)
    return written


def texts(tree: Any, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Every text among the values of a tree, with its key."""
    if isinstance(tree, str):
        yield key, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from texts(value, (*key, name))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from texts(value, (*key, str(index)))


def is_path(key: Key) -> bool:
    """True if the text at `key` is a path that starts at the folder of the YAML file."""
    field = fields_of(*key[:-1]).get(key[-1])
    return field is not None and any(isinstance(kind, RelativePath) for kind in _kinds(field))


def _from_main_file(source: Source, key: Key, path: str, mark: RelativePath) -> str:
    """A path that a parent file says, relative to the folder of the main file."""
    _, place = source.origin(key)
    if not isinstance(place, Place) or place.file == source.path or not path:
        return path
    if os.path.isabs(path) or (mark.or_hub_id and is_hub_id(place.file, path)):
        return path
    here = os.path.dirname(os.path.abspath(source.path))
    return os.path.relpath(path_beside(place.file, path), here)


def read_size(text: str, unit: str | None) -> int | str:
    """The whole number that `text` such as 64Ki or 2GiB stands for; other text as it is.

    Args:
        text: a number with k, M, G or T; with `i` powers of 1024; with B a number of bytes
        unit: what the field counts: `bytes`, `tokens` or `patches` (k is 1024), or anything else

    Raises:
        ValueError: what it could mean, where that is not one whole number
    """
    if not (match := _SIZE.fullmatch(text)):
        return text
    number, letter, binary, byte = match.groups()
    if byte and unit != "bytes":
        raise ValueError(f"{text!r} is a number of bytes, expected {unit or 'a plain number'}")
    power = "kmgt".index(letter.lower()) + 1
    readings = [Decimal(number) * 1000**power, Decimal(number) * 1024**power]
    if binary or (unit in ("tokens", "patches") and power == 1):
        value = readings[1]
    elif byte == "B" and letter in "kMGT":
        value = readings[0]
    else:
        suffix = "B" if unit == "bytes" else ""
        proper = letter.upper()
        decimal = f"{number}{proper if power > 1 else 'k'}B" if suffix else f"{readings[0]:f}"
        raise ValueError(
            f"{text!r} is {readings[0]:f} or {readings[1]:f}, expected a clear size. Write "
            f"{decimal} or {number}{proper}i{suffix}"
        )
    if value != int(value):
        raise ValueError(f"{text!r} is {value.normalize():f}, expected a whole number")
    return int(value)


def unit_of(field: FieldInfo) -> str | None:
    """The unit in brackets in the description of `field`."""
    found = _UNIT.search(field.description or "")
    return found[1] if found else None


def _kinds(field: FieldInfo) -> list[Any]:
    """The types that a field may have, and their marks."""
    return [*field.metadata, field.annotation, *_annotations(field.annotation)]


def _annotations(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [*inner, *(each for part in inner for each in _annotations(part))]
