"""A slow engine that does little else, for tests to start in another process."""

import time
from collections.abc import Generator, Iterable, Sequence

from torch import Tensor

from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.samples import Prompt, Sample, Sampling


class Sleeper(Engine):
    """Its stream sleeps as many seconds as the sampling's seed says, and has no samples."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(routes=False)

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int, only=None) -> None:
        for _ in named:
            time.sleep(0.001)

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        time.sleep(sampling.seed)
        yield from ()

    def close(self) -> None: ...


def unbuildable(message: str) -> Sleeper:
    raise ImportError(message)
