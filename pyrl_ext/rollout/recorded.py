"""Rollout batches on disk, and the engine that plays them back."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyrl_ext.dist.agree import agree, gather_objects
from pyrl_ext.dist.disk import replacing, write_text
from pyrl_ext.dist.topology import Topology
from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.samples import Prompt, Sample, Sampling

FORMAT = "pyrl_ext rollout 2"
_FORMAT_1 = "pyrl_ext rollout 1"  # read as well; its header has no checksum
_HEADER_CRC = re.compile(rb'("header_crc32":")([0-9a-f]{8})(")')
_RAGGED = ("tokens", "loss_mask", "rollout_logprobs", "route_mask", "routes")
_SCALARS = ("prompt_id", "index", "prompt_len", "weight_version", "finish_reason", "reward")


def save_samples(path: str | Path, samples: Sequence[Sample]) -> None:
    """Write samples to one safetensors file; a reader never sees half of it.

    Every token-wise field is one tensor over the tokens of all samples. The JSON index in the
    file's metadata holds the rest, and a checksum of each sample's bytes. A checksum covers the
    file's header, names and places of tensors included.

    Args:
        path: file to write or to replace
        samples: at least one, all with the same router layers, or all without routes

    Raises:
        ValueError: no sample, an inconsistent one, one with images, or different router layers
        OSError: naming the file, when it cannot be written
    """
    if not samples:
        raise ValueError(f"save_samples({path}): 0 samples, expected at least one")
    layers = samples[0].layer_ids
    for sample in samples:
        sample.check()
        if sample.images:
            raise ValueError(
                f"save_samples({path}): prompt {sample.prompt_id} has images, expected text: "
                "recording images is not built yet. Use rollout.record=null"
            )
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
    metadata = {"format": FORMAT, "index": index, "header_crc32": "0" * 8}
    with replacing(Path(path)) as partial:
        try:
            save_file(tensors, partial, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        _seal_header(partial)


def _seal_header(path: Path) -> None:
    """Write the checksum of the header, taken with zeros in its place, into the header."""
    with path.open("r+b") as file:
        raw = file.read(8)
        raw += file.read(struct.unpack("<Q", raw)[0])
        (place,) = _HEADER_CRC.finditer(raw)  # quotes in the index are escaped: it matches once
        file.seek(place.start(2))
        file.write(b"%08x" % zlib.crc32(raw))


def load_samples(path: str | Path) -> list[Sample]:
    """Read the samples that `save_samples` wrote.

    Raises:
        ValueError: not such a file, cut short, or changed; names the first sample that differs
    """
    path = Path(path)
    index = _read_index(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}, expected a whole safetensors file") from error
    try:
        return _samples(path, index, tensors)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # of the first format
        raise ValueError(
            f"{path}: unreadable header ({error!r}), expected one written by save_samples"
        ) from error


def _samples(path: Path, index: dict[str, Any], tensors: dict[str, Tensor]) -> list[Sample]:
    samples, start = [], 0
    for entry in index["samples"]:
        stop = start + entry["size"]
        part = {name: tensor[start:stop] for name, tensor in tensors.items()}
        if _crc(part) != entry["crc32"]:
            raise ValueError(
                f"{path}: {_sample(entry)} (tokens {start} to {stop - 1} of the file) differs from "
                "its checksum, expected the bytes that were written; the file was changed since"
            )
        fields: dict[str, Any] = {"routes": None, "layer_ids": tuple(index["layer_ids"])}
        fields |= {name: entry[name] for name in _SCALARS}
        fields |= {name: tensor.clone() for name, tensor in part.items()}
        samples.append(Sample(**fields).check())
        start = stop
    return samples


class Recorder:
    """Writes the rollout batches of a run: one file for each step and rank with samples, and
    ``index.json`` with one line for each file, which the main rank writes.

    Args:
        folder: made when the first batch comes
        start: first weight version to come; files from this version on, which a run wrote after
            its last checkpoint, are removed by the main rank
        topo: of this rank

    Raises:
        ValueError: the index is not one
    """

    def __init__(self, folder: str | Path, topo: Topology, start: int = 0):
        self.folder, self.topo = Path(folder), topo
        self.index = self.folder / "index.json"
        self.batches: list[dict[str, Any]] = []
        if not topo.is_main:
            return
        if self.index.exists():
            try:
                batches = json.loads(self.index.read_text())
                self.batches = [entry for entry in batches if entry["version"] < start]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.index}: unreadable ({error!r}), expected a list of recorded batches"
                ) from error
        for file in self.folder.glob("step-*.safetensors"):
            step = re.fullmatch(r"step-([0-9]+)(-rank-[0-9]+)?", file.stem)
            if step and int(step[1]) >= start:
                file.unlink()

    def save(self, version: int, samples: Sequence[Sample]) -> None:
        """Write the scored samples of a step that this rank owns, and then a line in the index.

        Communicates: a line of every rank.
        Raises:
            ValueError, OSError: as `save_samples`; on the other ranks RuntimeError
        """
        entry, error = None, None
        try:
            entry = self._write(version, samples) if samples else None
        except (ValueError, OSError) as caught:  # the others would wait for its line
            error = caught
        agree(f"Recorder.save({self.folder})", error, version, "steps", self.topo.world)
        lines = gather_objects(entry, self.topo.world)
        if self.topo.is_main:
            self.batches += [line for line in lines if line is not None]
            text = ",\n".join(json.dumps(each) for each in self.batches)
            write_text(self.index, f"[\n{text}\n]\n")

    def _write(self, version: int, samples: Sequence[Sample]) -> dict[str, Any]:
        alone = self.topo.world_size == 1
        suffix = "" if alone else f"-rank-{self.topo.rank}"
        file = self.folder / f"step-{version:06d}{suffix}.safetensors"
        save_samples(file, samples)
        return {
            "version": version,
            "file": file.name,
            "samples": len(samples),
            "tokens": sum(s.tokens.numel() for s in samples),
            "bytes": file.stat().st_size,
        }


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
        """Note the version, which selects the samples; the weights are not read."""
        self.version = version

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Nothing: the engine holds no weights."""
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
        """Nothing to free."""
        return 0

    def close(self) -> None:
        """Nothing to close."""

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
    rule = "expected one written by save_samples"
    if not path.is_file():
        raise ValueError(f"{path}: not a file, {rule}")
    held = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(8)
        size = struct.unpack("<Q", raw)[0] if held >= 8 else held
        if size + 8 > held:
            raise ValueError(f"{path}: {held} bytes, no whole header, {rule}; the file is cut")
        raw += file.read(size)
    try:
        header = json.loads(raw[8:])
        metadata = header.pop("__metadata__")
        index = json.loads(metadata["index"])
        good = _header_is_whole(raw, metadata)
        if good:
            _check_length(held - 8 - size, header, index)
    except _Cut as error:
        raise ValueError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: unreadable header ({error!r}), {rule}") from error
    if not good:
        raise ValueError(f"{path}: another format, or a header unlike its checksum, {rule}")
    return index


def _header_is_whole(raw: bytes, metadata: dict[str, Any]) -> bool:
    """Whether the header ``raw``, with its length in front, is of a known format and unchanged."""
    if metadata["format"] == _FORMAT_1:
        return metadata["index_crc32"] == str(zlib.crc32(metadata["index"].encode()))
    places = list(_HEADER_CRC.finditer(raw))
    if metadata["format"] != FORMAT or len(places) != 1:
        return False
    zeroed = _HEADER_CRC.sub(rb"\g<1>00000000\3", raw)
    return places[0][2] == b"%08x" % zlib.crc32(zeroed)


class _Cut(Exception):
    """The file ends before its last tensor does."""


def _check_length(held: int, tensors: dict[str, Any], index: dict[str, Any]) -> None:
    """Raises: _Cut naming the first sample whose bytes are not all there."""
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
            raise _Cut(
                f"{held} of {total} bytes of data, expected all; the file is cut and "
                f"{_sample(entry)} is the first one incomplete"
            )
