"""Rules on the samples of a trajectory; a sample that breaks one is refused, never repaired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pyrl_ext.rollout.turns.trajectory import continues
from pyrl_ext.rollout.versions import newest
from pyrl_ext.samples import Sample


def check_trajectories(samples: Iterable[Sample]) -> None:
    """Check each trajectory of the samples of a batch; see `check_trajectory`."""
    trajectories: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        trajectories[sample.prompt_id, sample.index].append(sample)
    for trajectory in trajectories.values():
        check_trajectory(trajectory)


def check_trajectory(samples: Sequence[Sample]) -> None:
    """Refuse the samples of one trajectory if they do not fit together.

    - Each sample agrees with itself: log-probs and loss on sampled tokens alone, turns that sample
      at least one token each, in order (`Sample.check`).
    - The turns of all samples are 0, 1, 2, ..., each once, in order.
    - The last sample, and no other, ends the trajectory.
    - Weight versions do not fall where a sample continues the one before. Conversations of an agent
      go on side by side: only the versions that they begin with do not fall.
    - Reward and reason to end are the same on all.

    Raises:
        ValueError: naming the trajectory and the turn
    """
    turn = 0
    where = ""

    def need(ok: bool, found: str, rule: str) -> None:
        if not ok:
            raise ValueError(f"{where}: {found}, expected {rule}")

    for place, sample in enumerate(samples):
        where = f"trajectory (prompt {sample.prompt_id}, sample {sample.index}), turn {turn}"
        need(sample.turn == turn, f"its sample begins with turn {sample.turn}", f"turn {turn}")
        several = len(samples) > 1
        need(bool(sample.spans) or not several, "no spans", "those of its turns' tokens")
        sample.check()
        turn += max(1, len(sample.spans))
        last = place == len(samples) - 1
        rule = "the last sample of the trajectory, and no other, to be marked"
        need(sample.last == last, f"last {sample.last} at sample {place} of {len(samples)}", rule)
    for before, sample in pairwise(samples):
        where = f"trajectory (prompt {sample.prompt_id}, sample {sample.index}), turn {sample.turn}"
        oldest = newest(before) if continues(before, sample) else before.weight_version
        versions = oldest, sample.weight_version
        need(
            versions[0] <= versions[1],
            f"weight version {versions[1]} after {versions[0]}",
            "none lower",
        )
        same = before.finish_reason == sample.finish_reason
        need(same, f"finish_reason {sample.finish_reason}", f"{before.finish_reason} as before")
        rewards = before.reward, sample.reward
        equal = rewards[0] == rewards[1] or all(r != r for r in rewards)
        need(equal, f"reward {rewards[1]}", f"{rewards[0]} as the turns before")
