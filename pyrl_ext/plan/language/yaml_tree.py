"""A YAML file, its parents and its overrides as a plain tree that knows the line of every key."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from pyrl_ext.plan.language.errors import Key, Problem, field_key, kind_at, show, suggest_path
from pyrl_ext.plan.language.hf_hub import config_of
from pyrl_ext.plan.language.paths import is_hub_id, path_beside, refuse_pipe, relative, similar
from pyrl_ext.plan.shipped import hint, meant

PLAN = "plan.json"  # in a run folder
_LONGEST = 4_000_000  # characters of a config


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-3 is a number; 010, 1:30 and dates are text; no aliases."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (the name is PyYAML's)

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


class Place(NamedTuple):
    """The file and line of a key."""

    file: str
    line: int


_KINDS: dict[type[Node], str] = {
    MappingNode: "a mapping",
    SequenceNode: "a list",
    ScalarNode: "a single value",
}
_DEEPEST = 64  # what writes a plan as JSON gives up at 255


@dataclass
class Source:
    """The values that were written, their lines, and the problems of reading them."""

    path: str
    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    overrides: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    complete: bool = True
    """Every file could be read, so that what is missing was not written."""
    notes: list[str] = field(default_factory=list)
    """Informational notes of reading, each with its place."""
    failed: set[Key] = field(default_factory=set)
    """Fields whose value could not be read; the reason is in `problems`."""

    def origin(self, key: Key) -> tuple[Key, Place | str]:
        """The override (its text) or else the place that wrote `key`, or the section around it,
        or the first line."""
        around = [key[:depth] for depth in range(len(key), -1, -1)]
        for written in (self.overrides, self.places):
            for at in around:
                if at in written:
                    return at, written[at]
        return (), Place(self.path, 1)

    def problem(self, key: Key, message: str, line: int | None = None) -> Problem:
        """A problem at `line`, or where `key` or its section was written, or on the first line."""
        text = f"{'.'.join(key)}: {message}" if key else message
        at, place = self.origin(key)
        if isinstance(place, str):
            return Problem(f"command line: {place}", 0, message if at == key else text)
        if line is not None:
            place = Place(self.path, line)
        return Problem(f"{place.file}:{place.line}", place.line, text)

    def report(self, key: Key, message: str, line: int | None = None) -> None:
        """Record a `problem`."""
        self.problems.append(self.problem(key, message, line))

    def fail(self, key: Key, message: str) -> None:
        """Record that the value of `key` cannot be read."""
        self.report(key, message)
        self.failed.add(field_key(key))


def read(path: str | os.PathLike[str], overrides: tuple[str, ...] = ()) -> Source:
    """The tree of `path` with `overrides` applied, above what its parents say; everything
    unreadable is in `.problems`."""
    source = Source(meant(str(path)))
    _read_file(source)
    apply(source, overrides)
    if source.complete:
        _extend(source, (source.path,))
    return source


def apply(source: Source, overrides: Sequence[str]) -> None:
    """Set what `overrides`, each `section.key=value`, say in the tree of `source`."""
    for text in overrides:
        _override(source, text)


def _read_file(source: Source, child: Source | None = None) -> None:
    """Read the tree of `source.path`, a parent that `child` names."""
    source.complete = False
    try:
        if child or not source.path.startswith("/dev/"):  # stdin and open pipes are there
            refuse_pipe(source.path)
        with open(source.path, encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)  # a device could hold text without end
        if len(text) > _LONGEST:
            raise OSError(errno.EFBIG, f"More than {_LONGEST:,} characters")
    except UnicodeDecodeError as error:
        source.problems.append(Problem(f"{source.path}:1", 1, f"not UTF-8 text: {error}"))
        return
    except (OSError, ValueError) as error:
        reason = f"{getattr(error, 'strerror', '') or 'cannot be read'}, expected a YAML file"
        near = similar(source.path)
        if child:
            problem = child.problem(("extends",), f"{source.path}: {reason}{near}")
        else:
            advice = _how_to_resume(source.path) or hint(source.path) or near
            problem = Problem(source.path, 0, reason + advice)
        source.problems.append(problem)
        return
    if not child and (advice := _how_to_resume(source.path)):
        reason = "the plan of a run, expected the YAML file that it was made from"
        source.problems.append(Problem(source.path, 0, reason + advice))
        return
    node = _compose(text, source)
    if node is None:
        if not any(problem.where.startswith(f"{source.path}:") for problem in source.problems):
            message = "empty, expected sections such as `model:` and `batching:`"
            source.problems.append(Problem(f"{source.path}:1", 1, message))
        return
    line = node.start_mark.line + 1
    if not isinstance(node, MappingNode):
        source.report((), f"{_KINDS[type(node)]}, expected a mapping of sections", line)
        return
    source.complete = True
    source.places[()] = Place(source.path, line)
    source.tree = _mapping(node, (), source)
    _spread_short_forms(source)


def _how_to_resume(path: str) -> str:
    """Advice, as a sentence, for a run folder or the plan.json in it; "" for anything else."""
    if os.path.isdir(path):
        path = os.path.join(path, PLAN)
    if os.path.basename(path) != PLAN:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
        return f". To resume the run: pyrl train {relative(saved['source'])} run={saved['run']}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def _spread_short_forms(source: Source) -> None:
    """`replay: off` and `replay: on` stand for all three passes, `replay: trainer` for the two that
    replay the trainer's routes, `objective: sft` for its loss, `objective: dapo` for that preset,
    `model: folder` for `model.path`, and that for what is in its folder."""
    tree = source.tree
    on = tree.get("replay")
    if isinstance(on, bool):
        tree["replay"] = {"source": "engine", "old": on, "reference": on, "train": on}
    elif on == "trainer":
        tree["replay"] = {"source": "trainer", "old": False, "reference": True, "train": True}
    if isinstance(name := tree.get("objective"), str):
        tree["objective"] = {"loss" if name == "sft" or ":" in name else "preset": name}
    model = tree.get("model")
    if isinstance(model, str):
        model = tree["model"] = {"path": model}
        if ("model",) in source.places:
            source.places["model", "path"] = source.places["model",]
    if isinstance(model, dict) and isinstance(path := model.get("path"), str) and path:
        _spread_model_path(source, model, path)


def _spread_model_path(source: Source, model: dict[str, Any], path: str) -> None:
    """Put the keys that `model.path` stands for in its place, if its folder holds a model. Those
    written next to it win; an override stands for all that no other override sets."""
    at = ("model", "path")
    config = os.path.join(path, "config.json")
    file = path_beside(source.path, config)
    if is_hub_id(source.path, path):
        config = path
        file = config_of(path).path
    try:
        refuse_pipe(file)
        with open(file, encoding="utf-8") as opened:
            family = json.load(opened)["model_type"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return  # reported if nothing takes its place
    model["path"] = None
    values = {"family": family, "config": config, "tokenizer": path, "weights": path}
    for name, value in values.items():
        key = ("model", name)
        if key in source.overrides or (at not in source.overrides and name in model):
            continue
        model[name] = value
        source.places.pop(key, None)
        if at in source.places and at not in source.overrides:
            source.places[key] = source.places[at]


def _extend(source: Source, chain: tuple[str, ...]) -> None:
    """Add the keys of the parent files, and of their parents, that `source` does not set; a later
    parent wins over an earlier one."""
    written = source.tree.pop("extends", None)
    if written is None:
        return
    source.complete = False
    names = written if isinstance(written, list) else [written]
    if not names or not all(isinstance(name, str) and name.isprintable() for name in names):
        names = [""]
    if "" in names:
        rule = "expected another YAML file, relative to this one, or a list of them"
        source.fail(("extends",), f"{show(written)}, {rule}")
        return
    below: Source | None = None
    complete = True
    for name in names:
        if (parent := _read_parent(source, name, chain)) is None:
            return
        if below is not None:
            _lay_below(parent, below)
        below = parent
        complete = complete and parent.complete
    assert below is not None  # there is a name
    _lay_below(source, below)
    source.complete = complete


def _read_parent(source: Source, name: str, chain: tuple[str, ...]) -> Source | None:
    """The file that `source` names as a parent, above its own parents; None: it leads to itself."""
    path = os.path.normpath(os.path.join(os.path.dirname(source.path), name))
    again = os.path.realpath(path) in map(os.path.realpath, chain)
    chain = (*chain, path)
    if again:
        rule = "expected a parent that does not extend this file. Remove one of these extends"
        source.fail(("extends",), f"{' -> '.join(chain)} is a circle, {rule}")
        return None
    parent = Source(path, problems=source.problems, notes=source.notes, failed=source.failed)
    _read_file(parent, source)
    _extend(parent, chain)
    return parent


def _lay_below(source: Source, parent: Source) -> None:
    """Add the keys of `parent` that `source` does not set."""
    replaced: set[Key] = set(source.overrides)
    source.tree = _merge(parent.tree, source.tree, (), replaced)
    kept = {
        key: place
        for key, place in parent.places.items()
        if not any(key[:depth] in replaced for depth in range(1, len(key) + 1))
    }
    source.places = kept | source.places


def _merge(
    parent: dict[str, Any], child: dict[str, Any], at: Key, replaced: set[Key]
) -> dict[str, Any]:
    """Sections and options key by key, other values whole; adds what the child replaces."""
    merged = dict(parent)
    for name, value in child.items():
        key = (*at, name)
        below = parent.get(name)
        merges = kind_at(key) not in (None, Any) and key not in replaced and value
        if merges and isinstance(value, dict) and isinstance(below, dict):
            merged[name] = _merge(below, value, key, replaced)
        else:
            merged[name] = value
            replaced.add(key)
    return merged


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
        line = 1
        message = "nested too deeply, expected sections of plain values"
    where = f"command line: {override}" if override else f"{source.path}:{line}"
    source.problems.append(Problem(where, 0 if override else line, message))
    return None


def _value(node: Node, at: Key, source: Source) -> Any:
    """`node` as plain Python; records its line, and what is wrong below it."""
    if len(at) > _DEEPEST:
        source.fail(at[:2], f"{len(at)} levels deep, expected at most {_DEEPEST}")
        return None
    source.places.setdefault(at, Place(source.path, node.start_mark.line + 1))
    if isinstance(node, MappingNode):
        return _mapping(node, at, source)
    if isinstance(node, SequenceNode):
        return [_value(item, (*at, str(i)), source) for i, item in enumerate(node.value)]
    try:
        return _Loader("").construct_object(node)
    except ValueError as error:  # an integer of thousands of digits
        source.fail(at, f"not a value: {error}")
        return None


def _mapping(node: MappingNode, at: Key, source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            source.report(at, f"the key is {_KINDS[type(key_node)]}, expected a word", line)
            continue
        key = (*at, key_node.value)
        if key[-1] in found:
            first = source.places[key].line
            source.report(key, f"repeated, first on line {first}. Keep one", line)
            continue
        source.places[key] = Place(source.path, line)
        found[key[-1]] = _value(value_node, key, source)
    return found


def _override(source: Source, text: str) -> None:
    """Apply one `section.key=value` of the command line to the tree."""
    name, equals, written = text.partition("=")
    key = tuple(name.strip().split("."))
    if key == ("model",):
        key = ("model", "path")
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
        if isinstance(at, dict) and at.get(part) is None:  # left out, or null, such as lora
            at[part] = {}
        at = at[part] if isinstance(at, dict) else None
    if isinstance(at, dict):
        at[key[-1]] = _value(node, key, source)
        _spread_short_forms(source)
