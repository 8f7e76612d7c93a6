"""Refuse a checkpoint of torch's distributed format that would run code when it is read.

torch unpickles ``.metadata``, and objects that are no tensors, without a limit on what they may
call. So both are read here before, with a reader that knows the few classes of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# whose data classes and enumerations a checkpoint's metadata is made of
MODULES = (
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "megatron.core.dist_checkpointing.strategies.torch",
)
OTHERS = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class RunsCode(ValueError):
    """A file names something that no checkpoint holds."""


class _Reader(pickle.Unpickler):
    """Unpickles metadata, of known classes alone."""

    def find_class(self, module: str, name: str, /) -> Any:
        """See `pickle.Unpickler`: asked for everything that the file names."""
        if (module, name) in OTHERS:
            return super().find_class(module, name)
        found = None
        if module == "torch" and "." not in name:
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
        elif module in MODULES and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and found.__module__ == module and _is_plain(found):
                return found
        raise RunsCode(f"it names {module}.{name}, which reading it would call")


def _is_plain(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)


def find_code(folder: Path) -> str | None:
    """The first file of a checkpoint that would run code, or that is no part of one, and why.

    Reads the metadata, and of the other files the objects that are no tensors: a few kB.
    """
    for path in sorted(folder.glob("*.metadata")):
        try:
            metadata = _Reader(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise RunsCode(f"it holds a {type(metadata).__name__}")
            _check_objects(folder, metadata)
        except Exception as error:  # whatever a damaged pickle raises
            return (
                f"{path}: {error}, expected the metadata that megatron wrote. Do not use a "
                "checkpoint that somebody may have changed"
            )
    return None


def _check_objects(folder: Path, metadata: Metadata) -> None:
    """Read what torch would unpickle, as torch reads weights: without calling anything."""
    kinds = metadata.state_dict_metadata
    places: dict[Any, Any] = metadata.storage_data or {}
    for index, place in places.items():
        name = place.relative_path
        if not isinstance(name, str) or Path(name).name != name:
            raise RunsCode(f"{index.fqn} is in {name!r}, outside of the checkpoint")
        if isinstance(kinds.get(index.fqn), TensorStorageMetadata):
            continue  # torch reads tensors in the same way
        with (folder / name).open("rb") as file:
            file.seek(place.offset)
            held = file.read(place.length)
        try:
            torch.load(io.BytesIO(held), map_location="meta", weights_only=True)
        except pickle.UnpicklingError as error:
            raise RunsCode(f"{index.fqn} in {name} is no plain object ({error})") from None
