"""Distributes the prompts of a rollout over the engines of all ranks."""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pyrl_ext.rollout.engine import Engine, in_order
from pyrl_ext.samples import Prompt, Sample, Sampling

Score = Callable[[list[Sample]], list[Sample]]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request to all engines together.

    Args:
        prompts: with distinct ids
        sampling: how responses are drawn
        keep: number of groups that are returned, at most one per prompt
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    keep: int


def generate_on_ranks(
    engine: Engine,
    request: RolloutRequest,
    score: Score | None = None,
    group: dist.ProcessGroup | None = None,
    engine_of_rank: Sequence[int | None] | None = None,
    show: Callable[[str], None] | None = None,
) -> tuple[list[Sample], int]:
    """Every engine generates and scores its share; all ranks return all samples in the same order.

    Engine e takes prompts e, e + engines, ..., so each gets whole groups, long and short.
    Each engine keeps its own quota: the first groups to complete in its stream. The speed of other
    engines does not matter.

    Args:
        engine: of this rank; all engines hold the same weights
        request: the same on every rank
        score: adds the rewards to a group as soon as it is complete
        group: None = this process alone
        engine_of_rank: number of the engine that each rank holds (or holds a part of); None for a
            rank without an engine, which gets no prompts. None: rank r holds engine r
        show: called with a line of progress whenever a sample of this rank's engine is finished

    Returns:
        samples, prompt by prompt, index by index; and the number of response tokens that were
        discarded because their group did not complete in time

    Raises:
        RuntimeError: on every rank if one rank failed, naming it and its error, or if ranks got
            different prompts or sampling

    Communicates:
        group, all-gather of a line of text and then of the samples (12 bytes a token and its
        routes)
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    held = list(range(ranks) if engine_of_rank is None else engine_of_rank)
    engines, number = len({*held} - {None}), held[rank]
    quota = 0 if number is None else len(range(number, request.keep, engines))
    mine = RolloutRequest(
        request.prompts[number::engines] if quota else (), request.sampling, quota
    )
    try:
        label = "rollout" if engines == 1 else f"rollout, engine {number} of {engines}"
        share = _complete_groups(engine, mine, score, show, label)
        error = None
    except Exception as caught:  # every rank has to know, or the others wait forever
        share, error = ([], 0), caught
    if group is None:
        if error is not None:
            raise error
        samples, lost = share
        return in_order(samples, request.prompts), lost
    _agree(request, error, group)
    firsts = [held.index(engine) for engine in range(engines)]  # its other ranks have the same
    gathered = _gather(share if rank in firsts else None, group)
    shares = [gathered[first] for first in firsts]
    samples = [sample for samples, _ in shares for sample in samples]
    return in_order(samples, request.prompts), sum(lost for _, lost in shares)


def _complete_groups(
    engine: Engine,
    request: RolloutRequest,
    score: Score | None,
    show: Callable[[str], None] | None,
    label: str,
) -> tuple[list[Sample], int]:
    """The first groups to complete, and the number of response tokens in all other samples."""
    size = request.sampling.samples_per_prompt
    begun: defaultdict[int, list[Sample]] = defaultdict(list)
    kept: list[Sample] = []
    finished, tokens, start = 0, 0, time.monotonic()
    with closing(engine.stream(request.prompts, request.sampling)) as stream:
        for sample in stream:
            begun[sample.prompt_id].append(sample)
            finished, tokens = finished + 1, tokens + len(sample.tokens) - sample.prompt_len
            if len(begun[sample.prompt_id]) == size:
                group = begun.pop(sample.prompt_id)
                kept += score(group) if score is not None else group
            if show is not None:
                speed = tokens / max(time.monotonic() - start, 1e-9)
                groups = f"{len(kept) // size} of {request.keep} groups"
                show(f"{label}: {finished} samples, {groups}, {speed:,.0f} tokens/s")
            if len(kept) == request.keep * size:
                break
    if len(kept) != request.keep * size:
        raise RuntimeError(
            f"generate_on_ranks: the engine returned {len(kept) // size} groups of {size} samples, "
            f"expected {request.keep}"
        )
    return kept, tokens - sum(len(sample.tokens) - sample.prompt_len for sample in kept)


def _agree(request: RolloutRequest, error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raises on every rank if a rank failed or got a different request."""
    known = [(p.id, p.tokens) for p in request.prompts]
    digest = zlib.crc32(repr((known, request.sampling, request.keep)).encode())
    failed = None if error is None else f"{type(error).__name__}: {error}"
    states: list[tuple[str | None, int]] = _gather((failed, digest), group)
    lines = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(states) if text is not None]
    if lines:
        raise RuntimeError(
            f"generate_on_ranks: {len(lines)} of {len(states)} ranks failed, expected none\n  "
            + "\n  ".join(lines)
        ) from error
    other = [rank for rank, (_, sent) in enumerate(states) if sent != states[0][1]]
    if other:
        raise RuntimeError(
            f"generate_on_ranks: ranks {other} got other prompts or sampling than rank 0, "
            "expected the same on every rank"
        )


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered
