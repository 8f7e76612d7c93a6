"""Rules on the samples of a trajectory; a sample that breaks one is refused, never repaired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

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
    - Their weight versions do not fall; reward and reason to end are the same on all.

    Raises:
        ValueError: naming the trajectory and the turn
    """
    turn = 0
    before = samples[0]
    for place, sample in enumerate(samples):
        last = place == len(samples) - 1
        version = newest(before)
        same_reward = before.reward == sample.reward or before.reward != before.reward
        marked = "the last sample of the trajectory, and no other, to be marked"
        rules = [
            (sample.turn == turn, f"its sample begins with turn {sample.turn}", f"turn {turn}"),
            (sample.spans or len(samples) == 1, "no spans", "those of its turns' tokens"),
            (
                sample.last == last,
                f"last {sample.last} at sample {place} of {len(samples)}",
                marked,
            ),
            (
                place == 0 or version <= sample.weight_version,
                f"weight version {sample.weight_version} after {version}",
                "none lower",
            ),
            (
                before.finish_reason == sample.finish_reason,
                f"finish_reason {sample.finish_reason}",
                f"{before.finish_reason} as before",
            ),
            (same_reward, f"reward {sample.reward}", f"{before.reward} as the turns before"),
        ]
        where = f"trajectory (prompt {sample.prompt_id}, sample {sample.index}), turn {turn}"
        for holds, fault, rule in rules:
            if not holds:
                raise ValueError(f"{where}: {fault}, expected {rule}")
        sample.check()
        turn += max(1, len(sample.spans))
        before = sample
