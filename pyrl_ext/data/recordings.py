"""Recorded samples on disk: the batches of ``rollout.record``, and their samples as records.

A batch is one safetensors file. Token-wise fields are tensors over the tokens of all samples; the
JSON index in the file's metadata holds the other fields of each sample.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyrl_ext.data.files import Broken, DataError
from pyrl_ext.parallel.atomic_write import replacing
from pyrl_ext.samples import Image, Sample

FORMAT = "pyrl_ext rollout"
TENSORS = ("tokens", "loss_mask", "rollout_logprobs", "route_mask", "routes", "kept_counts")
_KEPT = "kept_ids"  # a tensor over the kept tokens
_OTHER = [f.name for f in fields(Sample) if f.name not in (*TENSORS, _KEPT, "images")]


def save_samples(path: str | Path, samples: Sequence[Sample], step: int | None = None) -> None:
    """Write samples to one safetensors file; a reader never sees half of it.

    Args:
        path: file to write or to replace
        samples: at least one, all with the same router layers, kept sets and patch sizes
        step: that trains on them; None: the first one's weight version

    Raises:
        ValueError: no sample, an inconsistent one, or samples with different kinds of fields
        OSError: naming the file, when it cannot be written
    """
    if not samples:
        raise ValueError(f"save_samples({path}): 0 samples, expected at least one")
    kinds = [_kind(sample.check()) for sample in samples]
    for sample, kind in zip(samples, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"save_samples({path}): prompt {sample.prompt_id}, sample {sample.index} has "
                f"(layers, tensors) {kind}, expected {kinds[0]} as the first one"
            )
    layer_ids, names = kinds[0]
    tensors = {name: torch.cat([getattr(s, name) for s in samples]) for name in names}
    pictures: dict[tuple[Any, bytes], int] = {}  # each distinct picture is stored once
    patches: list[Tensor] = []
    entries: list[dict[str, Any]] = []
    for sample in samples:
        entry = {name: getattr(sample, name) for name in _OTHER}
        entry["size"] = sample.tokens.numel()
        entry["kept"] = 0 if sample.kept_ids is None else len(sample.kept_ids)
        entry["images"] = []
        for image in sample.images:
            digest = hashlib.sha256(image.patches.contiguous().numpy()).digest()
            number = pictures.setdefault((image.grid, digest), len(pictures))
            if number == len(patches):
                patches.append(image.patches)
            entry["images"].append([number, image.row, image.rows])
        entries.append(entry)
    if patches:
        tensors["patches"] = torch.cat(patches)
    index = {
        "step": samples[0].weight_version if step is None else step,
        "layer_ids": layer_ids,
        "samples": entries,
        "grids": [grid for grid, _ in pictures],
    }
    with replacing(Path(path)) as partial:
        save_tensors(tensors, partial, {"format": FORMAT, "index": json.dumps(index)})


def _kind(sample: Sample) -> tuple[tuple[int, ...], list[str]]:
    names = [name for name in (*TENSORS, _KEPT) if getattr(sample, name) is not None]
    return sample.layer_ids, names


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises: OSError."""
    try:
        save_file({n: tensor.contiguous() for n, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def load_samples(path: str | Path, rows: Collection[int] | None = None) -> list[Sample]:
    """Read the samples that `save_samples` wrote.

    Args:
        path: the file
        rows: numbers of the samples to read, in order; of the others only the index is read.
            None: all

    Raises: ValueError for another file, a cut one, or inconsistent samples.
    """
    index = read_index(Path(path))
    entries: list[dict[str, Any]] = index["samples"]
    ends = np.cumsum([entry.pop("size") for entry in entries]).tolist()
    kept_ends = np.cumsum([entry.pop("kept") for entry in entries]).tolist()
    grids = [tuple(grid) for grid in index["grids"]]
    patch_ends = np.cumsum([int(np.prod(grid)) for grid in grids]).tolist()
    pictures: dict[int, Tensor] = {}  # samples of a group share them
    samples: list[Sample] = []
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        for row in range(len(entries)) if rows is None else rows:
            entry = entries[row]
            images: list[Image] = []
            for number, first, count in entry["images"]:
                if number not in pictures:
                    pictures[number] = _part(slices["patches"], patch_ends, number)
                images.append(Image(first, count, grids[number], pictures[number]))
            entry["images"] = tuple(images)
            entry["layer_ids"] = tuple(index["layer_ids"])
            entry["spans"] = tuple(map(tuple, entry["spans"]))
            entry["version_spans"] = tuple(map(tuple, entry["version_spans"]))
            for name in TENSORS:
                entry[name] = _part(slices[name], ends, row) if name in slices else None
            entry[_KEPT] = _part(slices[_KEPT], kept_ends, row) if _KEPT in slices else None
            samples.append(Sample(**entry).check())
    return samples


def _part(values: Any, ends: Sequence[int], number: int) -> Tensor:
    """One of the consecutive parts of a tensor in a file, which end at ``ends``."""
    return values[ends[number - 1] if number else 0 : ends[number]]


def read_index(path: Path) -> dict[str, Any]:
    """The JSON index of a file, from its header alone.

    Raises: ValueError for another file or a cut one.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") == FORMAT:
            return json.loads(metadata["index"])
        problem = f"format {metadata.get('format')!r}"
    except (OSError, SafetensorError) as error:
        problem = str(error)
    raise ValueError(f"{path}: {problem}, expected a whole file of save_samples ({FORMAT!r})")


def step_of(file: Path) -> int | None:
    """The step in the name of a file that a `Recorder` wrote; None: another file."""
    name = re.fullmatch(r"step-([0-9]+)(-rank-[0-9]+)?", file.stem)
    return int(name[1]) if name else None


class RecordedSamples:
    """The samples in a folder of batches as records of ``tokens`` and ``loss_mask``, in the order
    of the files' names; memory holds 8 bytes a sample.

    Raises: DataError: no batch, or a damaged one.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files = sorted(path.glob("*.safetensors"))
        if not self._files:
            raise DataError(
                f"{path}: no *.safetensors in it, expected the folder of rollout.record"
            )
        self._ends: list[np.ndarray] = []  # of the tokens of each sample of a file
        self._has_images: list[bool] = []
        for file in self._files:
            try:
                index = read_index(file)
            except ValueError as error:
                raise DataError(str(error)) from None
            sizes = [entry["size"] for entry in index["samples"]]
            self._ends.append(np.cumsum(sizes))
            self._has_images.append(bool(index["grids"]))
        self._starts = [0, *accumulate(len(ends) for ends in self._ends)]

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, number: int) -> str:
        """See `Records.where`."""
        file, row = self._place(number)
        return f"{self._files[file]}: sample {row}"

    def read(self, number: int) -> Any:
        """See `Records.read`."""
        file, row = self._place(number)
        if self._has_images[file]:
            raise Broken("a recording with images", "one of texts; write messages with images")
        ends = self._ends[file].tolist()
        with safe_open(self._files[file], framework="pt") as opened:
            names = ("tokens", "loss_mask")
            parts = {name: _part(opened.get_slice(name), ends, row) for name in names}
        return {name: part.tolist() for name, part in parts.items()}

    def _place(self, number: int) -> tuple[int, int]:
        """The file that holds a sample, and the sample's number in it."""
        file = bisect_right(self._starts, number) - 1
        return file, number - self._starts[file]
