"""The protocol of rollout engines: Prompt and Sampling go in, Sample comes out.

An engine is any object with the `Engine` protocol. There are three: `hf.HFEngine` (embedded, on
transformers), `recorded.RecordedEngine` (replays stored batches) and `vllm.VLLMEngine`; any of them
can run in a separate process, as a `process.client.ProcessEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pyrl_ext.samples import Prompt, Sample, Sampling, Turn


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine; a plan that needs more is refused before it starts.

    Args:
        routes: samples carry routed experts
        weights: `load_weights` changes what it generates (False for recorded batches)
        images: it generates from prompts with images
        sampling_mask: samples carry the tokens kept by top-p and top-k, if `Sampling` asks for them
        turns: `Engine.answer` continues trajectories with what it computed of their contexts
        concurrent: several streams and answers, from several threads, may be open at once, and stay
            open while weights are loaded
    """

    routes: bool
    weights: bool = True
    images: bool = False
    sampling_mask: bool = False
    turns: bool = False
    concurrent: bool = False


# Samples of the first rank -> of each, the mean |log-prob difference| to the trainer's forward and,
# by layer, the share of its experts that the trainer's routers do not choose. All ranks call it.
ScoreCanaries = Callable[[Sequence[Sample]], list[tuple[float, Mapping[int, float]]]]


class TurnFeed(Protocol):
    """Turns that come while an engine runs: answers lead to further turns."""

    @property
    def trajectories(self) -> int:
        """At most so many turns wait or run at once."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest context and response together."""
        ...

    def take(self, wait: bool) -> list[Turn] | None:
        """The turns that came since the last call; None: none will come any more.

        Args:
            wait: until there is a turn, or none will come.
        """
        ...

    def fileno(self) -> int:
        """A file that can be read as soon as `take` has something to return."""
        ...


class AllAtOnce:
    """The turns of a stream: one of each sample, and none later."""

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
        raise NotImplementedError("AllAtOnce.fileno: nothing comes later, expected no wait")


class Engine(Protocol):
    """Generates samples from weights. A class that inherits it gets `generate`, and either of
    `stream` and `answer`.

    Attributes:
        score_canaries: set by a trainer, for engines that prove that they have its weights
    """

    score_canaries: ScoreCanaries | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of this engine."""
        ...

    def load_weights(
        self, named: Iterable[tuple[str, Tensor]], version: int, only: Collection[str] | None = None
    ) -> None:
        """Takes new weights, under the names of the model's Hugging Face safetensors.

        Args:
            named: (name, tensor); a tensor from another process is valid until the next is asked
                for
            version: of these weights, kept on each sample
            only: names of the tensors that are sent, the others stay unchanged; None: all
        """
        ...

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        """Draws `samples_per_prompt` responses to every prompt; yields samples as they finish.

        The order depends on weights, prompts and sampling, not on time, so all ranks that hold an
        engine together see the same order. Closing the stream aborts what still runs.
        """
        yield from self.answer(AllAtOnce(prompts, sampling), sampling)

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Samples every turn of ``feed``; each yields one sample, whose prompt is its context.

        A token depends on the trajectory and on its place, not on
        the turns that run at the same time. Closing the stream aborts what still runs.

        Args:
            feed: asked for turns between forward passes
            sampling: ``samples_per_prompt`` and ``max_new_tokens`` are the feed's
        """
        raise RuntimeError(f"{type(self).__name__}.answer: it samples no turns")

    def verify_weights(self, check: Callable[[], None]) -> None:
        """Calls ``check``, which compares the weights of the last load: at once, or in a thread
        that `samples_stale` waits for."""
        check()

    def samples_stale(self) -> bool:
        """True if samples that came since the last `load_weights` may be of other weights. They
        must not be used; those that come from now on may. Every rank has to call it."""
        return False

    def checksums(self, names: Sequence[str] | None) -> dict[str, int]:
        """Name -> digest (`ops.digest.digest`) of the tensors of the last load, in the type they
        came in or in the engine's.

        Args:
            names: checkpoint names; None: all, and the engine's internal tensors under names it
                chooses
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers of the engine up to the last `load_weights`, of all ranks."""
        return {}

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """All samples of `stream`, prompt by prompt, index by index."""
        return in_order(self.stream(prompts, sampling), prompts)

    def sleep(self) -> int:
        """Frees the memory of weights and caches until the next `load_weights`; returns bytes."""
        ...

    def close(self) -> None:
        """Ends what the engine has started; it cannot generate afterwards."""
        ...


def require_weights(call: str, version: int | None, refusal: str) -> int:
    """The version of complete weights. Raises RuntimeError without them; ``refusal`` says why."""
    if version is None:
        raise RuntimeError(f"{call}: {refusal}, expected a load_weights that succeeded")
    return version


def need_processor(call: str, prompts: Iterable[Prompt], scale: object) -> None:
    """Raises ValueError if a prompt has images and there is no image processor's ``scale``."""
    for prompt in prompts:
        if prompt.images and scale is None:
            raise ValueError(
                f"{call}(prompt {prompt.id}): {len(prompt.images)} images, expected none: "
                "the engine was built without an image processor"
            )


def agreed_digests(found: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The digests that the parts of an engine report; 0, which matches nothing, where they differ.

    Args:
        found: name -> digest, of each part; a part may hold some of the tensors
    """
    merged = dict[str, int]()
    differing = list[str]()
    for each in found:
        differing += [name for name, number in each.items() if merged.get(name, number) != number]
        merged |= each
    return merged | dict.fromkeys(differing, 0)


def replaced(call: str, version: int | None) -> RuntimeError:
    """Error for weights that changed while a stream was open."""
    return RuntimeError(
        f"{call}: version {version} of the weights was replaced while a stream of it was open, "
        "expected the stream closed before"
    )


def incomplete(engine: str, only: Collection[str], refusal: str) -> RuntimeError:
    """Error for a partial update of an engine without complete weights."""
    return RuntimeError(
        f"{engine}.load_weights: {len(only)} tensors are to replace those of earlier weights, but "
        f"{refusal}, expected complete weights"
    )


def in_order(samples: Iterable[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
    """The samples of these prompts, prompt by prompt, index by index."""
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    return sorted(samples, key=lambda s: (places[s.prompt_id], s.index, s.turn))
