"""BatchIndex: the numbers that every rank knows of all samples of a step, about 50 bytes each."""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.pack.images import Images
from pyrl_ext.samples import Sample

Advantage = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class BatchIndex:
    """S samples by their numbers, the same on every rank; the place of a sample is its id.

    Tokens, log-probs and routes stay with the rank that generated them, their owner. Plans,
    schedules, advantages and the metrics of a rollout follow from these numbers.

    Args:
        owners:      [S] int32, rank that holds the sample.
        groups:      [S] int64, group of the sample (its prompt id).
        places:      [S] int32, place of the sample in its group.
        seqlens:     [S] int32, rows: tokens less one.
        prompt_lens: [S] int32, tokens of the prompt.
        truncated:   [S] bool, whether the sample ran out of room before it ended.
        rewards:     [S] float64.
        versions:    [S] int32, of the weights that generated the sample.
        unrouted:    [S] int32, rows without a route.
        loss_tokens: [S, 1 + D] int32, rows under the loss mask; at depth d those whose target is d
            tokens further on, as the MTP layer at depth d predicts it.
        layer_ids:   [L] 0-based global ids of the layers that have routes; empty without routes.
        topk:        experts of a route, K; 0 without routes.
        images:      of all samples, sample by sample.
    """

    owners: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    seqlens: np.ndarray
    prompt_lens: np.ndarray
    truncated: np.ndarray
    rewards: np.ndarray
    versions: np.ndarray
    unrouted: np.ndarray
    loss_tokens: np.ndarray
    layer_ids: tuple[int, ...] = ()
    topk: int = 0
    images: Images = field(default_factory=lambda: Images.of(np.empty(0)))

    @classmethod
    def of(cls, samples: Sequence[Sample], owner: int = 0, depths: int = 0) -> BatchIndex:
        """The numbers of ``samples``, which rank ``owner`` holds.

        Args:
            depths: MTP layers whose loss tokens are counted, D.
        """

        routed = next((s for s in samples if s.routes is not None), None)
        images = [(i, x.row, x.rows, *x.grid) for i, s in enumerate(samples) for x in s.images]
        counts = [[int(s.loss_mask[1 + d :].sum()) for d in range(1 + depths)] for s in samples]
        columns = {
            "owners": [owner] * len(samples),
            "groups": [s.prompt_id for s in samples],
            "places": [s.index for s in samples],
            "seqlens": [s.tokens.numel() - 1 for s in samples],
            "prompt_lens": [s.prompt_len for s in samples],
            "truncated": [s.finish_reason == "length" for s in samples],
            "rewards": [s.reward for s in samples],
            "versions": [s.weight_version for s in samples],
            "unrouted": [int((~s.route_mask[:-1]).sum()) for s in samples],
            "loss_tokens": np.asarray(counts, np.int32).reshape(-1, 1 + depths),
        }
        return cls(
            **{name: np.asarray(columns[name], dtype) for name, dtype in _COLUMNS.items()},
            layer_ids=() if routed is None else routed.layer_ids,
            topk=0 if routed is None or routed.routes is None else routed.routes.shape[-1],
            images=Images.of(np.asarray(images)),
        )

    @classmethod
    def joined(cls, parts: Sequence[BatchIndex], groups: Sequence[int]) -> BatchIndex:
        """The samples of ``groups`` out of all parts, in their order and that of places there.

        Raises: ValueError when the parts have routes of different layers.
        """
        shapes = {(p.layer_ids, p.topk) for p in parts if len(p)}
        if len(shapes) > 1:
            shown = " and ".join(f"{k} experts of layers {list(ids)}" for ids, k in sorted(shapes))
            raise ValueError(f"BatchIndex: samples have routes with {shown}, expected the same")
        layer_ids, topk = next(iter(shapes), ((), 0))
        place_of = {group: place for place, group in enumerate(groups)}
        whole = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS}
        of_group = np.asarray([place_of.get(int(g), -1) for g in whole["groups"]], np.int64)
        order = np.lexsort((whole["places"], of_group))
        order = order[of_group[order] >= 0]
        columns = {name: column[order] for name, column in whole.items()}
        images = _joined([p.images for p in parts], [*map(len, parts)], order)
        return cls(**columns, layer_ids=layer_ids, topk=topk, images=images)

    def __len__(self) -> int:
        return len(self.seqlens)

    @cached_property
    def starts(self) -> np.ndarray:
        """[S + 1] int64, first row of each sample in the ragged stream of all samples, then T."""
        return np.concatenate([[0], np.cumsum(self.seqlens, dtype=np.int64)])

    @cached_property
    def digest(self) -> int:
        """32 bits, equal for equal numbers."""
        return zlib.crc32(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The numbers as `from_bytes` reads them: sizes and layers, each column, then images."""
        sizes = len(self), self.loss_tokens.shape[1], self.topk, len(self.layer_ids)
        head = (
            np.asarray(sizes, np.int32).tobytes() + np.asarray(self.layer_ids, np.int16).tobytes()
        )
        columns = (getattr(self, name).astype(dtype) for name, dtype in _COLUMNS.items())
        return head + b"".join(column.tobytes() for column in (*columns, self.images.table))

    @classmethod
    def from_bytes(cls, data: bytes) -> BatchIndex:
        """The index that `to_bytes` wrote."""
        samples, depths, topk, layers = np.frombuffer(data, np.int32, 4).tolist()
        layer_ids = np.frombuffer(data, np.int16, layers, 4 * 4)
        columns, at = dict[str, np.ndarray](), 4 * 4 + 2 * int(layers)
        for name, dtype in _COLUMNS.items():
            shape = (samples, depths) if name == "loss_tokens" else (samples,)
            columns[name] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
            at += columns[name].nbytes
        images = Images.of(np.frombuffer(data, np.int32, offset=at))
        return cls(**columns, layer_ids=tuple(layer_ids.tolist()), topk=topk, images=images)

    @property
    def nbytes(self) -> int:
        """Bytes that ranks exchange to know it."""
        return sum(getattr(self, name).nbytes for name in _COLUMNS) + self.images.table.nbytes

    def owned_by(self, rank: int) -> np.ndarray:
        """Ids of the samples that ``rank`` holds, ascending."""
        return np.flatnonzero(self.owners == rank)

    @property
    def _rewards(self) -> Tensor:
        return torch.from_numpy(self.rewards).float()

    def advantages(self, advantage: Advantage) -> Tensor:
        """[S] float32, the advantage of every sample.

        Args:
            advantage: (rewards [S] float32, groups [S] int64, loss tokens [S] int64) -> [S] float.

        Raises: ValueError when a reward or an advantage is not finite, or their numbers differ.
        """
        if not np.isfinite(self.rewards).all():
            at = int(np.flatnonzero(~np.isfinite(self.rewards))[0])
            raise ValueError(
                f"BatchIndex: Sample(prompt {self.groups[at]}, sample {self.places[at]}): reward "
                f"{self.rewards[at]}, expected a finite number; score it first"
            )
        tokens = torch.from_numpy(self.loss_tokens[:, 0].astype(np.int64))
        values = advantage(self._rewards, torch.from_numpy(self.groups), tokens)
        if values.shape != (len(self),):
            raise ValueError(
                f"BatchIndex: the advantage function returned {list(values.shape)}, expected "
                f"[{len(self)}], one a sample"
            )
        if not bool(values.isfinite().all()):
            at = int((~values.isfinite()).nonzero()[0])
            raise ValueError(
                f"BatchIndex: the advantage function returned {float(values[at])} for sample {at}, "
                "expected a finite number"
            )
        return values.float()

    def split(self, n: int) -> list[list[int]]:
        """Sample ids of ``n`` minibatches of equally many whole groups, in their order."""
        order = {group: place for place, group in enumerate(dict.fromkeys(self.groups.tolist()))}
        if n < 1 or len(order) % n:
            raise ValueError(
                f"BatchIndex.split: {n} minibatches of {len(order)} groups ({len(self)} samples), "
                "expected a divisor of the number of groups"
            )
        members: list[list[int]] = [[] for _ in range(n)]
        for sample, group in enumerate(self.groups.tolist()):
            members[order[group] * n // len(order)].append(sample)
        return members

    def stats(self) -> dict[str, float]:
        """Metrics of the rollout, under their glossary names."""
        rewards = self._rewards.double()
        spread = [np.ptp(self.rewards[self.groups == g]) for g in np.unique(self.groups)]
        tokens = self.seqlens.astype(np.int64) + 1
        stats = {
            "reward": float(rewards.mean()),
            "rollout/reward_std": float(rewards.std(correction=0)),
            "rollout/flat_groups": float(np.mean([s == 0 for s in spread])),
            "rollout/tokens": int(tokens.sum()),
            "rollout/response_len": float(np.mean(tokens - self.prompt_lens)),
            "rollout/truncated": float(np.mean(self.truncated)),
        }
        if self.layer_ids:
            without = int(self.unrouted.sum())
            stats["route/fallback_rows"] = without
            stats["route/coverage"] = 1 - without / max(1, int(self.seqlens.sum()))
        return stats


def _joined(parts: Sequence[Images], sizes: Sequence[int], order: np.ndarray) -> Images:
    """The images of parts with so many samples, of those in ``order``, which is theirs then."""
    tables, before = [each.table for each in parts], 0
    for table, size in zip(tables, sizes, strict=True):
        table[:, 0] += before
        before += size
    table, places = np.concatenate(tables), np.full(before, -1)
    places[order] = np.arange(len(order))
    table[:, 0] = places[table[:, 0]]
    table = table[table[:, 0] >= 0]
    return Images.of(table[np.argsort(table[:, 0], kind="stable")])


_COLUMNS = {
    "groups": np.dtype(np.int64),
    "rewards": np.dtype(np.float64),
    **dict.fromkeys(("owners", "places", "seqlens", "prompt_lens"), np.dtype(np.int32)),
    **dict.fromkeys(("versions", "unrouted", "loss_tokens"), np.dtype(np.int32)),
    "truncated": np.dtype(np.bool_),
}
