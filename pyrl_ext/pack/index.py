"""BatchIndex: the numbers that every rank knows of all samples of a step, about 60 bytes each."""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.pack.images import Images
from pyrl_ext.samples import Sample

# (rewards [J], groups [J], loss tokens [J]) of J trajectories -> [J]
Advantage = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class BatchIndex:
    """S samples by their numbers, the same on every rank; the place of a sample is its id.

    Tokens, log-probs and routes stay with the rank that generated them, their owner. Plans,
    schedules, advantages and the metrics of a rollout follow from these numbers. Samples with the
    same group and place are the parts of one of J trajectories.

    Args:
        owners:      [S] int32, rank that holds the sample.
        groups:      [S] int64, group of the sample (its prompt id).
        places:      [S] int32, place of its trajectory in the group.
        turns:       [S] int32, number of the first turn that the sample holds.
        seqlens:     [S] int32, rows: tokens less one.
        sampled:     [S] int32, tokens that the policy sampled, trained on or not.
        truncated:   [S] bool, True if the trajectory ran out of room in this sample.
        rewards:     [S] float64, of the trajectory.
        versions:    [S] int32, of the weights that generated the sample.
        unrouted:    [S] int32, rows without a route.
        masked:      [S] int32, those of them whose route is left out on purpose.
        passes:      [S] int32, forward passes of the engine that sampled tokens of it; 0: unknown.
        kept:        [S] int32, ids in the sets that top-p and top-k left; 0 without such sets.
        loss_tokens: [S, 1 + D] int32, rows under the loss mask; at depth d those whose target is d
            tokens further on, as the MTP layer at depth d predicts it.
        layer_ids:   [L] 0-based global ids of the layers that have routes; empty without routes.
        topk:        experts of a route, K; 0 without routes.
        components:  by name, [S] float64, of the rewards; NaN in groups without the component.
        images:      of all samples, sample by sample.
    """

    owners: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    turns: np.ndarray
    seqlens: np.ndarray
    sampled: np.ndarray
    truncated: np.ndarray
    rewards: np.ndarray
    versions: np.ndarray
    unrouted: np.ndarray
    masked: np.ndarray
    passes: np.ndarray
    kept: np.ndarray
    loss_tokens: np.ndarray
    layer_ids: tuple[int, ...] = ()
    topk: int = 0
    components: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    images: Images = field(default_factory=lambda: Images.of(np.empty(0)))

    @classmethod
    def of(cls, samples: Sequence[Sample], owner: int = 0, depths: int = 0) -> BatchIndex:
        """The numbers of ``samples``, which rank ``owner`` holds.

        Args:
            depths: MTP layers whose loss tokens are counted, D.

        Raises: ValueError when rewards in a group have components of other names.
        """
        routed = next((s for s in samples if s.routes is not None), None)
        _check_components(samples)
        components = dict[str, np.ndarray]()
        for name in _names(s.components for s in samples):
            values = [s.components.get(name, np.nan) for s in samples]
            components[name] = np.asarray(values, float)
        images = [(i, x.row, x.rows, *x.grid) for i, s in enumerate(samples) for x in s.images]
        counts = [[int(s.loss_mask[1 + d :].sum()) for d in range(1 + depths)] for s in samples]
        columns = {
            "owners": [owner] * len(samples),
            "places": [s.index for s in samples],
            "turns": [s.turn for s in samples],
            "seqlens": [s.tokens.numel() - 1 for s in samples],
            "sampled": [sampled_tokens(s) for s in samples],
            "versions": [s.weight_version for s in samples],
            "unrouted": [int((~s.route_mask[:-1]).sum()) for s in samples],
            "masked": [s.masked for s in samples],
            "passes": [s.passes for s in samples],
            "kept": [0 if s.kept_ids is None else len(s.kept_ids) for s in samples],
        }
        return cls(
            groups=np.asarray([s.prompt_id for s in samples], np.int64),
            truncated=np.asarray([s.last and s.finish_reason == "length" for s in samples], bool),
            rewards=np.asarray([s.reward for s in samples], float),
            loss_tokens=np.asarray(counts, np.int32).reshape(-1, 1 + depths),
            **{name: np.asarray(column, np.int32) for name, column in columns.items()},
            layer_ids=() if routed is None else routed.layer_ids,
            topk=0 if routed is None or routed.routes is None else routed.routes.shape[-1],
            components=components,
            images=Images.of(np.asarray(images)),
        )

    @classmethod
    def joined(cls, parts: Sequence[BatchIndex], groups: Sequence[int]) -> BatchIndex:
        """The samples of ``groups`` out of all parts, in their order, by places and turns.

        Raises: ValueError when the parts have routes of different layers.
        """
        filled = [p for p in parts if len(p)]
        shapes = {(p.layer_ids, p.topk) for p in filled}
        if len(shapes) > 1:
            shown = " and ".join(f"{k} experts of layers {list(ids)}" for ids, k in sorted(shapes))
            raise ValueError(f"BatchIndex: samples have routes with {shown}, expected the same")
        layer_ids, topk = next(iter(shapes), ((), 0))
        place_of = {group: place for place, group in enumerate(groups)}
        whole = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS}
        of_group = np.asarray([place_of.get(int(g), -1) for g in whole["groups"]], np.int64)
        order = np.lexsort((whole["turns"], whole["places"], of_group))
        order = order[of_group[order] >= 0]
        columns = {name: column[order] for name, column in whole.items()}
        images = _joined([p.images for p in parts], [*map(len, parts)], order)
        components = dict[str, np.ndarray]()
        for name in _names(p.components for p in filled):
            columns_of = [p.components.get(name, np.full(len(p), np.nan)) for p in filled]
            components[name] = np.concatenate(columns_of)[order]
        return cls(**columns, layer_ids=layer_ids, topk=topk, components=components, images=images)

    def __len__(self) -> int:
        return len(self.seqlens)

    @cached_property
    def starts(self) -> np.ndarray:
        """[S + 1] int64, first row of each sample in the ragged stream of all samples, then T."""
        return np.concatenate([[0], np.cumsum(self.seqlens, dtype=np.int64)])

    @cached_property
    def trajectories(self) -> np.ndarray:
        """[S] int64, the trajectory of each sample: 0 .. J - 1 in the order of their samples."""
        keys = np.stack([self.groups, self.places.astype(np.int64)], 1)
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[which.reshape(-1)]

    @cached_property
    def firsts(self) -> np.ndarray:
        """[J] int64, id of a sample of each trajectory: group and reward are those of all."""
        return np.unique(self.trajectories, return_index=True)[1]

    def per_trajectory(self, values: np.ndarray) -> np.ndarray:
        """[J] float64, the sums of ``values`` [S] over the samples of each trajectory."""
        return np.bincount(self.trajectories, values, len(self.firsts))

    @cached_property
    def digest(self) -> int:
        """32 bits, equal for equal numbers."""
        known = self.layer_ids, self.topk, self.loss_tokens.shape, [*self.components]
        columns: list[np.ndarray] = [getattr(self, name) for name in _COLUMNS]
        columns += [*self.components.values(), self.images.table]
        return zlib.crc32(repr(known).encode() + b"".join(x.tobytes() for x in columns))

    def owned_by(self, rank: int) -> np.ndarray:
        """Ids of the samples that ``rank`` holds, ascending."""
        return np.flatnonzero(self.owners == rank)

    @property
    def _rewards(self) -> Tensor:
        return torch.from_numpy(self.rewards[self.firsts]).float()

    def _check_rewards(self) -> None:
        """Refuse a reward that is not finite, or two in a trajectory."""
        own = self.rewards[self.firsts][self.trajectories]
        wrong = np.flatnonzero(~np.isfinite(self.rewards) | (self.rewards != own))
        if len(wrong):
            sample = wrong[0]
            reward = self.rewards[sample]
            rule = f"{own[sample]} as in another part of its trajectory"
            if not np.isfinite(reward):
                rule = "a finite number; score it first"
            raise ValueError(f"BatchIndex: {self._named(sample)}: reward {reward}, expected {rule}")

    def _named(self, sample: int) -> str:
        where = f"prompt {self.groups[sample]}, sample {self.places[sample]}"
        return f"Sample({where}{f', turn {turn}' if (turn := self.turns[sample]) else ''})"

    def advantages(self, advantage: Advantage) -> Tensor:
        """[S] float32, the advantage of every sample: that of its trajectory.

        Args:
            advantage: (rewards [J] float32, groups [J] int64, loss tokens [J] int64) -> [J] float.

        Raises: ValueError when a reward or an advantage is not finite, a trajectory has two
            rewards, or advantages are not one a trajectory.
        """
        self._check_rewards()
        tokens = torch.from_numpy(self.per_trajectory(self.loss_tokens[:, 0])).long()
        values = advantage(self._rewards, torch.from_numpy(self.groups[self.firsts]), tokens)
        if values.shape != tokens.shape:
            raise ValueError(
                f"BatchIndex: the advantage function returned {list(values.shape)}, expected "
                f"{list(tokens.shape)}, one a trajectory"
            )
        if not bool(values.isfinite().all()):
            at = int((~values.isfinite()).nonzero()[0])
            raise ValueError(
                f"BatchIndex: the advantage function returned {float(values[at])} for trajectory "
                f"{at}, {self._named(int(self.firsts[at]))}, expected a finite number"
            )
        return values.float()[torch.from_numpy(self.trajectories)]

    def split(self, n: int) -> list[list[int]]:
        """Sample ids of ``n`` minibatches of whole groups, in their order: equally many groups
        each, or one more in some where groups are missing."""
        order = {group: place for place, group in enumerate(dict.fromkeys(self.groups.tolist()))}
        if not 1 <= n <= len(order):
            raise ValueError(
                f"BatchIndex.split: {n} minibatches of {len(order)} groups ({len(self)} samples), "
                "expected from 1 to the number of groups"
            )
        members: list[list[int]] = [[] for _ in range(n)]
        for sample, group in enumerate(self.groups.tolist()):
            members[order[group] * n // len(order)].append(sample)
        return members

    @cached_property
    def flat_groups(self) -> dict[int, bool]:
        """Group -> True if all its rewards are equal, in the order of their samples."""
        rewards = {g: self.rewards[self.groups == g] for g in dict.fromkeys(self.groups.tolist())}
        return {group: bool(np.ptp(each) == 0) for group, each in rewards.items()}

    def stats(self) -> dict[str, float]:
        """Metrics of the rollout, under their glossary names."""
        rewards = self._rewards.double()
        trajectories = max(1, len(self.firsts))
        members: np.ndarray = np.unique(self.groups[self.firsts], return_counts=True)[1]
        stats = {
            "reward": float(rewards.mean()),
            "rollout/reward_std": float(rewards.std(correction=0)),
            "rollout/single_groups": int((members == 1).sum()),
            "rollout/flat_groups": float(np.mean([*self.flat_groups.values()])),
            "rollout/tokens": int(self.starts[-1]) + len(self),
            "rollout/response_len": int(self.sampled.sum()) / trajectories,
            "rollout/truncated": int(self.truncated.sum()) / trajectories,
            "rollout/samples_per_trajectory": len(self) / trajectories,
        }
        if self.kept.any():
            stats["rollout/kept_tokens"] = float(self.kept.sum() / self.sampled.sum())
        if counted := int(self.passes.sum()):
            stats["rollout/tokens_per_pass"] = int(self.sampled[self.passes > 0].sum()) / counted
        for name, values in self.components.items():
            own = values[self.firsts]
            if len(own := own[~np.isnan(own)]):
                stats[f"reward/{name}"] = float(own.mean())
        if self.layer_ids:
            without = int(self.unrouted.sum())
            masked = int(self.masked.sum())
            stats |= {"route/fallback_rows": without, "route/masked": masked}
            stats["route/coverage"] = 1 - (without - masked) / max(1, int(self.seqlens.sum()))
        return stats


def sampled_tokens(sample: Sample) -> int:
    """Tokens of a sample that the policy sampled."""
    spans = sample.spans or ((sample.prompt_len, sample.tokens.numel()),)
    return sum(end - begin for begin, end in spans)


def _joined(parts: Sequence[Images], sizes: Sequence[int], order: np.ndarray) -> Images:
    """The images of parts with so many samples, of those in ``order``, which is theirs then."""
    tables: list[np.ndarray] = []
    before = 0
    for images, size in zip(parts, sizes, strict=True):
        table = images.table.copy()
        table[:, 0] += before
        before += size
        tables.append(table)
    table = np.concatenate(tables)
    places = np.full(before, -1)
    places[order] = np.arange(len(order))
    table[:, 0] = places[table[:, 0]]
    table = table[table[:, 0] >= 0]
    return Images.of(table[np.argsort(table[:, 0], kind="stable")])


def _names(components: Iterable[Iterable[str]]) -> list[str]:
    """The names of all components, sorted."""
    return sorted({name for each in components for name in each})


def _check_components(samples: Sequence[Sample]) -> None:
    """Check that rewards in a group have the same components; other groups may have others, since
    another function scored them."""
    expected = dict[int, list[str]]()
    for sample in samples:
        found = sorted(sample.components)
        first = expected.setdefault(sample.prompt_id, found)
        if found != first:
            raise ValueError(
                f"BatchIndex: Sample(prompt {sample.prompt_id}, sample {sample.index}): reward "
                f"with components {found}, expected {first} as in other samples of its group; "
                "return 0.0 for one that does not apply"
            )


_COLUMNS = [field.name for field in fields(BatchIndex) if field.type == "np.ndarray"]
