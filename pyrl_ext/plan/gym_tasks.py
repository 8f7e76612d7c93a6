"""Tasks of the package reasoning-gym: which there are, and the options that they take.

The package is imported only if a plan names one of its tasks: about a second, without torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from pyrl_ext.plan.language.errors import show

PREFIX = "reasoning_gym:"
INSTALL = "pip install 'pyrl-ext[tasks]'"

_SET_BY_THE_RUN = ("seed", "size")
_OF_THE_HASH_SEED = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Tasks whose questions differ between processes, since they iterate over sets of text."""


def is_gym_task(task: str) -> bool:
    """True if ``task`` is written as one of reasoning-gym's, ``reasoning_gym:<name>``."""
    return task.startswith(PREFIX)


def gym_task_problem(task: str) -> str | None:
    """Why ``reasoning_gym:<name>`` cannot be used; None: it can."""
    if find_spec("reasoning_gym") is None:
        return f"{task} without the package reasoning-gym, expected it. Run {INSTALL}"
    name = task.removeprefix(PREFIX)
    if name in _OF_THE_HASH_SEED:
        return (
            f"{task} gives other questions in each process for the same seed, expected a task "
            "that does not: ranks would disagree, and a resumed run would see other prompts"
        )
    configs = _configs()
    if name in configs:
        return None
    close = difflib.get_close_matches(name, configs, n=3, cutoff=0.5)
    hint = f"such as {' or '.join(close)}" if close else "such as chain_sum"
    return (
        f"{show(name)} is none of the {len(configs)} tasks of reasoning-gym, expected one of them, "
        f"{hint}; `python -c 'import reasoning_gym.factory as f; print(*f.DATASETS)'` lists them"
    )


def gym_option_problems(task: str, options: Mapping[str, Any]) -> Iterator[str | tuple[str, str]]:
    """The problems of the options of a task that exists; (option, problem) is about one of them."""
    config = _configs()[task.removeprefix(PREFIX)]
    fields = [f.name for f in dataclasses.fields(config) if f.name not in _SET_BY_THE_RUN]
    unknown = [name for name in options if name not in fields]
    for name in unknown:
        if name in _SET_BY_THE_RUN:
            yield name, f"{show(options[name])}, expected no {name}; the run sets it"
        else:
            yield name, f"unknown option, expected one of {', '.join(fields)}"
    if unknown:
        return
    try:
        gym_dataset(task, options, seed=0, size=1)
    except Exception as error:  # the package asserts, and its configs may raise anything
        reason = str(error) or type(error).__name__
        yield f"{show(dict(options))}, expected options that {task} takes: {reason}"


def gym_dataset(task: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """A dataset of the package: ``size`` entries, the same for the same seed."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task.removeprefix(PREFIX), seed=seed, size=size, **options)


def _configs() -> dict[str, Any]:
    """The tasks of the package that need no other datasets, and the classes of their options."""
    from reasoning_gym.factory import DATASETS  # the package's modules register them

    return {name: config for name, (_, config) in DATASETS.items() if name != "composite"}
