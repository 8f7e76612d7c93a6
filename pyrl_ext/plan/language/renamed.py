"""Renamed keys and functions: old names work for one version, and a note names the new ones."""

from __future__ import annotations

from typing import Any

from pyrl_ext.plan.language.errors import Key

# Old key -> its name in that section now.
RENAMED: dict[Key, str] = {
    ("hardware", "per_node"): "gpus_per_node",
    ("rollout", "memory"): "gpu_memory_utilization",
    ("rollout", "max_running"): "max_num_seqs",
    ("rollout", "logprobs"): "logprobs_mode",
}
# Functions that moved to another module, as a key names them.
MOVED = {
    f"pyrl_ext.rollout.rewards:{name}": f"pyrl_ext.data.rewards:{name}"
    for name in ("exact_match", "number_match")
}

# Values of a key that were renamed.
VALUES: dict[tuple[Key, str], str] = {(("objective", "loss"), "grpo"): "ppo"}


def current(key: Key) -> Key:
    """`key`, or a key below it, by today's names."""
    new = RENAMED.get(key[:2])
    return (key[0], new, *key[2:]) if new else key


def renamed_note(old: str, new: str) -> str:
    """The note for a user who wrote the name `old`."""
    return f"{old} was renamed to {new}; only this version accepts the old name"


def renamed_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections of a saved plan by today's names."""
    found = {
        section: {current((section, k))[1]: _value((section, k), v) for k, v in value.items()}
        if isinstance(value, dict)
        else value
        for section, value in tree.items()
    }
    objective = found.get("objective", {})
    if objective.get("kl_coef") and "kl_gradient" not in objective:  # the only one there was
        objective |= {"kl_gradient": "direct", "kl_weight": "none"}
    return found


def _value(key: Key, value: Any) -> Any:
    return VALUES.get((key, str(value))) or MOVED.get(str(value), value)
