"""An engine that generates for several threads at once while its weights change."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.engines import random_sample


class BusyEngine(Engine):
    """Samples come in a random order after random waits; each token is of the version of its time.

    Args:
        seed: of order, lengths and waits
        longest: wait for a sample [s]
        fails: prompt whose group raises
        error: that it raises; None: a ValueError
        held: it generates nothing of a step that `let` did not name
        wrong: version of which the first samples must not be used
    """

    def __init__(
        self,
        seed: int,
        longest: float = 0.002,
        fails: int | None = None,
        wrong: int | None = None,
        error: BaseException | None = None,
        held: bool = False,
    ):
        self.let_go = threading.Condition()
        self.named = set[int]()
        self.held = held
        self.wrong = wrong
        self.error = error
        self.random = random.Random(seed)
        self.longest = longest
        self.fails = fails
        self.version = -1
        self.lock = threading.Lock()
        self.begun: dict[int, int] = {}  # prompt id -> version
        self.threads: set[str] = set()
        self.given: list[Sample] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(routes=True, concurrent=True)

    def let(self, step: int) -> None:
        with self.let_go:
            self.named.add(step)
            self.let_go.notify_all()

    def load_weights(self, named: Any, version: int, only: Any = None) -> None:
        self.version = version

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        group = range(sampling.samples_per_prompt)
        self.threads.add(threading.current_thread().name)
        with self.lock:
            jobs = [(p.id, i, self.random.random() * self.longest) for p in prompts for i in group]
            self.random.shuffle(jobs)
            self.begun |= {p.id: self.version for p in prompts}
        first = self.version
        with self.let_go:
            self.let_go.wait_for(lambda: not self.held or sampling.step in self.named)
        for prompt, index, wait in jobs:
            time.sleep(wait)
            if prompt == self.fails:
                raise self.error or ValueError(f"no paper for prompt {prompt}")
            sample = of_versions(random_sample(prompt, index, 8), first, self.version)
            self.given.append(sample)
            yield sample

    def samples_stale(self) -> bool:
        if self.version != self.wrong:
            return False
        self.wrong = None
        self.begun = {}
        return True

    def checksums(self, names: Any) -> dict[str, int]:
        return {}

    def sleep(self) -> int:
        return 0

    def close(self) -> None: ...


def of_versions(sample: Sample, first: int, last: int) -> Sample:
    """``sample``, one token of which is of version ``first``, the others of ``last``."""
    size = sample.tokens.numel()
    seam = sample.prompt_len + 1
    spans = ((sample.prompt_len, seam, first), (seam, size, last))
    spans = spans if first < last else ()
    mask = torch.arange(size) >= sample.prompt_len
    return replace(
        sample, weight_version=first, version_spans=spans, loss_mask=mask, reward=1.0
    ).check()
