"""Rollouts: what goes into an engine (Prompt, Sampling) and what comes out (Sample).

An engine is any object with the `Engine` protocol. Three are here: `hf.HFEngine` (embedded, on
transformers), `recorded.RecordedEngine` (replays stored batches) and `vllm.VLLMEngine`; any of them
runs in a process of its own as a `process.client.ProcessEngine`.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pyrl_ext.samples import Prompt, Sample, Sampling, route_dtype

__all__ = ["Capabilities", "Engine", "Prompt", "Sample", "Sampling", "in_order", "route_dtype"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, so that a plan that needs more is refused before it starts.

    Args:
        routes: samples carry routed experts
        logprobs: kinds of log-prob it can report: "processed" (after temperature, top-k and top-p:
            of the distribution the token was drawn from), "raw" (of the model)
        top_p, top_k, greedy: it obeys these sampling fields
        weights: `load_weights` changes what it generates (False for recorded batches)
    """

    routes: bool
    logprobs: frozenset[str] = frozenset({"processed"})
    top_p: bool = True
    top_k: bool = True
    greedy: bool = True
    weights: bool = True


class Engine(Protocol):
    """Generates samples from weights. Engines that inherit it have `generate`."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        ...

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Takes new weights, under the names of the model's Hugging Face safetensors.

        Args:
            only: names of those that come, the others stay as they are; None: all come
        """
        ...

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        """Yields samples as they finish; closing it aborts what still runs.

        The order is a function of weights, prompts and sampling, not of time, so that ranks that
        hold an engine together see the same one.
        """
        ...

    def checksums(self, names: Sequence[str] | None) -> dict[str, int]:
        """Name -> digest (`digest.digest`) of the tensors of the last load, as the engine took
        them: in the type they came in, or in its own.

        Args:
            names: of the checkpoint's tensors; None: all, and what else it computes with, under
                names of its own
        """
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """All samples of `stream`, prompt by prompt, index by index."""
        return in_order(self.stream(prompts, sampling), prompts)

    def sleep(self) -> int:
        """Gives the memory of weights and caches back until the next `load_weights`; bytes."""
        ...

    def close(self) -> None:
        """Ends what the engine has started; it does not generate any more."""
        ...


def need_weights(call: str, version: int | None, refusal: str) -> None:
    """Raises RuntimeError where an engine holds no complete weights; ``refusal`` says why."""
    if version is None:
        raise RuntimeError(f"{call}: {refusal}, expected a load_weights that succeeded")


def incomplete(engine: str, only: Collection[str], refusal: str) -> RuntimeError:
    """For an engine that is to keep weights which it does not have."""
    return RuntimeError(
        f"{engine}.load_weights: {len(only)} tensors were to come beside the others, of which "
        f"{refusal}, expected all"
    )


def in_order(samples: Iterable[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
    """The samples of these prompts, prompt by prompt, index by index."""
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    return sorted(samples, key=lambda sample: (places[sample.prompt_id], sample.index))
