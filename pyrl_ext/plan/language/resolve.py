"""Values as they are meant: references replaced, sizes as numbers, a parent's paths from here."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from typing import Any, get_args

from pyrl_ext.plan.language.errors import Key, fields_of, show, unknown
from pyrl_ext.plan.language.yaml_tree import Place, Source
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.schema import RelativePath

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)(\}?)")
_SIZE = re.compile(r"([-+]?[0-9][0-9_]{0,17}(?:\.[0-9]{1,9})?) ?([kmgt])(i?)(b?)", re.IGNORECASE)
_UNIT = re.compile(r"\[(\w+)\]")


class _Failed(Exception):
    """The value cannot be told; the problem is recorded."""


def resolve(source: Source) -> None:
    """Replace what `source.tree` holds by what is meant; what cannot be told has failed."""
    resolver = Resolver(source)
    for name, value in source.tree.items():
        keys = [(name, inner) for inner in value] if isinstance(value, dict) else [(name,)]
        for key in keys:
            try:
                resolver.value(key)
            except _Failed:
                source.failed.add(key[:2])
            except RecursionError:
                source.fail(key, "nested too deeply, expected plain values")
    for key, value in resolver.known.items():
        if len(key) == 1 and key[0] in source.tree:
            source.tree[key[0]] = value
        elif len(key) == 2 and key[1] in source.tree.get(key[0], ()):
            source.tree[key[0]][key[1]] = value


class Resolver:
    """Values by key, each settled once, whoever asks first."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.known: dict[Key, Any] = {}
        self.failed: set[Key] = set()
        self.open: list[Key] = []

    def value(self, key: Key) -> Any:
        """The settled value of a field, an option, or a part of one. Raises `_Failed`."""
        if key in self.failed:
            raise _Failed
        if key not in self.known:
            self.open.append(key)
            try:
                self.known[key] = self._settled(key, _find(self.source.tree, key))
            except (_Failed, RecursionError):
                self.failed.add(key)
                raise
            finally:
                self.open.pop()
        return self.known[key]

    def _settled(self, key: Key, written: Any) -> Any:
        if isinstance(written, dict):
            names, parts = list(written), self._parts(key, list(written))
            return dict(zip(names, parts, strict=True))
        if isinstance(written, list | tuple):
            return self._parts(key, [str(i) for i in range(len(written))])
        if not isinstance(written, str):
            return written
        value = self._with_references(key, written) if "${" in written else written
        field = _field(key)
        if field is None or not isinstance(value, str):
            return value
        if _takes_int(field.annotation):
            return self._size(key, value, unit_of(field))
        if mark := relative_path_of(field):
            return self._from_here(key, written, value, mark)
        return value

    def _parts(self, key: Key, names: list[str]) -> list[Any]:
        """All are settled, so that the problems of all are found."""
        values, whole = [], True
        for name in names:
            try:
                values.append(self.value((*key, name)))
            except _Failed:
                whole = False
        if not whole:
            raise _Failed
        return values

    def _with_references(self, key: Key, written: str) -> Any:
        match = _REFERENCE.fullmatch(written)
        if match and match[1] is not None:
            return self._referred(key, match)

        def text(match: re.Match[str]) -> str:
            if match[1] is None:
                return "${"
            value = self._referred(key, match)
            if isinstance(value, str):
                return value
            if not isinstance(value, int | float):
                return self._refuse(
                    key, f"{match[0]} is {show(value)}, expected text or a number inside text"
                )
            return show(value)

        return _REFERENCE.sub(text, written)

    def _referred(self, key: Key, match: re.Match[str]) -> Any:
        target: Key = tuple(match[1].strip().split("."))
        if not match[2]:
            self._refuse(
                key, f"{match[0]!r} is not closed, expected ${{section.key}}. Write $${{ for text"
            )
        if reason := self._no_value(target):
            self._refuse(key, f"{match[0]}: {reason}")
        if target in self.open:
            cycle = [*self.open[self.open.index(target) :], target]
            names = " -> ".join(".".join(each) for each in cycle)
            self._refuse(key, f"{names} is a cycle, expected a value at its end")
        self.source.references.setdefault(key, []).append(target)
        return self.value(target)

    def _no_value(self, key: Key) -> str | None:
        """Why a reference to `key` refers to no value."""
        section, *names = key
        if section not in fields_of():
            return unknown((section,))
        if fields := fields_of(section):
            if not names:
                example = f"${{{section}.{next(iter(fields))}}}"
                return f"a section, expected one of its keys. For example {example}"
            if names[0] not in fields:
                return unknown((section, names[0]))
        try:
            _find(self.source.tree, key)
        except KeyError:
            return "not written and without a default, expected a key that has a value"

    def _size(self, key: Key, text: str, unit: str | None) -> int | str:
        try:
            return read_size(text, unit)
        except ValueError as error:
            return self._refuse(key, str(error))

    def _from_here(self, key: Key, written: str, text: str, mark: RelativePath) -> str:
        """A path that another file began, as seen from the folder of the main one."""
        _, place = self.source.origin(key) or ((), None)
        if not isinstance(place, Place) or place.file == self.source.path or not text:
            return text
        if (start := _REFERENCE.match(written)) and start[1]:
            field = _field(tuple(start[1].strip().split(".")))
            if field and relative_path_of(field):
                return text  # it begins with a path that is already seen from here
        there = Plan.model_construct(source=os.path.abspath(place.file))
        if os.path.isabs(text) or (mark.or_hub_id and there.is_hub_id(text)):
            return text
        here = os.path.dirname(os.path.abspath(self.source.path))
        return os.path.relpath(there.resolve(text), here)

    def _refuse(self, key: Key, message: str) -> Any:
        self.source.fail(key, message)
        raise _Failed


def read_size(text: str, unit: str | None) -> int | str:
    """The whole number that `text` such as 64Ki or 2GiB stands for; other text as it is.

    Args:
        text: a number with k, M, G or T; with `i` powers of 1024; with B a number of bytes
        unit: what the field counts: `bytes`, `tokens` (k is 1024), or anything else

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
    if binary or (unit == "tokens" and power == 1):
        value = readings[1]
    elif byte == "B" and letter in "kMGT":
        value = readings[0]
    else:
        suffix = "B" if unit == "bytes" else ""
        proper = letter.upper()
        decimal = f"{number}{proper if power > 1 else 'k'}B" if suffix else f"{readings[0]:f}"
        raise ValueError(
            f"{text!r} is {readings[0]:f} or {readings[1]:f}, expected one of both. Write "
            f"{decimal} or {number}{proper}i{suffix}"
        )
    if value != int(value):
        raise ValueError(f"{text!r} is {value.normalize():f}, expected a whole number")
    return int(value)


def unit_of(field: Any) -> str | None:
    """The unit in brackets in the description of `field`."""
    found = _UNIT.search(field.description or "")
    return found[1] if found else None


def relative_path_of(field: Any) -> RelativePath | None:
    """How the text of `field` is a path, where it is one."""
    marks = [*field.metadata, *_annotations(field.annotation)]
    return next((mark for mark in marks if isinstance(mark, RelativePath)), None)


def _annotations(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [*inner, *(each for part in inner for each in _annotations(part))]


def _takes_int(annotation: Any) -> bool:
    return annotation is int or int in _annotations(annotation)


def _field(key: Key) -> Any:
    """The schema's field of `key`, None for what is no field of its own."""
    *section, name = key
    return fields_of(*section).get(name) if len(key) <= 2 else None


def _find(tree: dict[str, Any], key: Key) -> Any:
    """What was written for `key`, or its default. Raises `KeyError`."""
    at: Any = tree
    for depth, part in enumerate(key):
        if isinstance(at, dict) and part in at:
            at = at[part]
        elif isinstance(at, list | tuple) and part.isdecimal() and int(part) < len(at):
            at = at[int(part)]
        elif (field := _field(key[: depth + 1])) is not None and not field.is_required():
            at = field.get_default(call_default_factory=True)
        elif depth == 0 and fields_of(part):
            at = {}  # the section is not written: its fields may have defaults
        else:
            raise KeyError(part)
    return at
