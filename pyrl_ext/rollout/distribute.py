"""Distributes the prompts of a rollout over the engines of all ranks."""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch.distributed as dist

from pyrl_ext.dist.agree import agree, gather_bytes
from pyrl_ext.pack.index import BatchIndex
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


@dataclass(frozen=True, slots=True)
class Rollout:
    """The samples of a rollout, each held by the rank that generated it.

    Args:
        index: of all samples, prompt by prompt, the same on every rank
        samples: that this rank owns, in the order of the index
        discarded: response tokens of groups that did not complete in time, over all ranks
        dropped: samples of this rank that are in no index, to be recorded; see `dynamic.fill`
    """

    index: BatchIndex
    samples: list[Sample]
    discarded: int
    dropped: list[Sample] = field(default_factory=list[Sample])


def generate_on_ranks(
    engine: Engine,
    request: RolloutRequest,
    score: Score | None = None,
    group: dist.ProcessGroup | None = None,
    engine_of_rank: Sequence[int | None] | None = None,
    show: Callable[[str], None] | None = None,
    depths: int = 0,
) -> Rollout:
    """Every engine generates and scores its share; ranks share numbers, not samples.

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
        depths: MTP layers whose loss tokens the index counts

    Raises:
        RuntimeError: on every rank if one rank failed, naming it and its error, or if ranks got
            different prompts or sampling

    Communicates:
        group, all-gather of a line of text, and then of about 50 bytes a sample
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    held = list(range(ranks) if engine_of_rank is None else engine_of_rank)
    engines, number = len({*held} - {None}), held[rank]
    quota = 0 if number is None else len(range(number, request.keep, engines))
    asked = RolloutRequest(
        request.prompts[number::engines] if quota else (), request.sampling, quota
    )
    try:
        label = "rollout" if engines == 1 else f"rollout, engine {number} of {engines}"
        samples, lost = _complete_groups(engine, asked, score, show, label)
        error = None
    except Exception as caught:  # every rank has to know, or the others wait forever
        samples, lost, error = [], 0, caught
    agree("generate_on_ranks", error, _digest(request), "prompts or sampling", group)
    if number is None or held.index(number) != rank:  # another rank of its engine owns them
        samples, lost = [], 0
    samples = in_order(samples, request.prompts)
    mine = lost.to_bytes(8, "little") + BatchIndex.of(samples, rank, depths).to_bytes()
    shares = gather_bytes(mine, group)
    parts = [BatchIndex.from_bytes(share[8:]) for share in shares]
    index = BatchIndex.joined(parts, [p.id for p in request.prompts])
    return Rollout(index, samples, sum(int.from_bytes(share[:8], "little") for share in shares))


def _digest(request: RolloutRequest) -> int:
    known = [(p.id, p.tokens) for p in request.prompts]
    return zlib.crc32(repr((known, request.sampling, request.keep)).encode())


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
