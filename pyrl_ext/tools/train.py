"""``pyrl train CONFIG|MODEL ...``: `python -m pyrl_ext.train`, also from a model's name.

``pyrl train MODEL ...`` with the options of `pyrl init` writes that command's config to the run
folder, and runs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext import train
from pyrl_ext.parallel.atomic_write import write_text
from pyrl_ext.parallel.launch import launched
from pyrl_ext.plan.language.paths import is_hub_id
from pyrl_ext.plan.shipped import config_name, config_names
from pyrl_ext.tools.init import add_options, recipe_of

_MADE = "config.yaml"  # in the run folder


def main(arguments: Sequence[str]) -> int:
    """The exit code of `train.main`; 2 also if a config cannot be made."""
    given = _with_config(arguments)
    return 2 if given is None else train.main(given)


def _with_config(given: Sequence[str]) -> list[str] | None:
    """Arguments of `pyrl train` with a config in place of MODEL and the options of `pyrl init`, if
    they begin with one; the config is written to the run folder. None: it cannot be made, as
    printed."""
    if not given or not _is_model(given[0]):
        return list(given)
    parser = argparse.ArgumentParser(prog="pyrl train MODEL", allow_abbrev=False, add_help=False)
    add_options(parser)
    options, others = parser.parse_known_args(given[1:])
    try:
        made = recipe_of(given[0], options, launched("WORLD_SIZE", 1))
    except ValueError as error:
        print(f"pyrl train: {error}", file=sys.stderr)
        return None
    runs = [text.partition("=")[2] for text in others if text.startswith("run=")]
    file = Path(runs[0] if runs else str(made.values["run"])) / _MADE
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, made.text(absolute=True))  # on every rank, the same
    if launched("RANK", 0) == 0:
        print(f"made {file} for {given[0]}; `pyrl plan {file}` explains it", flush=True)
    return [str(file), *others]


def _is_model(text: str) -> bool:
    """True if the first argument of `pyrl train` names no config."""
    if text.startswith("-") or "=" in text or text.endswith((".yaml", ".yml")):
        return False
    if Path(text).exists():
        return Path(text).is_dir() or text.endswith(".gguf")
    return is_hub_id("", text) and config_name(text) not in config_names()
