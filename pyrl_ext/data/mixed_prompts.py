"""Prompts of several sources, mixed by weight."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from pyrl_ext.prompt import Prompt
from pyrl_ext.schedule.shares import Shares


class Prompts(Protocol):
    """A stream of training prompts, and held-out ones."""

    def take(self, step: int, n: int, first: int | None = None) -> list[Prompt]:
        """The n prompts of a training step; the same for the same (seed, step, n).

        Args:
            first: place of the first one in the stream, the id of which it is; None: step * n. A
                task draws by step instead
        """
        ...

    def held_out(self, n: int) -> list[Prompt]:
        """The first n prompts that are never trained on; ids are -1, -2, ..."""
        ...


class MixedPrompts:
    """One stream out of several. Each of its places belongs to one source (`Shares`), which
    continues where it stopped before, so the prompts follow from the number of a step.

    Args:
        sources: by name
        weights: of the sources
        seed: of the order within a step
    """

    def __init__(self, sources: Mapping[str, Prompts], weights: Mapping[str, float], seed: int = 0):
        self.sources = dict(sorted(sources.items()))  # a config may list them in another order
        self.seed = seed
        self._shares = Shares({name: weights[name] for name in self.sources})

    def take(self, step: int, n: int, first: int | None = None) -> list[Prompt]:
        """See `Prompts.take`; sources are shuffled, so that engines and minibatches get all."""
        start = step * n if first is None else first
        before = self._shares.before(start)
        owners = self._shares.owners(start, n)
        taken: list[Prompt] = []
        for name, source in self.sources.items():
            ids = [start + place for place, owner in enumerate(owners) if owner == name]
            own = source.take(step, len(ids), before[name])
            taken += [replace(p, id=id_, source=name) for p, id_ in zip(own, ids, strict=True)]
        random.Random(f"{self.seed}/mixed/{step}").shuffle(taken)
        return taken

    def held_out(self, n: int) -> list[Prompt]:
        """See `Prompts.held_out`: of each source its share."""
        found: list[Prompt] = []
        for name, count in self._shares.before(n).items():
            own = self.sources[name].held_out(count)
            found += [replace(p, source=name) for p in own]
        return [replace(p, id=-1 - i) for i, p in enumerate(found)]

    def source_of(self, prompt_id: int) -> str:
        """Name of the source of a training prompt."""
        return self._shares.owners(prompt_id, 1)[0]
