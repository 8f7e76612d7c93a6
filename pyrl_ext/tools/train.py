"""``pyrl train CONFIG|MODEL ...``: `python -m pyrl_ext.train`, also from a model's name.

``pyrl train MODEL ...`` with the options of `pyrl init` writes that command's config to the run
folder, and runs it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext import train
from pyrl_ext.parallel.atomic_write import write_text
from pyrl_ext.parallel.launch import launched, refuse
from pyrl_ext.plan.language.paths import is_hub_id
from pyrl_ext.plan.shipped import config_name, config_names
from pyrl_ext.tools.init import add_options, recipe_of
from pyrl_ext.tools.recipe import as_seen

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
    model = given[0]
    parser = argparse.ArgumentParser(prog="pyrl train MODEL", allow_abbrev=False, add_help=False)
    add_options(parser)
    options, unknown = parser.parse_known_args(given[1:])
    others = [text for text in unknown if text != "run="]
    try:
        ranks = launched("WORLD_SIZE", 0)
        made = recipe_of(model, options, ranks or 1)
    except ValueError as error:
        print(f"pyrl train: {error}", file=sys.stderr)
        return None
    text = made.text(absolute=True)
    run = _run_folder(text, others, ranks, str(made.values["run"]))
    if run is None:
        return None
    file = Path(run) / _MADE
    if problem := _write(file, text, model):
        refuse(f"pyrl train: {problem}")
        return None
    if launched("RANK", 0) == 0:
        plan = f"pyrl plan {shlex.quote(str(file))}"
        print(f"made {file} for {model}; `{plan}` explains it", flush=True)
    return [str(file), *others]


def _run_folder(text: str, others: list[str], ranks: int, usual: str) -> str | None:
    """The run folder of a config with the other arguments of `pyrl train`. None: its plan does not
    hold, as printed.

    Args:
        usual: the folder where `text` is written if no argument changes it
    """
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / _MADE
        draft.write_text(text, encoding="utf-8")

        def say(problems: str) -> None:
            refuse(as_seen(problems, draft, os.path.abspath(usual)))

        _, plan = train.parse_arguments([str(draft), *others], ranks or None, say)
    return None if plan is None else plan.run


def _write(file: Path, text: str, model: str) -> str | None:
    """Write the config of a run; every rank writes the same. The problem if it cannot be written;
    None: it is there."""
    try:
        if file.exists() and file.read_bytes() != text.encode():
            return (
                f"{file} differs from what {model} gives, expected the same config, to resume its "
                f"run. To go on with it: pyrl train {shlex.quote(str(file))}; or set run= to "
                "another folder"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    except OSError as error:
        reason = error.strerror or error
        return f"{file}: {reason}, expected a run folder that can be made. Set run= to one"
    return None


def _is_model(text: str) -> bool:
    """True if the first argument of `pyrl train` names no config."""
    if text.startswith("-") or "=" in text or text.endswith((".yaml", ".yml")):
        return False
    if Path(text).exists():
        return Path(text).is_dir() or text.endswith(".gguf")
    return is_hub_id("", text) and config_name(text) not in config_names()
