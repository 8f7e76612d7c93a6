"""YAML -> Plan: read, check every field, run every rule, and raise all problems together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pyrl_ext.plan import notes, rules
from pyrl_ext.plan.language.defaults import fill
from pyrl_ext.plan.language.errors import ConfigError, Key, describe, field_key, show
from pyrl_ext.plan.language.fields import InvalidField
from pyrl_ext.plan.language.hf_hub import config_of
from pyrl_ext.plan.language.kind import (
    REQUIRED,
    check_kind,
    has_rollouts,
    required_keys,
    with_required_bound,
)
from pyrl_ext.plan.language.paths import is_hub_id, path_beside, refuse_pipe
from pyrl_ext.plan.language.resolve import resolve
from pyrl_ext.plan.language.yaml_tree import Source, apply, read
from pyrl_ext.plan.model.family import FAMILIES, nearest_family, read_sizes
from pyrl_ext.plan.plan import PartialPlan, Plan
from pyrl_ext.plan.ranks import fill_dp, leaves_out_dp
from pyrl_ext.plan.schema import Config
from pyrl_ext.plan.schema.objective import presets, with_preset


def compile_plan(path: str | Path, overrides: Sequence[str] = (), ranks: int | None = None) -> Plan:
    """The checked, frozen plan of a YAML file.

    Args:
        path: the YAML file; relative paths in it start at its folder
        overrides: `section.key=value`, the value read as YAML
        ranks: number of processes, which a parallel.dp that is left out follows from; None: it is 1

    Raises:
        ConfigError: with every problem of the file and the overrides, one a line
    """
    source = load(path, overrides)
    draft = draft_of(source)
    if leaves_out_dp(source):
        draft = fill_dp(source, draft, ranks)
    refuse(source, rules.check(draft))
    derived = {
        "source": draft.source,
        "hf": draft.hf,
        "teacher_hf": draft.teacher_hf,
        "notes": (*source.notes, *notes.notes(draft)),
        "unsupported": notes.unsupported(draft),
    }
    plan = Plan.model_validate(source.tree | derived)
    refuse(source, teacher_problems(plan))
    return plan


def changed_plan(
    saved: Plan, changes: Mapping[str, Any], overrides: Sequence[str], resumes: bool = True
) -> Plan:
    """A saved plan under another layout, for a command that goes on from it.

    Of the sections that were not changed nothing is checked again: their files may be gone by now.

    Args:
        changes: section, or key without one, -> its value
        overrides: `section.key=value`, the value read as YAML
        resumes: only what a resumed run may change may differ

    Raises:
        ConfigError: with every problem of what was changed, one a line, or with what a resumed run
            may not change
    """
    source = Source(saved.source, saved.model_dump(mode="json", include=set(Config.model_fields)))
    source.tree |= changes
    apply(source, overrides)
    resolve(source)
    _check_fields(source)
    refuse(source)
    derived = {"source": saved.source, "hf": saved.hf, "teacher_hf": saved.teacher_hf}
    plan = Plan.model_validate(source.tree | derived)
    if resumes:
        plan.check_resumes(saved)
    touched = {*changes, *(key[0] for key in source.overrides)}
    refuse(source, (broken for broken in rules.check(plan) if broken[0].split(".")[0] in touched))
    refused = tuple(r for r in notes.unsupported(plan) if r.split(".")[0] in touched)
    return plan.model_copy(update={"unsupported": refused})


def refuse(source: Source, broken: Iterable[tuple[str, str]] = ()) -> None:
    """Raise `ConfigError` where `source` has problems, or rules are broken: (key, message)."""
    for key, message in broken:
        source.report(tuple(key.split(".")), message)
    if source.problems:
        raise ConfigError(source.problems)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """Read the files and `overrides`, unchecked. Raises `ConfigError` where a file is missing
    or no YAML: what follows from that would only hide it."""
    source = read(path, tuple(overrides))
    if not source.complete:
        raise ConfigError(source.problems)
    resolve(source)
    _leave_out_null_dp(source.tree)
    fill(source)
    if isinstance(section := source.tree.get("objective"), dict):
        try:
            source.tree["objective"] = merged = with_preset(section)
            given = presets().get(str(merged.get("preset")), {})
            source.notes += [
                f"objective.{key}: {merged[key]} in place of {value}, the value of preset "
                f"{merged['preset']}"
                for key, value in given.items()
                if merged[key] != value
            ]
        except ValueError as error:
            source.fail(("objective", "preset"), str(error))
    return source


def _leave_out_null_dp(tree: dict[str, Any]) -> None:
    """`parallel: {dp: null}` leaves out what a parent sets."""
    section = tree.get("parallel")
    if isinstance(section, dict) and "dp" in section and section["dp"] is None:
        del section["dp"]


def draft_of(source: Source) -> PartialPlan:
    """The plan that rules look at: the fields of `source` that are right, wrong ones recorded."""
    _check_model_type(source)
    wrong = _check_fields(source) | check_kind(source)
    draft = PartialPlan.of(os.path.abspath(source.path), source.tree, wrong)
    _read_hf(source, draft)
    draft.learn_teachers(_read_teachers(source, draft))
    return _without_routers(source, draft)


def _without_routers(source: Source, draft: PartialPlan) -> PartialPlan:
    """`draft` without replay where nothing is written about it and the model has no routers."""
    try:
        if "replay" in source.tree or draft.router_layers:
            return draft
    except InvalidField:  # reported already
        return draft
    off = dict.fromkeys(("old", "reference", "train"), False)
    source.tree["replay"] = off
    if has_rollouts(source.tree):
        source.notes.append("replay is left out: it is off, because the model has no routers")
    return draft.changed({("replay", name): False for name in off})


def _check_model_type(source: Source) -> None:
    """Record an HF config whose `model_type`, the model.family, is none of the families."""
    model = source.tree.get("model")
    if not isinstance(model, dict):
        return
    family = model.get("family")
    config = model.get("config")
    if not isinstance(family, str) or not isinstance(config, str) or family in FAMILIES:
        return
    path = path_beside(source.path, config)
    shown = rules.relative(path)
    try:
        hf = _read_json(path, shown)
    except ValueError:  # reported with model.config
        return
    if hf.get("model_type") != family:
        return
    message = (
        f"{show(family)}, the model_type of {shown}, expected one of {', '.join(FAMILIES)}; no "
        "other architecture is built"
    )
    if nearest := nearest_family(hf):
        message += f". The nearest by structure is {nearest}"
    source.fail(("model", "family"), f"{message}. To add a family, see docs/extend.md")


def _check_fields(source: Source) -> set[Key]:
    """Record every unknown key, missing key and wrong value; returns where they are."""
    wrong = set(source.failed)
    try:
        Config.model_validate(source.tree)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            key = tuple(str(part) for part in each["loc"])
            if field_key(key) not in source.failed:
                wrong.add(field_key(key))
                if key in REQUIRED[has_rollouts(source.tree)]:
                    each = with_required_bound(each)
                source.report(key, describe(each, required_keys(source.tree, key)))
    return wrong


def _read_hf(source: Source, draft: PartialPlan) -> None:
    """Put the HF config into `draft`, where it can be read and states the sizes it must."""
    try:
        path = draft.config_path
    except InvalidField:
        return
    try:
        family = draft.model.family
    except InvalidField:  # reported already; rules on sizes need none
        family = None
    hf = _checked_hf(source, ("model", "config"), path, family, reports_family=family is not None)
    if hf is not None:
        draft.learn(hf)


def _checked_hf(
    source: Source, key: Key, path: str, family: str | None = None, reports_family: bool = True
) -> dict[str, Any] | None:
    """The HF config at `path`, or None after recording its problem at `key`.

    Args:
        family: expected model_type; None: any that is built
        reports_family: False: a model_type that is not built is already recorded at another key
    """
    shown = rules.relative(path)
    try:
        hf = _read_json(path, shown)
        given = f"model_type is {hf.get('model_type')!r}"
        if family is not None and hf.get("model_type") != family:
            raise ValueError(f"{shown}: {given}, expected {family!r}, the model.family")
        if str(hf.get("model_type")) not in FAMILIES:
            if not reports_family:
                return None
            raise ValueError(f"{shown}: {given}, expected one of {', '.join(FAMILIES)}")
        read_sizes(hf)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            name = ".".join(str(part) for part in each["loc"])
            message = f"{shown}: {name}: {describe({**each, 'loc': ('', name)})}"
            source.report(key, message)
    except ValueError as error:
        source.report(key, str(error))
    else:
        return hf
    return None


def _read_teachers(source: Source, draft: PartialPlan) -> dict[str, dict[str, Any]]:
    """The HF configs of the teachers by name, without those in which something is wrong, which is
    recorded."""
    named: list[tuple[Key, str | None]] = []
    on_servers = False
    try:
        on_servers = bool(draft.teacher.servers)
        named.append((("teacher", "model"), draft.teacher.model))
        for name, keys in draft.data.sources.items():
            named.append((("data", "sources", name, "teacher"), keys.teacher))
    except InvalidField:  # reported already
        pass
    found: dict[str, dict[str, Any]] = {}
    for key, name in named:
        if name is None or name in found:
            continue
        if hf := _read_teacher(source, key, name, on_servers):
            found[name] = hf
    return found


def _read_teacher(source: Source, key: Key, name: str, any_family: bool) -> dict[str, Any] | None:
    """The HF config of a teacher; None: there is none, or what is wrong with it is recorded.

    Args:
        any_family: it may be of a model that is not built here
    """
    path = path_beside(source.path, os.path.join(name, "config.json"))
    if is_hub_id(source.path, name):
        of_hub = config_of(name)
        if of_hub.problem:
            source.report(key, f"{show(name)}: {of_hub.problem}")
            return None
        path = of_hub.path
    if not any_family:
        return _checked_hf(source, key, path)
    try:
        return _read_json(path, rules.relative(path))
    except ValueError as error:
        source.report(key, str(error))
        return None


def teacher_problems(plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of the rules on models and layouts that teachers break on the trainer's
    ranks."""
    own = [each for each in rules.RULES if each[0].split(".")[0] in ("model", "parallel")]
    for name, teacher in plan.teacher_plans.items():
        where = "teacher.model"
        if name != plan.teacher.model:
            source = next(each for each, of_it in plan.teachers.items() if of_it == name)
            where = f"data.sources.{source}.teacher"
        for key, message in rules.check(teacher, own):
            yield where, f"{name} on the ranks of the trainer: {key}: {message}"


def _read_json(path: str, shown: str) -> dict[str, Any]:
    """The JSON object in the file at `path`. Raises `ValueError` where there is none."""
    try:
        refuse_pipe(path)
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{shown}: {error.strerror}, expected an HF config.json") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{shown}:{error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{shown}: expected a JSON object of sizes")
    return found
