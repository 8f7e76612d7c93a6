"""Dynamic sampling: groups without a spread of rewards are replaced by those of further prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.parallel.collective_errors import AgreedError
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.rollout.prompt_groups import Counts, need_share
from pyrl_ext.samples import Prompt

# (round from 0, prompts to ask for, groups kept so far) -> the samples of those prompts
Ask = Callable[[int, int, int], RolloutSamples]

_REFILLS = 1 << 20  # prompts of refills are those of steps from here on, which no run reaches


Show = Callable[[str], None] | None


def sample_groups(
    plan: Plan,
    step: int,
    take: Callable[[int, int], Sequence[Prompt]],
    generate: Callable[[Sequence[Prompt], int, Show], RolloutSamples],
    show: Show,
    min_share: float,
) -> tuple[RolloutSamples, dict[str, float]]:
    """The samples of a step under ``objective.dynamic_sampling``, and metrics; see `fill`.

    Args:
        take: (step, n) -> prompts.
        generate: (prompts, their number, show) -> samples.
        show: takes a line of text as samples come.
        min_share: as of `fill`.
    """
    keep = plan.batching.prompts
    rounds = plan.objective.dynamic_sampling

    def ask(number: int, asked: int, found: int) -> RolloutSamples:
        def show_round(text: str) -> None:
            assert show is not None
            show(f"refill {number} of {rounds}, {found} of {keep} groups kept; {text}")

        prompts = take(stream_step(step, number, rounds), keep)[:asked]
        return generate(prompts, asked, show_round if show is not None and number else show)

    hold = plan.rollout.record is not None
    return fill(ask, keep, rounds, plan.objective.dynamic_sampling_shortage, hold, min_share)


def stream_step(step: int, number: int, rounds: int) -> int:
    """The step whose prompts round ``number`` of ``step`` asks for, of at most ``rounds`` refills.

    Round 0 has the step's own prompts, so an epoch goes through them as without refills. It follows
    from its arguments alone: a resumed run needs no cursor.
    """
    return step if not number else _REFILLS + step * rounds + number - 1


def fill(
    ask: Ask,
    keep: int,
    rounds: int,
    shortage: Literal["keep_flat", "fail"],
    hold: bool = False,
    min_share: float = 0.0,
) -> tuple[RolloutSamples, dict[str, float]]:
    """``keep`` groups whose rewards are not all equal: the first ones, in the order of prompts.

    Round 0 asks for ``keep`` prompts, a refill for as many as the share of kept groups lets expect
    to be enough, and at most ``keep``. All follows from indices that every rank has, so ranks agree
    on what is kept.

    Args:
        ask: groups of a round; ids of prompts are distinct over all rounds.
        rounds: most refills.
        shortage: what happens where there are fewer such groups; keep_flat adds the first of the
            others.
        hold: ``dropped`` of the result holds all other samples; else they are freed at once.
        min_share: as of `RolloutRequest`, of all rounds together.

    Returns: the kept samples; and metrics.
    Raises: AgreedError if there are too few and ``shortage`` is fail, or too few trajectories left.
    """
    drawn: list[RolloutSamples] = []
    varied: list[int] = []
    flat: list[int] = []
    kept_flat: list[int] = []
    chosen: set[int] = set()
    missing = asked = keep
    while missing > 0 and len(drawn) <= rounds:
        drawn.append(ask(len(drawn), asked, len(varied)))
        for group, equal in drawn[-1].index.flat_groups.items():
            (flat if equal else varied).append(group)
        missing = max(0, keep - len(varied))
        kept_flat = flat[:missing] if shortage == "keep_flat" else []
        chosen = {*varied[:keep], *kept_flat}
        for each in () if hold else drawn:
            each.samples[:] = [s for s in each.samples if s.prompt_id in chosen]
        seen = max(1, len(varied) + len(flat))  # a round may lose all its responses
        asked = min(keep, math.ceil(missing * seen / max(1, len(varied))))
    counts = Counts()
    for each in drawn:
        counts.add_round(each.counts)
    need_share(counts, min_share)
    if len(chosen) < keep:
        raise AgreedError(
            f"dynamic sampling: {len(varied)} groups with unequal rewards and {len(flat)} with "
            f"equal ones after {rounds} refills, expected {keep} with unequal ones. Take prompts "
            "that are neither solved nor hopeless, raise objective.dynamic_sampling, or train on "
            "the others too: objective.dynamic_sampling_shortage: keep_flat"
        )
    return _joined(drawn, counts, chosen, len(flat), len(kept_flat))


def _joined(
    drawn: list[RolloutSamples], counts: Counts, kept: set[int], flat: int, kept_flat: int
) -> tuple[RolloutSamples, dict[str, float]]:
    """The samples of ``kept`` groups out of all rounds, and metrics of those that were drawn."""
    order = [group for each in drawn for group in dict.fromkeys(each.index.groups.tolist())]
    indices = [each.index for each in drawn]
    samples = [s for each in drawn for s in each.samples]
    index = BatchIndex.joined(indices, [group for group in order if group in kept])
    generated = BatchIndex.joined(indices, order)
    rewards = np.concatenate([each.rewards[each.firsts] for each in indices])
    whole = sum(int(each.sampled.sum()) for each in indices)
    metrics = {
        "rollout/flat_groups": flat / len(order),
        "rollout/flat_groups_kept": kept_flat,
        "rollout/refills": len(drawn) - 1,
        "rollout/dropped_groups": len(order) - len(kept),
        "rollout/dropped_tokens": whole - int(index.sampled.sum()),
        "rollout/reward_all": float(rewards.mean()),
    }
    mine = [s for s in samples if s.prompt_id in kept]
    dropped = [s for s in samples if s.prompt_id not in kept]
    return RolloutSamples(index, mine, counts, dropped, generated), metrics
