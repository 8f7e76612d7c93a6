"""The samples of a trajectory, from what the engine sampled turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pyrl_ext.rollout.versions import joined_spans
from pyrl_ext.samples import Sample


def samples_of(
    turns: Sequence[Sample], merge: bool, routes: Literal["first", "last"]
) -> tuple[list[Sample], int]:
    """The trajectory's samples, and the number of rows whose routes two turns report differently.

    Args:
        turns: one sample a turn, whose prompt is the turn's context, in order
        merge: a turn whose context begins with all tokens of the turn before is a part of its
            sample; else every turn is a sample
        routes: of the turn that is trained where two of a sample report a row differently
    """
    parts: list[list[Sample]] = []
    for turn in turns:
        if merge and parts and continues(parts[-1][-1], turn):
            parts[-1].append(turn)
        else:
            parts.append([turn])
    samples = []
    changed = 0
    number = 0
    for part in parts:
        sample, rows = _merged(part, number, routes)
        samples.append(replace(sample, last=False))
        changed = changed + rows
        number = number + len(part)
    samples[-1] = replace(samples[-1], last=True)
    return samples, changed


def continues(before: Sample, turn: Sample) -> bool:
    """True if the context of a turn begins with all tokens of the one before."""
    size = before.tokens.numel()
    return turn.prompt_len >= size and torch.equal(turn.tokens[:size], before.tokens)


def _merged(turns: list[Sample], number: int, policy: str) -> tuple[Sample, int]:
    """One sample of turns that continue each other; ``number`` is the first's."""
    first = turns[0]
    whole = turns[-1]
    loss_mask = torch.zeros_like(whole.loss_mask)
    logprobs = torch.zeros_like(whole.rollout_logprobs)
    spans = tuple((turn.prompt_len, turn.tokens.numel()) for turn in turns)
    for turn, (begin, end) in zip(turns, spans, strict=True):
        loss_mask[begin:end] = turn.loss_mask[begin:]
        logprobs[begin:end] = turn.rollout_logprobs[begin:]
    routes, route_mask, changed = _routes(turns, policy)
    kept_counts, kept_ids = _kept(turns)
    merged = replace(
        whole,
        prompt_len=first.prompt_len,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        routes=routes,
        route_mask=route_mask,
        kept_counts=kept_counts,
        kept_ids=kept_ids,
        images=first.images,
        weight_version=first.weight_version,
        version_spans=joined_spans(turns),
        masked=int((~route_mask[: first.masked]).sum()),  # turns know the context of later ones
        passes=sum(turn.passes for turn in turns),
        turn=number,
        spans=spans,
    )
    return merged, changed


def _routes(turns: list[Sample], policy: str) -> tuple[Tensor | None, Tensor, int]:
    """Routes of the last turn's rows, their mask, and how many rows two turns report differently.

    The last row of a turn has no route until the next turn reads it.
    """
    whole = turns[-1]
    if whole.routes is None or len(turns) == 1:
        return whole.routes, whole.route_mask, 0
    routes = torch.zeros_like(whole.routes)
    mask = torch.zeros_like(whole.route_mask)
    changed = 0
    for turn in turns:
        assert turn.routes is not None  # an engine reports them for all turns or for none
        size = turn.tokens.numel()
        known = mask[:size]
        found = turn.route_mask
        both = (known & found).nonzero()[:, 0]
        before = routes[both]
        now = turn.routes[both]
        if not torch.equal(before, now):  # the order of a row's experts means nothing
            differs = before.int().sort(-1).values != now.int().sort(-1).values
            changed += int(differs.flatten(1).any(1).sum())
        rows = (found if policy == "last" else found & ~known).nonzero()[:, 0]
        routes[rows] = turn.routes[rows]
        mask[:size] |= found
    return routes, mask, changed


def _kept(turns: list[Sample]) -> tuple[Tensor | None, Tensor | None]:
    """Numbers and ids of the tokens that sampling kept; rows of no turn are not drawn."""
    if turns[-1].kept_counts is None:
        return None, None
    counts = torch.full_like(turns[-1].kept_counts, -1)
    ids = list[Tensor]()
    for turn in turns:
        assert turn.kept_counts is not None and turn.kept_ids is not None  # for all or for none
        counts[turn.prompt_len : turn.tokens.numel()] = turn.kept_counts[turn.prompt_len :]
        ids.append(turn.kept_ids)
    return counts, torch.cat(ids)
