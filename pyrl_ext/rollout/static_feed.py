"""The samples of a stream as turns: every engine has one mechanism for both."""

from __future__ import annotations

from collections.abc import Sequence

from pyrl_ext.samples import Prompt, Sampling, Turn


class AllAtOnce:
    """The turns of a stream, as a feed: one of each sample, none later."""

    def __init__(self, prompts: Sequence[Prompt], sampling: Sampling):
        budget = sampling.max_new_tokens
        group = range(sampling.samples_per_prompt)
        self._turns: list[Turn] | None = [Turn(p, i, 0, budget) for p in prompts for i in group]
        self.trajectories = len(self._turns)
        self.max_tokens = max((len(p.tokens) for p in prompts), default=0) + budget

    def take(self, wait: bool) -> list[Turn] | None:
        turns = self._turns
        self._turns = None
        return turns

    def fileno(self) -> int:
        raise NotImplementedError("AllAtOnce.fileno: there is never anything to wait for")
