"""Rollout batches on disk, and the engine that replays them.

A batch is one safetensors file. Token-wise fields are tensors over the tokens of all samples; the
JSON index in the file's metadata holds the other fields of each sample.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.atomic_write import replacing
from pyrl_ext.parallel.collective_errors import agreeing
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.samples import Image, Prompt, Sample, Sampling

FORMAT = "pyrl_ext rollout"
TENSORS = ("tokens", "loss_mask", "rollout_logprobs", "route_mask", "routes", "kept_counts")
SCORES = "scores"
EVALUATIONS = "eval"
_NO_STEP = 2**62  # after all steps
_KEPT = "kept_ids"  # a tensor over the kept tokens
_OTHER = [f.name for f in fields(Sample) if f.name not in (*TENSORS, _KEPT, "images")]

Scores = dict[tuple[int, int, int], tuple[Tensor, Tensor]]
"""(prompt id, index, first turn) of a sample -> its tokens [n] int32, and their log-probs [n]."""


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
        _save(tensors, partial, {"format": FORMAT, "index": json.dumps(index)})


def _kind(sample: Sample) -> tuple[tuple[int, ...], list[str]]:
    names = [name for name in (*TENSORS, _KEPT) if getattr(sample, name) is not None]
    return sample.layer_ids, names


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
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


def save_scores(
    folder: Path, step: int, rank: int, index: BatchIndex, shard: BatchShard, logprobs: Tensor
) -> None:
    """Write the trainer's log-probs [N] float32 [nats] of the rows that this rank computed, before
    the update; of tensor-parallel ranks, which have the same, the first one writes.

    Raises: OSError naming the file, when it cannot be written.
    """
    if not logprobs.numel() or shard.role.tp_rank:
        return
    rows = shard.rows.tokens
    own, samples = np.unique(shard.lengths.sample_of(rows), return_inverse=True)
    tokens = rows - shard.lengths.starts[own][samples] + 1  # a row scores the token after it
    ids = np.stack([index.groups[own], index.places[own], index.turns[own]], 1)
    tensors = {
        "ids": torch.tensor(ids, dtype=torch.int64),
        "samples": torch.tensor(samples, dtype=torch.int32),
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "logprobs": logprobs,
    }
    with replacing(folder / SCORES / f"step-{step:06d}-rank-{rank}.safetensors") as partial:
        _save(tensors, partial)


def load_scores(folder: Path, step: int) -> Scores:
    """The log-probs of a step from all ranks; empty if they were not recorded.

    Raises: ValueError naming a damaged file.
    """
    scores: Scores = {}
    for file in sorted((folder / SCORES).glob(f"step-{step:06d}-rank-*.safetensors")):
        try:
            _add_scores(scores, load_file(file))
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error!r}, expected a file of save_scores") from error
    return scores


def _add_scores(scores: Scores, rank_scores: dict[str, Tensor]) -> None:
    for row, ids in enumerate(rank_scores["ids"].tolist()):
        prompt_id, index, turn = ids
        chosen = rank_scores["samples"] == row
        tokens = rank_scores["tokens"][chosen]
        logprobs = rank_scores["logprobs"][chosen]
        key = (prompt_id, index, turn)
        if key in scores:  # context-parallel ranks share a sample
            tokens = torch.cat([scores[key][0], tokens])
            logprobs = torch.cat([scores[key][1], logprobs])
        scores[key] = (tokens, logprobs)


def step_of(file: Path) -> int | None:
    """The step in the name of a file that a `Recorder` wrote; None: another file."""
    name = re.fullmatch(r"step-([0-9]+)(-rank-[0-9]+)?", file.stem)
    return int(name[1]) if name else None


class Recorder:
    """Writes the rollout batches of a run: one file for each step and rank with samples.

    Args:
        folder: made when the first batch comes
        start: next step; the main rank removes files from this step on, which a run wrote after its
            last checkpoint
        topo: of this rank
    """

    def __init__(self, folder: str | Path, topo: Topology, start: int = 0):
        self.folder = Path(folder)
        self.topo = topo
        for file in self.folder.glob("**/step-*.safetensors") if topo.is_main else ():
            step = step_of(file)
            if step is not None and step >= start:
                file.unlink()

    def of_set(self, name: str) -> Recorder:
        """The recorder of evaluations on the set ``name``, in a folder below."""
        return Recorder(self.folder / EVALUATIONS / name, self.topo, _NO_STEP)

    def save(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the scored samples of a step that this rank owns.

        Communicates: a line of every rank.
        Raises:
            ValueError, OSError: as `save_samples`; on the other ranks RuntimeError
        """
        suffix = "" if self.topo.world_size == 1 else f"-rank-{self.topo.rank}"
        with agreeing(f"Recorder.save({self.folder})", "steps", self.topo.world) as doing:
            doing.append(step)
            if samples:
                path = self.folder / f"step-{step:06d}{suffix}.safetensors"
                save_samples(path, samples, step)


class RecordedEngine(Engine):
    """Replays stored samples: `stream` yields the recorded samples of each prompt.

    The step (`Sampling.step`; None: the weight version last given to `load_weights`) and the prompt
    id select samples, so a resumed run, and a run over more ranks, gets the same samples as the
    first. Weights are not used.

    Args:
        path: a file of `save_samples`, or a folder of such files (*.safetensors)
        whole: every group has all its samples, one a trajectory; else several turns were recorded,
            and dropped trajectories are missing

    Raises:
        ValueError: no batch, a damaged file, or a prompt that was recorded twice
    """

    def __init__(self, path: str | Path, whole: bool = True):
        self.path = Path(path)
        self.whole = whole
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not files:
            raise ValueError(f"{path}: no *.safetensors in it, expected recorded rollout batches")
        self.files: dict[tuple[int, int], Path] = {}  # (step, prompt id) -> file
        self.routes = self.sampling_mask = True
        for file in files:
            index = read_index(file)
            self.routes &= bool(index["layer_ids"])
            self.sampling_mask &= all(entry["kept"] for entry in index["samples"])
            for prompt in {entry["prompt_id"] for entry in index["samples"]}:
                key = (index["step"], prompt)
                if key in self.files:
                    raise ValueError(
                        f"{file}: prompt {key[1]} of step {key[0]} is also in {self.files[key]}, "
                        "expected each once"
                    )
                self.files[key] = file
        self.version: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Routes and kept sets if every batch has them."""
        return Capabilities(
            self.routes,
            weights=False,
            images=True,
            sampling_mask=self.sampling_mask,
            concurrent=True,
        )

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
            RuntimeError: no step and no version was given
            ValueError: a prompt was not recorded, or its tokens or group size differ
        """
        step = self.version if sampling.step is None else sampling.step
        if step is None:
            raise RuntimeError(
                "RecordedEngine.stream: no weight version, expected load_weights first"
            )
        missing = [p.id for p in prompts if (step, p.id) not in self.files]
        # of several turns, all trajectories of some prompts may be missing
        if missing and (self.whole or len(missing) == len(prompts)):
            raise ValueError(
                f"{self.path}: no samples of step {step} for prompts {missing[:8]}, expected some; "
                f"recorded steps are {sorted({key[0] for key in self.files})}"
            )
        groups: dict[int, list[Sample]] = {p.id: [] for p in prompts}
        files = dict.fromkeys(self.files[step, p.id] for p in prompts if p.id not in missing)
        for file in files:
            for sample in load_samples(file):
                if sample.prompt_id in groups:
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
        indices = [sample.index for sample in group]
        if self.whole and indices != list(range(size)):
            raise ValueError(
                f"{self.path}: prompt {prompt.id} has samples {indices}, expected 0 to {size - 1} "
                f"(samples_per_prompt {size})"
            )
        images = [(image.row, image.rows) for image in prompt.images]
        for sample in group:
            tokens = sample.tokens[: sample.prompt_len].tolist()
            # an environment may add tokens to the prompt or rewrite it
            if self.whole and tokens != list(prompt.tokens):
                raise ValueError(
                    f"{self.path}: prompt {prompt.id}, sample {sample.index} was recorded for the "
                    f"tokens {tokens[:8]}, expected {list(prompt.tokens[:8])}"
                )
            recorded = [(image.row, image.rows) for image in sample.images]
            if recorded != images:
                raise ValueError(
                    f"{self.path}: prompt {prompt.id}, sample {sample.index} was recorded with "
                    f"images at (row, rows) {recorded}, expected {images}"
                )
