"""Divergence of the policy's next-token distributions from a teacher's, from logits of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.fused_head.chunking import CallPlan
from pyrl_ext.loss.fused_head.tiles import HeadTiles, operand
from pyrl_ext.loss.vocab_parallel import gather_shards

KINDS = ("reverse", "forward", "js")


@dataclass(frozen=True, eq=False)
class Teacher:
    """The distributions that a policy is compared with, as hidden states and an LM head.

    Both models' distributions are taken over the columns that both have, ``valid_vocab`` of each.

    Args:
        hidden: [T, H_t] of all tokens, on every rank of the vocabulary's group.
        weight: [V_local, H_t] dtype of ``hidden``; the same columns as the policy's shard.
        valid_vocab: columns of all ranks that are no padding.
        kind: ``reverse``: KL(policy || teacher); ``forward``: KL(teacher || policy); ``js``: with
            m = share teacher + (1 - share) policy, share KL(teacher || m) + (1 - share)
            KL(policy || m).
        share: of the teacher in ``js``.

    Source: generalized knowledge distillation, https://arxiv.org/abs/2306.13649.
    """

    hidden: Tensor
    weight: Tensor
    valid_vocab: int
    kind: str
    share: float = 0.5

    def check(self, where: str, tokens: int, columns: int) -> None:
        """Raises: ValueError for shapes, dtypes, kind or share that do not fit."""
        hidden = self.hidden
        weight = self.weight
        width = hidden.shape[-1]
        if hidden.shape != (tokens, width) or weight.shape != (columns, width):
            raise ValueError(
                f"{where}: the teacher's hidden {list(hidden.shape)}, weight "
                f"{list(weight.shape)}, expected [{tokens}, H_t], [{columns}, H_t]"
            )
        if hidden.dtype != weight.dtype:
            raise ValueError(
                f"{where}: the teacher's hidden is {hidden.dtype}, its weight {weight.dtype}, "
                "expected one dtype"
            )
        if self.kind not in KINDS or not 0 < self.share < 1:
            raise ValueError(
                f"{where}: divergence {self.kind!r} with share {self.share}, expected one of "
                f"{', '.join(KINDS)} and a share between 0 and 1"
            )


class TeacherTiles:
    """The teacher's LM head on one rank, in the tiles of the policy's."""

    def __init__(self, teacher: Teacher, call: CallPlan):
        common = min(call.valid_vocab, teacher.valid_vocab)
        self.teacher = teacher
        self.head = HeadTiles(teacher.weight, replace(call, valid_vocab=common))
        self.group = call.group

    def compare(self, tiles: Sequence[Tensor], scale: Tensor, tokens: Tensor) -> Divergence:
        """The divergences of a chunk.

        Args:
            tiles: the policy's logits [c, columns] of each tile.
            scale: [c], 1 / temperature of both models.
            tokens: [c] int64, places of the chunk's tokens in [T].

        Communicates: all-gathers of [2, c] over the ranks of the vocabulary, two in all.
        """
        theirs = self.head.logits(operand(self.teacher.hidden.index_select(0, tokens)))
        return Divergence(tiles, theirs, scale, self.teacher, self.group)


class Divergence:
    """Divergences of the tokens of a chunk, and their gradients with respect to its logits.

    Attributes:
        values: [c], of each token [nats].
    """

    def __init__(
        self,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        scale: Tensor,
        teacher: Teacher,
        group: dist.ProcessGroup | None,
    ):
        self._ours = ours
        self._theirs = theirs
        self._scale = scale
        self._teacher = teacher
        log_sums = torch.stack([_log_sum(ours, theirs, scale), _log_sum(theirs, theirs, scale)])
        self._log_sums = gather_shards(log_sums, group).logsumexp(0)
        sums = scale.new_zeros(2, len(scale))
        for number in range(len(theirs)):
            policy, other = self._log_probs(number)
            value, slope = _terms(policy, other, self._teacher)
            sums += torch.stack([value.sum(-1), slope.sum(-1)])
        self.values, self._mean_slope = gather_shards(sums, group).sum(0)

    def _log_probs(self, number: int) -> tuple[Tensor, Tensor]:
        """Log-probs [c, columns] of the policy and of the teacher in one tile."""
        theirs = self._theirs[number]
        ours = self._ours[number][:, : theirs.shape[1]]
        scale = self._scale[:, None]
        of_policy, of_teacher = self._log_sums[..., None]
        return ours * scale - of_policy, theirs * scale - of_teacher

    def gradient(self, number: int, weights: Tensor) -> Tensor | None:
        """``weights`` [c] times d(values) / d(logits of a tile) [c, columns]; None: a tile that
        only one of the models has."""
        if number >= len(self._theirs):
            return None
        policy, other = self._log_probs(number)
        _, slope = _terms(policy, other, self._teacher)
        slope -= policy.exp_().mul_(self._mean_slope[:, None])
        return slope.mul_((weights * self._scale)[:, None])


def _log_sum(tiles: Sequence[Tensor], like: Sequence[Tensor], scale: Tensor) -> Tensor:
    """[c] log of the sum of exp(logits * scale) over the columns of ``like``."""
    total = scale.new_full((len(scale),), -torch.inf)
    for tile, other in zip(tiles, like, strict=False):
        part = (tile[:, : other.shape[1]] * scale[:, None]).logsumexp(-1)
        total = torch.logaddexp(total, part)
    return total


def _terms(policy: Tensor, other: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """The terms of the sum over columns, and p times their derivatives with respect to p, the
    policy's probability, up to one constant for all columns; from log-probs [c, columns]."""
    if teacher.kind == "forward":
        weight = other.exp()
        return weight * (other - policy), -weight
    if teacher.kind == "reverse":
        terms = policy.exp() * (policy - other)
        return terms, terms
    share = teacher.share
    ours = (1 - share) * policy.exp()
    theirs = share * other.exp()
    # where both underflow, the products below are 0 for any finite logarithm
    mixed = (ours + theirs).clamp_min_(torch.finfo(ours.dtype).tiny).log_()
    ours *= policy - mixed
    return ours + theirs * (other - mixed), ours
