"""Rollout batches on disk, and the engine that plays them back."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pyrl_ext.parallel.atomic_write import write_text
from pyrl_ext.parallel.collective_errors import agree, gather_objects
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.rollout.recorded_file import load_samples, read_index, save_samples
from pyrl_ext.samples import Prompt, Sample, Sampling


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
        self.folder = Path(folder)
        self.topo = topo
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
        for file in self.folder.glob("**/step-*.safetensors"):  # of the trainer's scores, too
            step = re.fullmatch(r"step-([0-9]+)(-rank-[0-9]+)?", file.stem)
            if step and int(step[1]) >= start:
                file.unlink()

    def save(self, version: int, samples: Sequence[Sample]) -> None:
        """Write the scored samples of a step that this rank owns, and then a line in the index.

        Communicates: a line of every rank.
        Raises:
            ValueError, OSError: as `save_samples`; on the other ranks RuntimeError
        """
        entry = None
        error = None
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
        save_samples(file, samples, version)
        return {
            "version": version,
            "file": file.name,
            "samples": len(samples),
            "tokens": sum(s.tokens.numel() for s in samples),
            "bytes": file.stat().st_size,
        }


class RecordedEngine(Engine):
    """Plays stored samples back: `stream` yields what was recorded for each prompt.

    A prompt is found by the step (`Sampling.step`; None: the weight version last given to
    `load_weights`) and by its id, so a resumed run, and a run over more ranks, gets the same
    samples as the first. Weights are not used.

    Args:
        path: a file of `save_samples`, or a folder of such files (*.safetensors)
        whole: every group has all its samples, one a trajectory; else several turns were recorded,
            and trajectories that were dropped are missing

    Raises:
        ValueError: nothing there, or a damaged index
    """

    def __init__(self, path: str | Path, whole: bool = True):
        self.path = Path(path)
        self.whole = whole
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        if not files:
            raise ValueError(f"{path}: no *.safetensors in it, expected recorded rollout batches")
        self.files: dict[tuple[int, int], Path] = {}  # (step, prompt id) -> file
        self.routes = self.sampling_mask = True
        self.steps: dict[Path, int | None] = {}  # None: each sample is of its version's
        for file in files:
            index = read_index(file)
            step = self.steps[file] = index.get("step")
            self.routes &= bool(index["layer_ids"])
            self.sampling_mask &= all("kept" in entry for entry in index["samples"])
            entries = index["samples"]
            steps = (e["weight_version"] if step is None else step for e in entries)
            for key in {*zip(steps, (e["prompt_id"] for e in entries), strict=True)}:
                if key in self.files:
                    raise ValueError(
                        f"{file}: prompt {key[1]} of step {key[0]} is also in {self.files[key]}, "
                        "expected each once"
                    )
                self.files[key] = file
        self.version: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Routes if every batch has them; whatever the recording engine sampled."""
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
        if (step := self.version if sampling.step is None else sampling.step) is None:
            raise RuntimeError(
                "RecordedEngine.stream: no weight version, expected load_weights first"
            )
        keys = [(step, p.id) for p in prompts]
        if not self.whole:  # all trajectories of a prompt may be missing, but not of all prompts
            keys = [key for key in keys if key in self.files] or keys
        if missing := [prompt for _, prompt in (k for k in keys if k not in self.files)]:
            known = sorted({each for each, _ in self.files})
            raise ValueError(
                f"{self.path}: no samples of step {step} for prompts {_short(missing)}, expected "
                f"some; recorded steps are {_short(known)}"
            )
        groups: dict[int, list[Sample]] = {p.id: [] for p in prompts}
        for file in dict.fromkeys(self.files[key] for key in keys):
            for sample in load_samples(file):
                mine = self.steps[file] in (None, step) and sample.prompt_id in groups
                if mine and step in (self.steps[file], sample.weight_version):
                    groups[sample.prompt_id].append(sample)
        for prompt in prompts:
            if self.whole:
                self._check_whole(groups[prompt.id], prompt, sampling.samples_per_prompt)
            self._check(groups[prompt.id], prompt)
        for prompt in prompts:
            yield from groups[prompt.id]

    def sleep(self) -> int:
        """Nothing to free."""
        return 0

    def close(self) -> None:
        """Nothing to close."""

    def _check_whole(self, group: list[Sample], prompt: Prompt, size: int) -> None:
        if [s.index for s in group] != list(range(size)):
            raise ValueError(
                f"{self.path}: prompt {prompt.id} has samples {_short([s.index for s in group])}, "
                f"expected 0 to {size - 1} (samples_per_prompt {size})"
            )

    def _check(self, group: list[Sample], prompt: Prompt) -> None:
        for sample in group:
            known = tuple(sample.tokens[: sample.prompt_len].tolist())
            if self.whole and known != prompt.tokens:  # an environment may add to it or rewrite it
                raise ValueError(
                    f"{self.path}: prompt {prompt.id}, sample {sample.index} was recorded for the "
                    f"tokens {_short(known)}, expected {_short(prompt.tokens)}"
                )
            shown = [(image.row, image.rows) for image in sample.images]
            if shown != (expected := [(image.row, image.rows) for image in prompt.images]):
                raise ValueError(
                    f"{self.path}: prompt {prompt.id}, sample {sample.index} was recorded with "
                    f"images at (row, rows) {shown}, expected {expected}"
                )


def _short(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, ... ({len(values)} in all)" if len(values) > 8 else shown
