"""Rollout batches on disk, and the engine that plays them back."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.samples import Prompt, Sample, Sampling

FORMAT = "pyrl_ext rollout 1"
_RAGGED = ("tokens", "loss_mask", "rollout_logprobs", "route_mask", "routes")
_SCALARS = ("prompt_id", "index", "prompt_len", "weight_version", "finish_reason", "reward")


def save_samples(path: str | Path, samples: Sequence[Sample]) -> None:
    """Writes samples to one safetensors file; a reader never sees half of it.

    Every token-wise field is one tensor over the tokens of all samples; what belongs to a sample
    is in the JSON index of the file's metadata, with a checksum of the sample's own bytes.

    Args:
        path: file to write or to replace
        samples: at least one, all with the same router layers, or all without routes

    Raises:
        ValueError: none, an inconsistent one, or different router layers
    """
    if not samples:
        raise ValueError(f"save_samples({path}): 0 samples, expected at least one")
    layers = samples[0].layer_ids
    for sample in samples:
        sample.check()
        if sample.layer_ids != layers or (sample.routes is None) != (samples[0].routes is None):
            raise ValueError(
                f"save_samples({path}): prompt {sample.prompt_id}, sample {sample.index} has "
                f"routes of layers {sample.layer_ids}, expected {layers} as the first one"
            )
    names = _RAGGED if samples[0].routes is not None else _RAGGED[:-1]
    tensors = {n: torch.cat([getattr(s, n) for s in samples]).contiguous() for n in names}
    entries = [
        {n: getattr(s, n) for n in _SCALARS}
        | {"size": s.tokens.numel(), "crc32": _crc({n: getattr(s, n) for n in names})}
        for s in samples
    ]
    index = json.dumps({"layer_ids": layers, "samples": entries})
    metadata = {"format": FORMAT, "index": index, "index_crc32": str(zlib.crc32(index.encode()))}
    with _replacing(Path(path)) as partial:
        save_file(tensors, partial, metadata=metadata)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` when all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_samples(path: str | Path) -> list[Sample]:
    """Reads the samples `save_samples` wrote.

    Raises:
        ValueError: not such a file, cut short, or changed; names the first sample that is hurt
    """
    path = Path(path)
    index = _read_index(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}, expected a whole safetensors file") from error
    samples, start = [], 0
    for entry in index["samples"]:
        stop = start + entry["size"]
        part = {name: tensor[start:stop] for name, tensor in tensors.items()}
        if _crc(part) != entry["crc32"]:
            raise ValueError(
                f"{path}: {_sample(entry)} (tokens {start} to {stop - 1} of the file) differs from "
                "its checksum, expected the bytes that were written; the file was changed"
            )
        fields: dict[str, Any] = {"routes": None, "layer_ids": tuple(index["layer_ids"])}
        fields |= {name: entry[name] for name in _SCALARS}
        fields |= {name: tensor.clone() for name, tensor in part.items()}
        samples.append(Sample(**fields).check())
        start = stop
    return samples


class Recorder:
    """Writes the rollout batches of a run: a file a step, and ``index.json`` with a line a file.

    Args:
        folder: made when the first batch comes
        start: first weight version to come; files of it and later ones, of a run that went on
            after its last checkpoint, are removed

    Raises:
        ValueError: the index is not one
    """

    def __init__(self, folder: str | Path, start: int = 0):
        self.folder = Path(folder)
        self.index = self.folder / "index.json"
        self.batches: list[dict[str, Any]] = []
        if self.index.exists():
            try:
                held = json.loads(self.index.read_text())
                self.batches = [entry for entry in held if entry["version"] < start]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.index}: unreadable ({error!r}), expected a list of recorded batches"
                ) from error
        for file in self.folder.glob("step-*.safetensors"):
            if int(file.stem.removeprefix("step-")) >= start:
                file.unlink()

    def save(self, version: int, samples: Sequence[Sample]) -> None:
        """Writes the scored samples of a step, and then their line in the index.

        Raises:
            ValueError: as `save_samples`
        """
        file = self.folder / f"step-{version:06d}.safetensors"
        save_samples(file, samples)
        entry = {
            "version": version,
            "file": file.name,
            "samples": len(samples),
            "tokens": sum(s.tokens.numel() for s in samples),
            "bytes": file.stat().st_size,
        }
        self.batches.append(entry)
        with _replacing(self.index) as partial:
            lines = ",\n".join(json.dumps(each) for each in self.batches)
            partial.write_text(f"[\n{lines}\n]\n")


class RecordedEngine(Engine):
    """Plays stored samples back: `stream` yields what was recorded for each prompt.

    A prompt is found by the weight version last given to `load_weights` and by its id, so a
    resumed run, and a run over more ranks, gets the same samples as the first. Weights are not
    used.

    Args:
        path: a file of `save_samples`, or a folder of such files (*.safetensors)

    Raises:
        ValueError: nothing there, or a damaged index
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not files:
            raise ValueError(f"{path}: no *.safetensors in it, expected recorded rollout batches")
        self.files: dict[tuple[int, int], Path] = {}  # (weight version, prompt id) -> file
        self.routes = True
        for file in files:
            index = _read_index(file)
            self.routes &= bool(index["layer_ids"])
            for key in {(e["weight_version"], e["prompt_id"]) for e in index["samples"]}:
                if key in self.files:
                    raise ValueError(
                        f"{file}: prompt {key[1]} of weight version {key[0]} is also in "
                        f"{self.files[key]}, expected each once"
                    )
                self.files[key] = file
        self.version: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Routes if every batch has them; whatever the recording engine sampled."""
        return Capabilities(routes=self.routes, weights=False)

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Notes the version, which selects the samples; the weights are not read."""
        self.version = version

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """None: no weights are taken."""
        return {}

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        """The recorded samples of these prompts, in their order.

        Raises:
            RuntimeError: no version was given
            ValueError: a prompt was not recorded, or its tokens or group size differ
        """
        if self.version is None:
            raise RuntimeError(
                "RecordedEngine.stream: no weight version, expected load_weights first"
            )
        keys = [(self.version, p.id) for p in prompts]
        if missing := [prompt for _, prompt in (k for k in keys if k not in self.files)]:
            known = sorted({version for version, _ in self.files})
            raise ValueError(
                f"{self.path}: no samples of weight version {self.version} for prompts "
                f"{_short(missing)}, expected some; recorded versions are {_short(known)}"
            )
        groups: dict[int, list[Sample]] = {p.id: [] for p in prompts}
        for file in dict.fromkeys(self.files[key] for key in keys):
            for sample in load_samples(file):
                if sample.weight_version == self.version and sample.prompt_id in groups:
                    groups[sample.prompt_id].append(sample)
        for prompt in prompts:
            self._check(groups[prompt.id], prompt, sampling.samples_per_prompt)
        for prompt in prompts:
            yield from groups[prompt.id]

    def sleep(self) -> int:
        """There is nothing to give back."""
        return 0

    def close(self) -> None:
        """Everything was read at the start."""

    def _check(self, group: list[Sample], prompt: Prompt, size: int) -> None:
        if [s.index for s in group] != list(range(size)):
            raise ValueError(
                f"{self.path}: prompt {prompt.id} has samples {_short([s.index for s in group])}, "
                f"expected 0 to {size - 1} (samples_per_prompt {size})"
            )
        for sample in group:
            known = tuple(sample.tokens[: sample.prompt_len].tolist())
            if known != prompt.tokens:
                raise ValueError(
                    f"{self.path}: prompt {prompt.id}, sample {sample.index} was recorded for the "
                    f"tokens {_short(known)}, expected {_short(prompt.tokens)}"
                )


def _short(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, ... ({len(values)} in all)" if len(values) > 8 else shown


def _sample(entry: dict[str, Any]) -> str:
    return f"prompt {entry['prompt_id']}, sample {entry['index']}"


def _crc(fields: dict[str, Tensor]) -> int:
    total = 0
    for name in sorted(fields):
        total = zlib.crc32(fields[name].contiguous().view(torch.uint8).numpy().tobytes(), total)
    return total


def _read_index(path: Path) -> dict[str, Any]:
    """The JSON index of a file, from its header alone, after a check of the file's length."""
    if not path.is_file():
        raise ValueError(f"{path}: not a file, expected one written by save_samples")
    rule = "expected one written by save_samples"
    held = path.stat().st_size
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0] if held >= 8 else held
        if size + 8 > held:
            raise ValueError(f"{path}: {held} bytes, no whole header, {rule}; the file is cut")
        raw = file.read(size)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        text = metadata["index"]
        good = metadata["format"] == FORMAT
        good = good and metadata["index_crc32"] == str(zlib.crc32(text.encode()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: unreadable header ({error!r}), {rule}") from error
    if not good:
        raise ValueError(f"{path}: another format, or an index unlike its checksum, {rule}")
    index = json.loads(text)
    _check_length(path, held - 8 - size, header, index)
    return index


def _check_length(path: Path, held: int, tensors: dict[str, Any], index: dict[str, Any]) -> None:
    """Names the first sample whose bytes are not all there."""
    rows = sum(entry["size"] for entry in index["samples"])
    cut = rows
    for info in tensors.values():
        begin, end = info["data_offsets"]
        if end > held and end > begin:
            cut = min(cut, max(held - begin, 0) * rows // (end - begin))
    for entry in index["samples"]:
        cut -= entry["size"]
        if cut < 0:
            total = max(info["data_offsets"][1] for info in tensors.values())
            raise ValueError(
                f"{path}: {held} of {total} bytes of data, expected all; the file is cut and "
                f"{_sample(entry)} is the first one incomplete"
            )
