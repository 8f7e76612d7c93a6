"""The trainer's log-probs of recorded samples, in files next to theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.atomic_write import replacing

FOLDER = "scores"

Scores = dict[tuple[int, int, int], tuple[Tensor, Tensor]]
"""(prompt id, index, first turn) of a sample -> its tokens [n] int32, and their log-probs [n]."""


def save_scores(
    folder: Path, step: int, rank: int, index: BatchIndex, shard: BatchShard, logprobs: Tensor
) -> None:
    """Write the log-probs [N] float32 [nats] of the rows that this rank computed, of the policy
    before the update; of tensor-parallel ranks, which have the same, the first one writes.

    Raises: OSError naming the file, when it cannot be written.
    """
    if not logprobs.numel() or shard.role.tp_rank:
        return
    rows = shard.rows.tokens
    own, samples = np.unique(shard.lengths.sample_of(rows), return_inverse=True)
    ids = np.stack([index.groups[own], index.places[own], index.turns[own]], 1)
    tokens = rows - shard.lengths.starts[own][samples] + 1  # a row scores the token after it
    tensors = {
        "ids": torch.tensor(ids, dtype=torch.int64),
        "samples": torch.tensor(samples, dtype=torch.int32),
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "logprobs": logprobs.contiguous(),
    }
    with replacing(folder / FOLDER / f"step-{step:06d}-rank-{rank}.safetensors") as partial:
        save_file(tensors, partial)


def load_scores(folder: Path, step: int) -> Scores:
    """The log-probs of a step from all ranks; empty where they were not recorded.

    Raises: ValueError naming a file that is damaged.
    """
    parts: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
    for file in sorted((folder / FOLDER).glob(f"step-{step:06d}-rank-*.safetensors")):
        try:
            held = load_file(file)
            for place, (prompt, index, turn) in enumerate(held["ids"].tolist()):
                at = held["samples"] == place
                part = held["tokens"][at], held["logprobs"][at]
                parts.setdefault((prompt, index, turn), []).append(part)
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error!r}, expected what save_scores wrote") from error
    joined = {key: zip(*each, strict=True) for key, each in parts.items()}
    return {key: (torch.cat(tokens), torch.cat(scores)) for key, (tokens, scores) in joined.items()}
