"""An engine whose tokens follow from (prompt id, index, place): for conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from pyrl_ext.rollout.engine import Capabilities, Engine, TurnFeed
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn, kept_counts

LAYERS = (1, 2)


class ScriptedEngine(Engine):
    """Answers turns in batches of ``together``; routes of a row follow from its token and place.

    Args:
        script: (prompt id, index, place) -> token
        rerouted: (turn, place) of rows whose routes that turn reports differently
        unrouted: the same, of rows that it reports no routes for
    """

    def __init__(
        self,
        script: Callable[[int, int, int], int],
        together: int = 4,
        rerouted: Collection[tuple[int, int]] = (),
        unrouted: Collection[tuple[int, int]] = (),
    ):
        self.script = script
        self.together = together
        self.rerouted = rerouted
        self.unrouted = unrouted
        self.version = 0
        self.turns: list[Turn] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(routes=True, turns=True)

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        self.version = version

    def checksums(self, names: Sequence[str] | None) -> dict[str, int]:
        return {}

    def sleep(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        for prompt in prompts:
            for index in range(sampling.samples_per_prompt):
                yield self.sampled(Turn(prompt, index, 0, sampling.max_new_tokens), sampling)

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        waiting: list[Turn] = []
        while True:
            turns = feed.take(wait=not waiting)
            if turns is None and not waiting:
                return
            waiting += turns or []
            self.turns += turns or []
            now = waiting[: self.together]
            waiting = waiting[self.together :]
            for turn in now:
                yield self.sampled(turn, sampling)

    def sampled(self, turn: Turn, sampling: Sampling) -> Sample:
        """The sample of one turn."""
        known = list(turn.prompt.tokens)
        new = list[int]()
        while len(new) < turn.max_new_tokens and not (new and new[-1] in sampling.stop_ids):
            new.append(self.script(turn.prompt.id, turn.index, len(known) + len(new)))
        tokens = torch.tensor(known + new)
        mask = torch.arange(len(tokens)) >= len(known)
        routed = torch.arange(len(tokens)) < len(tokens) - 1
        routes = torch.tensor([[self._route(t, p)] * 2 for p, t in enumerate(tokens.tolist())])
        for number, place in self.rerouted:
            if number == turn.number:
                routes[place] = 7 - routes[place]
        for number, place in self.unrouted:
            routed[place] &= number != turn.number
        return Sample(
            prompt_id=turn.prompt.id,
            index=turn.index,
            tokens=tokens,
            prompt_len=len(known),
            loss_mask=mask,
            rollout_logprobs=torch.where(mask, -0.5 - tokens / 100, 0.0),
            routes=routes.to(torch.uint8),
            layer_ids=LAYERS,
            route_mask=routed,
            weight_version=self.version,
            finish_reason="stop" if new[-1] in sampling.stop_ids else "length",
            turn=turn.number,
            **self._kept(known, new) if sampling.sampling_mask else {},
        )

    def _kept(self, known: list[int], new: list[int]) -> dict[str, Any]:
        """Each token was drawn from itself and, at even places, from the next id as well."""
        places = range(len(known), len(known) + len(new))
        sets = [[t, t + 1] if place % 2 == 0 else [t] for t, place in zip(new, places)]
        return {
            "kept_counts": kept_counts(sets, len(known)),
            "kept_ids": torch.tensor([t for each in sets for t in each], dtype=torch.int32),
        }

    def _route(self, token: int, place: int) -> list[int]:
        first = crc32(b"%d/%d" % (token, place)) % 4
        return [first, first + 4]
