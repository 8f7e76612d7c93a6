"""Write the config of a run from a model's name: pyrl init MODEL > run.yaml.

MODEL is a Hugging Face folder, a hub id, or the name of a shipped config (--list): its model.
Layout, microbatch, recomputation and offloading are the fastest of pyrl plan --suggest that fit.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.plan.command import called
from pyrl_ext.plan.compile import load
from pyrl_ext.plan.gym_tasks import is_gym_task
from pyrl_ext.plan.language.paths import is_hub_id
from pyrl_ext.plan.model.hardware import parse_gpus
from pyrl_ext.plan.shipped import (
    ShippedModel,
    config_file,
    config_name,
    config_names,
    names_like,
    shipped_models,
)
from pyrl_ext.plan.task_options import SYMBOLS
from pyrl_ext.tools import configs
from pyrl_ext.tools.doctor import gpus_here
from pyrl_ext.tools.recipe import GPUS, Data, Gpus, Recipe, recipe

_SAME_MEMORY = 0.9  # least share of the data sheet's memory that counts as the same GPU


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: written to stdout; 2: there is no such model, or it does not fit."""
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.tools.init"), description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--list", action="store_true", help="list the shipped models and configs")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.list:
        for model in shipped_models().values():
            if _is_colocated(model):
                print(f"pyrl init {model.config:20} {model.hub_id}")
        print("\nConfigs that run as they are, `pyrl train NAME`:\n")
        return configs.main([])
    if options.model is None:
        parser.error("expected MODEL or --list")
    try:
        made = recipe_of(options.model, options)
    except ValueError as error:
        print(f"pyrl init: {error}", file=sys.stderr)
        return 2
    print(made.text(), end="")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of a recipe."""
    parser.add_argument("--gpus", metavar="8xH100", help="left out: those of this machine, or none")
    parser.add_argument("--prompts", metavar="FILE", help=".jsonl or .parquet; needs --reward")
    parser.add_argument("--reward", metavar="MODULE:FUNCTION", help="scores a response")
    tasks = f"prompts and reward instead: {', '.join(SYMBOLS)}, or reasoning_gym:NAME"
    parser.add_argument("--task", metavar="TASK", help=tasks)


def recipe_of(model: str, options: argparse.Namespace, ranks: int | None = None) -> Recipe:
    """The recipe that the options ask for.

    Args:
        ranks: GPUs to take of this machine; None: all

    Raises:
        ValueError: there is no such model, or it does not fit
    """
    for option in ("prompts", "reward"):
        if getattr(options, option) == "":
            raise ValueError(
                f"--{option} is empty, expected a value. Leave the option out for none"
            )
    if (options.prompts is None) != (options.reward is None):
        raise ValueError("--prompts and --reward, expected both or neither")
    if options.prompts is not None and options.task is not None:
        raise ValueError("--task with --prompts, expected one of them")
    task = options.task
    if task is not None and task not in SYMBOLS and not is_gym_task(task):
        rule = f"expected {', '.join(SYMBOLS)}, or reasoning_gym:NAME"
        raise ValueError(f"--task {task}, {rule}")
    shipped = config_name(model) in config_names()  # such as configs/glm47, like a hub id
    if not Path(model).exists() and (shipped or not is_hub_id("", model)):
        model = _hub_id_of(model)
    gpus = _gpus_here(ranks) if options.gpus is None else Gpus(*parse_gpus(options.gpus))
    return recipe(model, gpus, Data(options.prompts, options.reward, options.task))


def _hub_id_of(name: str) -> str:
    """The hub id of the model that a shipped config trains.

    Raises:
        ValueError: there is no such config, or it has no weights
    """
    models = {model.config: model for model in shipped_models().values()}
    config = config_name(name)
    if config in models:
        return models[config].hub_id
    if config in config_names():
        raise ValueError(
            f"{name}: a config without weights, expected a model. Run it as it is: "
            f"`pyrl train {config}`"
        )
    close = names_like(name, models)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`pyrl init --list` lists them"
    raise ValueError(
        f"{name}: no such folder, expected a Hugging Face folder, a hub id (owner/name) or the "
        f"name of a shipped model. {hint}"
    )


def _is_colocated(model: ShippedModel) -> bool:
    """True if the config of a model has all on the trainer's GPUs, as the configs made here do:
    no encoders, and no engines on other GPUs."""
    plan = load(config_file(model.config)).tree
    return "modules" not in plan and "launch" not in plan["rollout"]


def _gpus_here(ranks: int | None) -> Gpus | None:
    """This machine's GPUs; None: it has none."""
    here = gpus_here()
    if not here:
        return None
    name = str(here[0]["name"])
    memory = min(int(gpu["memory"]) for gpu in here)
    return gpus_named(name, memory, ranks or len(here))


def gpus_named(name: str, memory: int, count: int) -> Gpus:
    """GPUs by what nvidia-smi reports.

    Args:
        name: such as `NVIDIA A100-SXM4-40GB`
        memory: of each [bytes]; kept if it is clearly less than the data sheet's

    Raises:
        ValueError: there is no data sheet of such a GPU
    """
    words = re.split(r"\W+", name)
    for kind, sheet in GPUS.items():
        if kind in words:
            return Gpus(count, kind, memory if memory < _SAME_MEMORY * sheet.memory else None)
    raise ValueError(
        f"this machine has {name}, expected one of {', '.join(GPUS)}; others have no data sheet "
        "here. Name one that is like it: --gpus 1xA100"
    )


if __name__ == "__main__":
    sys.exit(main())
