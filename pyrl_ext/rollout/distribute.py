"""Distributes the prompts of a rollout over the engines of all ranks."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from pyrl_ext.pack.index import BatchIndex, sampled_tokens
from pyrl_ext.parallel.collective_errors import agreeing, gather_objects
from pyrl_ext.rollout.engine import Engine, in_order
from pyrl_ext.rollout.prompt_groups import (
    Ask,
    Counts,
    EngineEvent,
    Groups,
    Score,
    Wait,
    as_they_are,
    need_share,
    sampled,
)
from pyrl_ext.samples import Prompt, Sample, Sampling

_EVENT, _END, _FAILED = range(3)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request to all engines together.

    Args:
        prompts: with distinct ids
        sampling: how responses are drawn
        keep: number of groups that are returned, at most one per prompt
        ask: how trajectories come from an engine
        min_share: trajectories that must be left, as a share of those that ended; of responses
            that a reward function scores, those that must have a reward
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    keep: int
    ask: Ask = sampled
    min_share: float = 0.0

    def events(self, engine: Engine, counts: Counts) -> Generator[EngineEvent]:
        """The trajectories of an engine as they end."""
        return self.ask(engine, self.prompts, self.sampling, counts)


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    """The samples of a rollout, each held by the rank that generated it.

    Args:
        index: of all samples, prompt by prompt, the same on every rank
        samples: that this rank owns, in the order of the index
        counts: numbers over all ranks; ``discarded`` are the response tokens of groups that did
            not complete in time
        dropped: samples of this rank that are not in `index`, to be recorded; see `dynamic.fill`
        generated: of all samples, with those that dynamic sampling dropped; None: `index`
        teacher_logprobs: of each of `samples`, [T - 1] float32 of the tokens after its first one
            under a teacher on servers; empty: there is none
    """

    index: BatchIndex
    samples: list[Sample]
    counts: Counts = field(default_factory=Counts)
    dropped: list[Sample] = field(default_factory=list[Sample])
    generated: BatchIndex | None = None
    teacher_logprobs: Sequence[torch.Tensor] = ()


def generate_on_ranks(
    engine: Engine,
    request: RolloutRequest,
    score: Score | None = None,
    group: dist.ProcessGroup | None = None,
    engine_of_rank: Sequence[int | None] | None = None,
    show: Callable[[str], None] | None = None,
    depths: int = 0,
    holders: dist.ProcessGroup | None = None,
) -> RolloutSamples:
    """Every engine generates its share, which its first rank scores; ranks share numbers, not
    samples.

    Engine e takes prompts e, e + engines, ..., so each gets whole groups, long and short.
    Each engine keeps its own quota: the first groups to complete in its stream. The speed of other
    engines does not matter.

    Args:
        engine: of this rank; all engines hold the same weights
        request: the same on every rank
        score: begins to score a group as soon as it is complete, on one rank of each engine; the
            rewards are waited for after the last one
        group: None = this process alone
        engine_of_rank: number of the engine that each rank holds (or holds a part of); None for a
            rank without an engine, which gets no prompts. None: rank r holds engine r
        show: called with a line of progress whenever a sample of this rank's engine is finished
        depths: MTP layers whose loss tokens the index counts
        holders: the ranks that hold the engine of this rank together; None: this rank alone

    Raises:
        AgreedError: if one rank failed, naming it and its error, if ranks got different prompts or
            sampling, if the ranks of an engine got different samples, or if too few trajectories
            are left

    Communicates:
        group, all-gather of a line of text, and then of about 60 bytes a sample and at most 20
        numbers. holders, two numbers a sample, over the CPU
    """
    part, owns, label = part_of(request, group, engine_of_rank)
    begin = (score or as_they_are) if owns else _unscored

    def complete() -> tuple[list[Sample], Counts]:
        return _complete_groups(engine, part, begin, show, label, holders)

    return join_on_ranks(complete, request, group, owns, depths)


def part_of(
    request: RolloutRequest,
    group: dist.ProcessGroup | None = None,
    engine_of_rank: Sequence[int | None] | None = None,
) -> tuple[RolloutRequest, bool, str]:
    """The part that the engine of this rank gets, whether this rank owns its samples (the first
    rank of each engine does: vLLM gives routes to no other one), and what to call it; see
    `generate_on_ranks`."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    held = list(range(ranks) if engine_of_rank is None else engine_of_rank)
    engines = len({*held} - {None})
    number = held[rank]
    quota = 0 if number is None else len(range(number, request.keep, engines))
    part = replace(request, prompts=request.prompts[number::engines] if quota else (), keep=quota)
    label = "rollout" if engines == 1 else f"rollout, engine {number} of {engines}"
    return part, number is not None and held.index(number) == rank, label


def join_on_ranks(
    complete: Callable[[], tuple[list[Sample], Counts]],
    request: RolloutRequest,
    group: dist.ProcessGroup | None,
    owns: bool,
    depths: int,
) -> RolloutSamples:
    """The index of the samples of all ranks; see `generate_on_ranks`.

    Args:
        complete: returns the samples of this rank's part, and counts
        owns: whether this rank owns these samples
    """
    with agreeing("generate_on_ranks", "prompts or sampling", group) as doing:
        doing.append(_digest(request))
        samples, counts = complete()
        if not owns:  # another rank of its engine owns them
            samples = []
            counts = Counts()
        samples = in_order(samples, request.prompts)
        mine = dict(counts), BatchIndex.of(samples, 0 if group is None else group.rank(), depths)
    shares = gather_objects(mine, group)
    whole = Counts()
    for each, _ in shares:
        whole.add(each)
    need_share(whole, request.min_share)
    index = BatchIndex.joined([part for _, part in shares], [p.id for p in request.prompts])
    return RolloutSamples(index, samples, whole)


def _digest(request: RolloutRequest) -> int:
    known = [(p.id, p.tokens) for p in request.prompts]
    return zlib.crc32(repr((known, request.sampling, request.keep)).encode())


def _unscored(_group: list[Sample]) -> Wait:
    """Keeps no sample of a group: another rank of the engine scores and owns them."""
    return as_they_are([])


def _complete_groups(
    engine: Engine,
    request: RolloutRequest,
    score: Score,
    show: Callable[[str], None] | None,
    label: str,
    holders: dist.ProcessGroup | None,
) -> tuple[list[Sample], Counts]:
    """The first groups to complete, and counts; ``discarded`` are the response tokens of all
    other samples. Nothing if another one of ``holders`` failed, which says so itself."""
    size = request.sampling.samples_per_prompt
    counts = Counts()
    start = time.monotonic()
    groups = Groups(size, request.keep, score)

    def take(event: EngineEvent) -> bool:
        groups.add(event)
        if show is not None:
            show(f"{label}: {groups.progress(time.monotonic() - start)}")
        return groups.complete == request.keep

    with closing(request.events(engine, counts)) as events:
        if not for_each_in_step(events, take, holders):
            return [], Counts()
    if groups.complete != request.keep:
        raise RuntimeError(
            f"generate_on_ranks: the engine returned {groups.complete} groups of {groups.size} "
            f"samples, expected {request.keep}"
        )
    samples = [sample for each in groups.kept for sample in each.scored(counts)]
    counts["discarded"] += groups.tokens - sum(map(sampled_tokens, samples))
    return samples, counts


def for_each_in_step(
    events: Iterator[EngineEvent],
    take: Callable[[EngineEvent], bool],
    holders: dist.ProcessGroup | None,
) -> bool:
    """Calls ``take`` with each event until it returns True or none is left.

    The engine computes each event on all ``holders`` together: a rank that left on its own would
    leave the others in a collective of the engine, which may have no timeout. So they agree after
    each event that none of them has failed.

    Args:
        events: the same ones on all holders
        take: returns the same on all holders, whose other work may differ
        holders: the ranks that hold the engine together; None: this rank alone

    Returns: False if another rank failed, which raises its error.

    Raises: what ``events`` and ``take`` raise; RuntimeError on all holders if their events differ.

    Communicates: holders, an all-gather of two numbers for each event, over the CPU.
    """
    while True:
        error: Exception | None = None
        event: EngineEvent | None = None
        over = True
        try:
            event = next(events, None)
            over = event is None or take(event)
        except Exception as caught:  # the others have to know
            error = caught
            if holders is not None:  # the others may be in a collective that this rank never joins
                print(f"generate_on_ranks: {error}", file=sys.stderr, flush=True)
        any_failed = holders is not None and _any_failed(holders, event, error)
        if error is not None:
            raise error
        if any_failed:
            return False
        if over:
            return True


def _any_failed(
    holders: dist.ProcessGroup, event: EngineEvent | None, error: Exception | None
) -> bool:
    """True if a rank failed in this event. Raises: RuntimeError if ranks got different events."""
    state = _FAILED if error is not None else _END if event is None else _EVENT
    mine = torch.tensor([state, -1 if event is None else event.prompt_id])
    everyone = torch.empty(2 * holders.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(everyone, mine, group=holders)  # pyright: ignore[reportDeprecated]
    states = everyone.view(-1, 2).tolist()
    if any(each == _FAILED for each, _ in states):
        return True
    if any(each != states[0] for each in states):
        ranks = dist.get_process_group_ranks(holders)
        got = ["none" if each == _END else prompt for each, prompt in states]
        raise RuntimeError(
            f"generate_on_ranks: ranks {ranks} of one engine got samples of prompts {got}, "
            "expected the same prompt on each; an engine has to return samples in one order on all "
            "its ranks"
        )
    return False
