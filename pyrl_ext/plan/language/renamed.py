"""Renamed keys: the old name is accepted for one version, and a note names the new one."""

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


def current(key: Key) -> Key:
    """`key`, or a key below it, by today's names."""
    new = RENAMED.get(key[:2])
    return (key[0], new, *key[2:]) if new else key


def renamed_note(key: Key) -> str:
    """The note for a user who wrote the old name `key`."""
    return (
        f"{'.'.join(key)} was renamed to {'.'.join(current(key))}; only this version accepts the "
        "old name"
    )


def renamed_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections of a saved plan by today's names."""
    return {
        section: {current((section, name))[1]: inner for name, inner in value.items()}
        if isinstance(value, dict)
        else value
        for section, value in tree.items()
    }
