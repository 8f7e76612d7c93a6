"""The kind of a run: with rollouts, or without them on records of a file; each reads other keys."""

from __future__ import annotations

from typing import Any

from pydantic_core import ErrorDetails

from pyrl_ext.plan.language.errors import Key, describe, fields_of, show
from pyrl_ext.plan.language.yaml_tree import Source


def _keys(names: str) -> tuple[Key, ...]:
    return tuple(tuple(name.split(".")) for name in names.split())


# Keys of `objective` that fine-tuning reads too; all others are parts of a policy's loss.
_ANY_LOSS = ("loss", "loss_is_token_wise", "mtp_coef", "mtp_detach")
PARTS = [name for name in fields_of("objective") if name not in _ANY_LOSS]
# Keys that only runs with rollouts read, and those that only runs without them read; a section
# stands for all its keys.
WITH_ROLLOUTS = _keys(
    "rollout turns replay teacher evaluate.prompts evaluate.samples evaluate.temperature "
    "evaluate.top_p evaluate.top_k evaluate.max_new_tokens evaluate.pass_k evaluate.pass_reward "
    "evaluate.sets batching.epochs batching.prompts batching.samples_per_prompt "
    "data.sources data.task data.task_options data.prompts data.subset data.split data.eval_split "
    "data.columns data.chat data.system_prompt data.reward data.reward_timeout data.reward_workers "
    "data.reward_concurrency data.reward_retries data.reward_min_share data.eval_prompts "
    "data.max_prompt_tokens lora.publish"
) + tuple(("objective", name) for name in PARTS)
WITHOUT_ROLLOUTS = _keys("data.path data.max_tokens data.truncate data.held_out batching.samples")
# By whether a run has rollouts: the keys that it cannot do without.
REQUIRED = {
    True: _keys(
        "rollout.engine rollout.max_new_tokens data.max_prompt_tokens batching.prompts "
        "batching.samples_per_prompt"
    ),
    False: _keys("data.path data.max_tokens batching.samples"),
}


def has_rollouts(tree: dict[str, Any]) -> bool:
    """True if an engine generates the samples of the run that `tree` describes."""
    sections = {name: each for name, each in tree.items() if isinstance(each, dict)}
    loss, path = (sections.get(s, {}).get(k) for s, k in (("objective", "loss"), ("data", "path")))
    return not (loss == "sft" or (path is not None and ":" in str(loss)))


def required_keys(tree: dict[str, Any], section: Key) -> list[str]:
    """The keys that `section` has to have in the kind of run that `tree` describes."""
    rollouts = has_rollouts(tree)
    keys = [name for name, field in fields_of(*section).items() if field.is_required()]
    keys += [key[-1] for key in REQUIRED[rollouts] if key[:-1] == section]
    if section == ("model",):
        keys = ["path, or family, config and tokenizer"]
    if section == ("rollout",) and tree.get("device") == "cpu":
        keys.remove("engine")  # it is filled in
    if section == ("data",) and rollouts:
        keys.append("task, prompts and reward, or sources")
    return keys


def with_required_bound(error: ErrorDetails) -> ErrorDetails:
    """An error of a required number with the bound that holds for it: the schema allows 0, which
    stands for a key that the run does not read."""
    if error["type"] == "greater_than_equal":
        return {**error, "ctx": {"ge": 1}}
    return error


def check_kind(source: Source) -> set[Key]:
    """Record the keys that this kind of run does not read, and remove them; record those that it
    lacks, and return them. Routes are not replayed without rollouts."""
    tree = source.tree
    sections = {name: each for name, each in tree.items() if isinstance(each, dict)}
    rollouts = has_rollouts(tree)
    reader = "without rollouts (objective: sft)" if rollouts else "with rollouts"
    for key in WITHOUT_ROLLOUTS if rollouts else WITH_ROLLOUTS:
        holder = sections.get(key[0], {}) if key[1:] else tree
        name = key[-1]
        if name in holder:
            value = holder.pop(name)
            shown = "set" if isinstance(value, dict) else show(value)
            message = f"{shown}, expected it left out; only a run {reader} reads it"
            source.report(key, message)
    if not rollouts:
        tree["replay"] = {"old": False, "reference": False, "train": False}
    lacking: list[ErrorDetails] = []
    for key in REQUIRED[rollouts]:
        value = sections.get(key[0], {}).get(key[1])
        if key[0] in sections and not value:
            kind = "missing" if value is None else "greater_than_equal"
            lacking.append({"type": kind, "loc": key, "msg": "", "input": value, "ctx": {"ge": 1}})
        elif key[0] == "rollout" and key[0] not in tree:
            lacking.append({"type": "missing", "loc": key[:1], "msg": "", "input": None})
    wrong: dict[Key, str] = {}
    for error in lacking:
        key = tuple(map(str, error["loc"]))
        wrong[key] = describe(error, required_keys(tree, key))
    for key, message in wrong.items():
        source.report(key, message)
    return {*wrong}
