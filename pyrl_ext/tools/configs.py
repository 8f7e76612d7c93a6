"""List the shipped configs, or copy one.

A config is copied with all that it extends and reads, to FOLDER/configs/, here by default: the
commands in its comments work in FOLDER, and so do functions such as configs.examples.reward:near.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.plan.command import called
from pyrl_ext.plan.compile import load
from pyrl_ext.plan.language.resolve import is_path, texts
from pyrl_ext.plan.schema.turns import VERIFIERS
from pyrl_ext.plan.shipped import (
    config_file,
    config_name,
    config_names,
    first_sentence,
    shipped_folder,
)
from pyrl_ext.plan.tasksets import taskset_module

_FUNCTION = re.compile(r"(configs(?:\.\w+)+):\w+")


def files_of(config: Path) -> set[Path]:
    """A shipped config, what it extends, and the files that each of these reads.

    Files of a parent that the config replaces are among them: the parent is a config, too.
    """
    source = load(config)
    parents = {Path(place.file) for place in source.places.values()} - {config}
    found = {config}
    for parent in parents:
        found |= files_of(parent)
    for key, text in texts(source.tree):
        if function := _FUNCTION.fullmatch(text):
            path = shipped_folder() / f"{function[1].replace('.', '/')}.py"
        elif text.startswith(VERIFIERS):
            path = config.parent / f"{taskset_module(text.removeprefix(VERIFIERS))}.py"
        elif is_path(key):
            path = Path(config.parent / text).resolve()
        else:
            continue
        inside = path.is_dir() and path.rglob("*")
        found |= {file for file in inside or [path] if file.is_file()}
    return found


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a shipped config and its `files_of` below ``folder``; the files there, sorted.

    Raises:
        FileExistsError: one of them is there with other content. Nothing is copied then.
    """
    root = shipped_folder()
    targets = {file: folder / file.relative_to(root) for file in files_of(config_file(name))}
    for source, target in targets.items():
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise FileExistsError(
                f"{target}: differs from the shipped file, expected no such file. Choose another "
                "FOLDER, or move it out of the way"
            )
    for source, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return sorted(targets.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: listed, or copied; 2: there is no such config, or it cannot be copied."""
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.tools.configs"), description=__doc__)
    parser.add_argument("--copy", metavar="NAME", help="the config to copy")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where to; default: here")
    options = parser.parse_args(arguments)
    if options.copy is None:
        if options.folder is not None:
            parser.error(f"{options.folder}: a folder, expected --copy NAME before it")
        _list()
        return 0
    return _copy(config_name(options.copy), Path(options.folder or "."))


def _list() -> None:
    names = config_names()
    width = max(map(len, names))
    for name in names:
        text = textwrap.shorten(first_sentence(config_file(name)), 110, placeholder=" ...")
        print(f"{name:{width}}  {text}")


def _copy(name: str, folder: Path) -> int:
    if name not in config_names() and f"examples/{name}" in config_names():
        name = f"examples/{name}"
    if name not in config_names():
        near = difflib.get_close_matches(name, config_names(), n=1)
        meant = f"Did you mean {near[0]}?" if near else "`pyrl configs` lists them"
        print(f"pyrl configs: {name}: no shipped config. {meant}", file=sys.stderr)
        return 2
    try:
        copied = copy(name, folder)
    except OSError as error:
        print(f"pyrl configs: {error}", file=sys.stderr)
        return 2
    print(*copied, sep="\n")
    there = "" if folder == Path(".") else f"cd {folder} && "
    print(f"\nCheck it: {there}pyrl plan configs/{name}.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
