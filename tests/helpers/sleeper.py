"""Engines without a model, for tests to start in another process: a slow one, one that echoes."""

import time
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from pyrl_ext.rollout.engine import Capabilities, Engine, TurnFeed
from pyrl_ext.samples import Sample, Sampling


class Sleeper(Engine):
    """It sleeps as many seconds as the sampling's seed says, and has no samples."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(routes=False)

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int, only=None) -> None:
        for _ in named:
            time.sleep(0.001)

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Waits until no turn will come."""
        while feed.take(wait=True) is not None:
            continue
        time.sleep(sampling.seed)
        yield from ()

    def close(self) -> None: ...


class Echo(Sleeper):
    """Answers a turn with one token, the number of its trajectory."""

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        while (turns := feed.take(wait=True)) is not None:
            for turn in turns:
                context = len(turn.prompt.tokens)
                place = torch.arange(context + 1)
                yield Sample(
                    prompt_id=turn.prompt.id,
                    index=turn.index,
                    tokens=torch.tensor([*turn.prompt.tokens, turn.index]),
                    prompt_len=context,
                    loss_mask=place >= context,
                    rollout_logprobs=torch.zeros(context + 1),
                    routes=None,
                    layer_ids=(),
                    route_mask=torch.zeros(context + 1, dtype=torch.bool),
                    weight_version=0,
                    finish_reason="length",
                    turn=turn.number,
                )


def unbuildable(message: str) -> Sleeper:
    raise ImportError(message)
