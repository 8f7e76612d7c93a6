"""A YAML file and its overrides as a plain tree that knows the line of every key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from pyrl_ext.plan.problems import Key, Problem, suggest_path


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-3 is a number; 010, 1:30 and dates are text; no aliases."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (the name is PyYAML's)

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise ComposerError(
                None, None, "anchor, alias or tag, expected the plain value", event.start_mark
            )
        return super().compose_node(parent, index)


for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9]+(?:[eE][-+]?[0-9]+)?)",
        list("-+0123456789."),
    ),
]:
    _flags = re.IGNORECASE if _tag == "bool" else 0
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$", _flags), _first
    )


@dataclass
class Source:
    """What was written, where, and what could not be read."""

    path: str
    tree: dict[str, Any] = field(default_factory=dict)
    lines: dict[Key, int] = field(default_factory=dict)
    overrides: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, key: Key, message: str, line: int | None = None) -> Problem:
        """A problem at `line`, or where `key` or its section was written, or on the first line."""
        text = f"{'.'.join(key)}: {message}" if key else message
        for depth in range(len(key), -1, -1):
            at = key[:depth]
            if at in self.overrides:
                return Problem(
                    f"command line: {self.overrides[at]}", 0, message if at == key else text
                )
            if line is None and at in self.lines:
                line = self.lines[at]
        return Problem(f"{self.path}:{line or 1}", line or 1, text)


def read(path: str | Path, overrides: tuple[str, ...] = ()) -> Source:
    """The tree of `path` with `overrides` applied; everything unreadable is in `.problems`."""
    source = Source(str(path))
    _read_file(source)
    for text in overrides:
        _override(source, text)
    # `replay: off` and `replay: on` stand for all three passes.
    if isinstance(on := source.tree.get("replay"), bool):
        source.tree["replay"] = {"old": on, "reference": on, "train": on}
    return source


def _read_file(source: Source) -> None:
    try:
        text = Path(source.path).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        source.problems.append(Problem(source.path, 0, f"{reason}, expected a YAML file"))
        return
    except ValueError as error:
        source.problems.append(Problem(f"{source.path}:1", 1, f"not UTF-8 text: {error}"))
        return
    node = _compose(text, source)
    if node is None:
        if not source.problems:
            message = "empty, expected sections such as `model:` and `batching:`"
            source.problems.append(Problem(f"{source.path}:1", 1, message))
        return
    line = node.start_mark.line + 1
    if isinstance(node, MappingNode):
        source.lines[()] = line
        source.tree = _mapping(node, (), source)
    else:
        message = f"{_kind(node)}, expected a mapping of sections"
        source.problems.append(source.problem((), message, line))


def _compose(text: str, source: Source, override: str = "") -> Node | None:
    """The node tree of `text`, or None with the syntax error recorded."""
    try:
        return _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not YAML: character {error.character!r} is not allowed"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        message = "not YAML: " + ", ".join(filter(None, (error.context, error.problem)))
        if "'\\t'" in message:
            message += ". Indent with spaces"
    except RecursionError:
        line, message = 1, "nested too deeply, expected sections of plain values"
    where = f"command line: {override}" if override else f"{source.path}:{line}"
    source.problems.append(Problem(where, 0 if override else line, message))
    return None


def _value(node: Node, at: Key, source: Source) -> Any:
    """`node` as plain Python; records its line, and what is wrong below it."""
    source.lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, MappingNode):
        return _mapping(node, at, source)
    if isinstance(node, SequenceNode):
        return [_value(item, (*at, str(i)), source) for i, item in enumerate(node.value)]
    assert isinstance(node, ScalarNode)
    loader = _Loader("")
    try:
        return loader.construct_object(node)
    except ValueError as error:  # an integer of thousands of digits
        source.problems.append(source.problem(at, f"not a value: {error}"))
        return None


def _mapping(node: MappingNode, at: Key, source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            message = f"the key is {_kind(key_node)}, expected a word"
            source.problems.append(source.problem(at, message, line))
            continue
        key = (*at, key_node.value)
        if key_node.value in found:
            message = f"repeated, first on line {source.lines[key]}. Keep one"
            source.problems.append(source.problem(key, message, line))
            continue
        source.lines[key] = line
        found[key_node.value] = _value(value_node, key, source)
    return found


def _kind(node: Node) -> str:
    if isinstance(node, MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, SequenceNode) else "a single value"


def _override(source: Source, text: str) -> None:
    """Apply one `section.key=value` of the command line to the tree."""
    name, equals, written = text.partition("=")
    key = tuple(name.strip().split("."))
    where = f"command line: {text}"
    message = None
    if not equals or not all(key):
        message = "not an override, expected section.key=value. For example parallel.tp=2"
    elif not written.strip():
        message = "no value, expected section.key=value. Write null for none"
    elif key in source.overrides:
        message = f"repeats {source.overrides[key]}, expected each key once"
    else:
        message = suggest_path(key)
    if message:
        source.problems.append(Problem(where, 0, message))
        return
    if (node := _compose(written, source, text)) is None:
        return
    source.overrides[key] = text
    at: Any = source.tree
    for part in key[:-1]:
        at = at.setdefault(part, {}) if isinstance(at, dict) else None
    if isinstance(at, dict):
        at[key[-1]] = _value(node, key, source)
