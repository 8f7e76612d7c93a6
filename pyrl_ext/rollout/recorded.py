"""The recorder of a run's samples, and the engine that replays a recording. `data.recordings`
defines the files."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pyrl_ext.data.recordings import load_samples, read_index, save_samples, save_tensors, step_of
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.atomic_write import replacing
from pyrl_ext.parallel.collective_errors import agreeing
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.samples import Prompt, Sample, Sampling

SCORES = "scores"
EVALUATIONS = "eval"
_NO_STEP = 2**62  # after all steps

Scores = dict[tuple[int, int, int], tuple[Tensor, Tensor]]
"""(prompt id, index, first turn) of a sample -> its tokens [n] int32, and their log-probs [n]."""


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
        save_tensors(tensors, partial)


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
