"""Paths in a config: relative ones start at the folder of the YAML file that says them."""

from __future__ import annotations

import difflib
import errno
import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def path_beside(file: str, path: str) -> str:
    """`path`, as the YAML `file` says it, as an absolute path."""
    return os.path.abspath(Path(os.path.abspath(file)).parent / path)


def relative(path: str) -> str:
    """`path` as seen from the working directory, if it is below it."""
    shown = os.path.relpath(path)
    return path if shown.startswith("..") else shown


DATA_FILES = (".jsonl", ".parquet")  # suffixes of files of records
_FILES = (*DATA_FILES, ".json", ".gguf", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst")


def is_hub_id(file: str, name: str) -> bool:
    """True if `name` is owner/name of a model or dataset hub: no such folder is next to the YAML
    file."""
    if name.lower().endswith(_FILES) or not _HUB_ID.fullmatch(name):
        return False
    return not os.path.exists(path_beside(file, name))


def similar(path: str) -> str:
    """`. Did you mean X?`, where there is no `path` but a name like it; else an empty text."""
    folder, name = os.path.split(path)
    try:
        there = [] if os.path.lexists(path) else os.listdir(folder or ".")
    except OSError:
        return ""
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.85)
    return f". Did you mean {relative(os.path.join(folder, near[0]))}?" if near else ""


def refuse_pipe(path: str) -> None:
    """Raise `OSError` where `path` is a pipe or a device: reading it might wait, or never end."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OSError(errno.EINVAL, "Not a regular file")
