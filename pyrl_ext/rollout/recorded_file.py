"""The file of a rollout batch: samples in one safetensors file, with checksums."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyrl_ext.parallel.atomic_write import replacing
from pyrl_ext.samples import Image, Sample

FORMAT = "pyrl_ext rollout 2"
_WITH_IMAGES = "pyrl_ext rollout 3"  # the same, and images next to the samples
_WITH_KEPT = "pyrl_ext rollout 4"  # with images or not, and the sets that top-p and top-k kept
_WITH_VERSIONS = "pyrl_ext rollout 5"  # the same, of weights older than the step's
_FORMATS = (FORMAT, _WITH_IMAGES, _WITH_KEPT, _WITH_VERSIONS)
_FORMAT_1 = "pyrl_ext rollout 1"  # read as well; its header has no checksum
_HEADER_CRC = re.compile(rb'("header_crc32":")([0-9a-f]{8})(")')
_RAGGED = ("tokens", "loss_mask", "rollout_logprobs", "route_mask", "routes", "kept_counts")
_TURNS = ("turn", "spans", "last")  # of samples that hold several turns, or not all of them
_SCALARS = ("prompt_id", "index", "prompt_len", "weight_version", "finish_reason", "reward")


def save_samples(path: str | Path, samples: Sequence[Sample], step: int | None = None) -> None:
    """Write samples to one safetensors file; a reader never sees half of it.

    Every token-wise field is one tensor over the tokens of all samples. Patches of images are one
    tensor in 8 bits, in which every picture is once, however many samples show it. The JSON index
    in the file's metadata holds the rest, and a checksum of each sample's and each picture's bytes.
    A checksum covers the file's header, names and places of tensors included.

    Args:
        path: file to write or to replace
        samples: at least one, all with the same router layers, or all without routes; patches of
            all images with as many numbers
        step: that trains on them; None: the one whose number is their weight version

    Raises:
        ValueError: no sample, an inconsistent one, different router layers or sizes of patches, or
            kept sets in some samples only
        OSError: naming the file, when it cannot be written
    """
    first = _checked(path, samples)
    names = [n for n in (*_RAGGED, "kept_ids") if getattr(first, n) is not None]
    tensors = {n: torch.cat([getattr(s, n) for s in samples]).contiguous() for n in names}
    entries = [
        {n: getattr(s, n) for n in (*_SCALARS, *(_TURNS if s.spans else ()))}
        | {"size": s.tokens.numel(), "crc32": _crc({n: getattr(s, n) for n in names})}
        | ({} if s.kept_ids is None else {"kept": len(s.kept_ids)})
        for s in samples
    ]
    for sample, entry in zip(samples, entries, strict=True):
        if sample.components:
            entry["components"] = dict(sample.components)
        if sample.version_spans or sample.masked:
            entry |= {"version_spans": sample.version_spans, "masked": sample.masked}
    index: dict[str, Any] = {"layer_ids": first.layer_ids, "samples": entries}
    if pictures := _add_images(path, samples, entries):
        index["pictures"] = [
            {"grid": each.grid, "crc32": _crc({"patches": each.patches})} for each in pictures
        ]
        tensors["patches"] = torch.cat([each.patches for each in pictures])
    form = _WITH_IMAGES if pictures else FORMAT
    form = form if first.kept_ids is None else _WITH_KEPT
    older = (s.version_spans or s.masked or step not in (None, s.weight_version) for s in samples)
    if any(older):
        form, index["step"] = _WITH_VERSIONS, step
    metadata = {"format": form, "index": json.dumps(index), "header_crc32": "0" * 8}
    with replacing(Path(path)) as partial:
        try:
            save_file(tensors, partial, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        _seal_header(partial)


def _checked(path: str | Path, samples: Sequence[Sample]) -> Sample:
    """The first sample, which the others may share a file with."""
    if not samples:
        raise ValueError(f"save_samples({path}): 0 samples, expected at least one")
    first = samples[0]
    layers = samples[0].layer_ids
    for sample in samples:
        sample.check()
        if sample.layer_ids != layers or (sample.routes is None) != (first.routes is None):
            raise ValueError(
                f"save_samples({path}): prompt {sample.prompt_id}, sample {sample.index} has "
                f"routes of layers {sample.layer_ids}, expected {layers} as the first one"
            )
        if (sample.kept_ids is None) != (first.kept_ids is None):
            raise ValueError(
                f"save_samples({path}): prompt {sample.prompt_id}, sample {sample.index} differs "
                "from the first one in having kept sets, expected them in all samples or in none"
            )
    return first


def _add_images(
    path: str | Path, samples: Sequence[Sample], entries: list[dict[str, Any]]
) -> list[Image]:
    """Distinct pictures of the samples; each entry takes [picture, row, rows] of its images."""
    pictures: list[Image] = []
    numbers: dict[tuple[object, bytes], int] = {}
    for sample, entry in zip(samples, entries, strict=True):
        for image in sample.images:
            width = pictures[0].patches.shape[1:] if pictures else image.patches.shape[1:]
            if image.patches.shape[1:] != width or image.patches.dtype != torch.uint8:
                raise ValueError(
                    f"save_samples({path}): {_sample(entry)} has patches "
                    f"{list(image.patches.shape)} {image.patches.dtype}, expected "
                    f"[patches, {', '.join(map(str, width))}] {torch.uint8} as the first image"
                )
            key = image.grid, hashlib.sha256(image.patches.contiguous().numpy()).digest()
            if key not in numbers:
                numbers[key] = len(pictures)
                pictures.append(image)
            shown = [numbers[key], image.row, image.rows]
            entry.setdefault("images", []).append(shown)
    return pictures


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
    index = read_index(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys()) - {"patches"}
            tensors = {name: file.get_tensor(name) for name in names}
            images = [] if "pictures" not in index else _pictures(file.get_slice("patches"), index)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}, expected a whole safetensors file") from error
    try:
        return _samples(path, index, tensors, images)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # of the first format
        raise ValueError(
            f"{path}: unreadable header ({error!r}), expected one written by save_samples"
        ) from error


def _pictures(patches: Any, index: dict[str, Any]) -> list[Tensor]:
    """The patches of each picture, read one by one; samples share their memory."""
    sizes = [math.prod(each["grid"]) for each in index["pictures"]]
    ends = [*itertools.accumulate(sizes)]
    return [patches[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _samples(
    path: Path, index: dict[str, Any], tensors: dict[str, Tensor], pictures: list[Tensor]
) -> list[Sample]:
    samples = []
    start = 0
    kept = 0
    sound = [_crc({"patches": p}) == index["pictures"][n]["crc32"] for n, p in enumerate(pictures)]
    for entry in index["samples"]:
        stop = start + entry["size"]
        part = {name: tensor[start:stop] for name, tensor in tensors.items()}
        if "kept_ids" in tensors:
            part["kept_ids"] = tensors["kept_ids"][kept : kept + entry["kept"]]
            kept += entry["kept"]
        if _crc(part) != entry["crc32"]:
            raise ValueError(
                f"{path}: {_sample(entry)} (tokens {start} to {stop - 1} of the file) differs from "
                "its checksum, expected the bytes that were written; the file was changed since"
            )
        images = []
        for number, (picture, row, rows) in enumerate(entry.get("images", ())):
            if not sound[picture]:
                raise ValueError(
                    f"{path}: image {number} of {_sample(entry)} differs from its checksum, "
                    "expected the bytes that were written; the file was changed since"
                )
            grid = tuple(index["pictures"][picture]["grid"])
            images.append(Image(row, rows, grid, pictures[picture]))
        fields: dict[str, Any] = {
            "routes": None,
            "images": tuple(images),
            "components": entry.get("components", {}),
            "layer_ids": tuple(index["layer_ids"]),
            "version_spans": tuple(tuple(span) for span in entry.get("version_spans", ())),
        }
        fields |= {name: entry[name] for name in (*_SCALARS, *({"masked"} & entry.keys()))}
        if "spans" in entry:
            fields |= {name: entry[name] for name in _TURNS}
            fields["spans"] = tuple((begin, end) for begin, end in entry["spans"])
        fields |= {name: tensor.clone() for name, tensor in part.items()}
        samples.append(Sample(**fields).check())
        start = stop
    return samples


def _sample(entry: dict[str, Any]) -> str:
    return f"prompt {entry['prompt_id']}, sample {entry['index']}"


def _crc(fields: dict[str, Tensor]) -> int:
    total = 0
    for name in sorted(fields):
        total = zlib.crc32(fields[name].contiguous().view(torch.uint8).numpy().tobytes(), total)
    return total


def read_index(path: Path) -> dict[str, Any]:
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
    """True if the header ``raw``, with its length in front, is of a known format and unchanged."""
    if metadata["format"] == _FORMAT_1:
        return metadata["index_crc32"] == str(zlib.crc32(metadata["index"].encode()))
    places = list(_HEADER_CRC.finditer(raw))
    if metadata["format"] not in _FORMATS or len(places) != 1:
        return False
    zeroed = _HEADER_CRC.sub(rb"\g<1>00000000\3", raw)
    return places[0][2] == b"%08x" % zlib.crc32(zeroed)


class _Cut(Exception):
    """The file ends before its last tensor does."""


def _rows_with_patches(index: dict[str, Any], patches: int) -> int:
    """Tokens of the samples before the first one that shows more than so many patches."""
    ends = [*itertools.accumulate(math.prod(each["grid"]) for each in index["pictures"])]
    rows = 0
    for entry in index["samples"]:
        if any(ends[picture] > patches for picture, *_ in entry.get("images", ())):
            break
        rows += entry["size"]
    return rows


def _rows_with_ids(index: dict[str, Any], ids: int) -> int:
    """Tokens of the samples before the first one that ends behind so many kept ids."""
    ends = itertools.accumulate(entry["kept"] for entry in index["samples"])
    return sum(e["size"] for e, end in zip(index["samples"], ends, strict=True) if end <= ids)


def _check_length(held: int, tensors: dict[str, Any], index: dict[str, Any]) -> None:
    """Raises: _Cut naming the first sample whose bytes are not all there."""
    rows = sum(entry["size"] for entry in index["samples"])
    cut = rows
    for name, info in tensors.items():
        begin, end = info["data_offsets"]
        if end > held and end > begin:
            total = info["shape"][0]
            whole = max(held - begin, 0) * total // (end - begin)
            before = {"patches": _rows_with_patches, "kept_ids": _rows_with_ids}
            cut = min(cut, before[name](index, whole) if name in before else whole)
    for entry in index["samples"]:
        cut -= entry["size"]
        if cut < 0:
            total = max(info["data_offsets"][1] for info in tensors.values())
            raise _Cut(
                f"{held} of {total} bytes of data, expected all; the file is cut and "
                f"{_sample(entry)} is the first one incomplete"
            )
