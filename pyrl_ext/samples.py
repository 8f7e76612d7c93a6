"""The types that engine and trainer exchange: Prompt and Sampling go in, Sample comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.plan.model.route_ids import route_id_dtype
from pyrl_ext.prompt import Image, Prompt

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of responses.

    One random stream exists per (seed, prompt id, sample index, token position), so a sample does
    not depend on which other prompts it was generated with.

    Args:
        max_new_tokens: response budget [tokens]
        temperature: logits are divided by it, > 0
        top_p: smallest set of tokens whose probabilities reach it is kept, in (0, 1]
        top_k: number of most likely tokens kept; 0 = all
        stop_ids: the first of these that is sampled ends the response and is part of it
        stop: texts; the token that completes one of them in the response's text ends it and is
            part of it
        samples_per_prompt: group size
        seed: already mixed with the training step by the caller
        greedy: argmax instead of a draw; log-probs are then those of the unfiltered model
        sampling_mask: samples carry the tokens that top_k and top_p kept (not with greedy)
        step: that trains on the samples, by which recorded ones are found; None: it is not known

    Raises:
        ValueError: a field outside its range
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    samples_per_prompt: int = 1
    seed: int = 0
    greedy: bool = False
    sampling_mask: bool = False
    step: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 < self.temperature < math.inf, "a finite number > 0"),
            "top_p": (0 < self.top_p <= 1, "a number in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or a positive count"),
            "stop": (all(self.stop), "texts of at least one character"),
            "samples_per_prompt": (self.samples_per_prompt >= 1, "at least 1"),
        }
        for name, (ok, rule) in rules.items():
            if not ok:
                raise ValueError(f"Sampling.{name}: {getattr(self, name)!r}, expected {rule}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One response that an engine is asked for, within a trajectory.

    Args:
        prompt: its tokens are the turn's whole context; id and images are the trajectory's
        index: of the trajectory in its group
        number: of the turn, from 0
        max_new_tokens: response budget of the turn [tokens]
        branch: conversation of the trajectory that the turn continues, from 0
    """

    prompt: Prompt
    index: int
    number: int
    max_new_tokens: int
    branch: int = 0

    @property
    def stream(self) -> int:
        """Names the random stream in the group: conversations of a trajectory draw independently,
        also at the same positions."""
        return self.index + (self.branch << 32)


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory or a part of it, stored by token: entry t of every field describes tokens[t].

    A trajectory of one turn is a prompt and a response. With several turns its tokens are of three
    kinds: of the prompt (the first ``prompt_len``), sampled by the policy (those in ``spans``), and
    observed, which the environment answered (all others).

    Args:
        prompt_id: trajectories of one prompt form a group
        index: 0..samples_per_prompt-1, of the trajectory in its group
        tokens: [T] int64, prompt then response
        prompt_len: number of prompt tokens, 1 <= prompt_len < T
        loss_mask: [T] bool, tokens the policy chose and is trained on
        rollout_logprobs: [T] float32, log p(tokens[t] | tokens[:t]) under the distribution the
            token was drawn from; 0 where nothing was sampled
        routes: [T, L, K] narrowest unsigned type (uint8 up to 256 experts, else uint16), experts
            that processed token t as an input; None if the engine reports none
        layer_ids: [L] 0-based global ids of the layers that have a router
        route_mask: [T] bool, tokens that have a route (the last token never was an input)
        weight_version: of the weights that generated the sample, of several the oldest
        finish_reason: "stop" (a stop token was sampled or a stop string is complete) or
            "length" (the budget ran out)
        reward: nan until it is computed
        components: of the reward by name, where the reward function names any
        images: of the prompt, in the order of their tokens; samples of a group share them
        turn: number of the first turn that the sample holds
        spans: tokens [begin, end) that each of its turns sampled, in order; empty: one turn, all
            tokens after the prompt
        last: whether the trajectory ends with this sample
        kept_counts: [T] int32, number of tokens that token t was drawn from; -1: all of the
            vocabulary, as where nothing was sampled. None: all of it everywhere
        kept_ids: [sum of counts >= 0] int32, these tokens, token by token, rising in each
        version_spans: (begin, end, version), tokens that these weights sampled, in order; together
            all sampled tokens. Empty: weight_version sampled all of them
        masked: rows whose routes the engine gave, and route_mask leaves out on purpose
        passes: forward passes of the engine that sampled tokens of it; 0: they were not counted
    """

    prompt_id: int
    index: int
    tokens: Tensor
    prompt_len: int
    loss_mask: Tensor
    rollout_logprobs: Tensor
    routes: Tensor | None
    layer_ids: tuple[int, ...]
    route_mask: Tensor
    weight_version: int
    finish_reason: str
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    images: tuple[Image, ...] = ()
    turn: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    last: bool = True
    kept_counts: Tensor | None = None
    kept_ids: Tensor | None = None
    version_spans: tuple[tuple[int, int, int], ...] = ()
    masked: int = 0
    passes: int = 0

    @property
    def versions(self) -> Tensor:
        """[T] int32, of the weights that sampled each token; the oldest where none was sampled."""
        found = torch.full_like(self.tokens, self.weight_version, dtype=torch.int32)
        for begin, end, version in self.version_spans:
            found[begin:end] = version
        return found

    @property
    def response(self) -> list[int]:
        """Token ids after the prompt."""
        return cast(list[int], self.tokens[self.prompt_len :].tolist())  # pyright: ignore

    def check(self) -> Sample:
        """Returns the sample if its fields agree with each other.

        Raises:
            ValueError: naming the prompt, the sample and, where there is one, the token
        """
        size = self.tokens.numel()
        self._shaped("tokens", torch.int64)
        self._need(
            1 <= self.prompt_len < size,
            f"prompt_len {self.prompt_len} of {size} tokens",
            "at least one prompt token and at least one response token",
        )
        self._shaped("loss_mask", torch.bool)
        self._shaped("rollout_logprobs", torch.float32)
        self._shaped("route_mask", torch.bool)
        reasons = ", ".join(FINISH_REASONS)
        reason = self.finish_reason
        self._need(reason in FINISH_REASONS, f"finish_reason {reason!r}", f"one of {reasons}")
        self._check_tokens()
        self._check_spans()
        self._check_kept()
        self._check_routes()
        self._check_images()
        return self

    def _check_tokens(self) -> None:
        logprobs = self.rollout_logprobs
        mask = self.loss_mask
        self._first(~torch.isfinite(logprobs), logprobs, "log-prob", "a finite number")
        self._first(logprobs > 1e-5, logprobs, "log-prob", "a number <= 0")
        self._first((logprobs != 0) & ~mask, logprobs, "log-prob", "0 where nothing was sampled")
        self._first(self.tokens < 0, self.tokens, "token id", "a number >= 0")
        prompt = torch.arange(mask.numel(), device=mask.device) < self.prompt_len
        self._first(mask & prompt, mask, "loss_mask", "False on prompt tokens")

    def _check_spans(self) -> None:
        spans = self.spans or ((self.prompt_len, self.tokens.numel()),)
        labels = [f"turn {number} sampled" for number in range(self.turn, self.turn + len(spans))]
        sampled = self._covered(spans, labels, self.prompt_len)
        first = spans[0][0]
        self._need(first == self.prompt_len, f"turn {self.turn} begins at {first}", "prompt_len")
        rule = "False on observed tokens"
        self._first(self.loss_mask & ~sampled, self.loss_mask, "loss_mask", rule)
        if not self.version_spans:
            return
        versions = [version for _, _, version in self.version_spans]
        labels = [f"version {version} of" for version in versions]
        ranges = [(begin, end) for begin, end, _ in self.version_spans]
        covered = self._covered(ranges, labels, 0)
        before = [self.weight_version, *versions]
        for version, least, (begin, end) in zip(versions, before, ranges, strict=False):
            self._need(
                versions[0] == self.weight_version and version >= least,
                f"version {version} of tokens {begin} to {end - 1}",
                "weight_version first, and none lower than before",
            )
        rule = "one where a token was sampled, and nowhere else"
        self._first(covered != sampled, covered, "a version", rule)

    def _covered(
        self, ranges: Sequence[tuple[int, int]], labels: Sequence[str], start: int
    ) -> Tensor:
        """[T] bool, tokens in ranges [begin, end), which follow each other from ``start`` on."""
        covered = torch.zeros_like(self.loss_mask)
        size = len(covered)
        for (begin, end), label in zip(ranges, labels, strict=True):
            self._need(
                start <= begin < end <= size,
                f"{label} tokens {begin} to {end - 1}",
                f"at least one token from {start} on, of {size}",
            )
            covered[begin:end] = True
            start = end
        return covered

    def _check_kept(self) -> None:
        counts = self.kept_counts
        ids = self.kept_ids
        if counts is None or ids is None:
            self._need(counts is ids, "kept_counts or kept_ids alone", "both or none")
            return
        self._shaped("kept_counts", torch.int32)
        self._need(ids.dtype == torch.int32, f"kept_ids {ids.dtype}", "torch.int32")
        places = torch.arange(len(counts), device=counts.device)
        prompt = places < self.prompt_len
        self._first((counts < -1) | (counts == 0), counts, "kept_counts", "-1 or at least 1")
        self._first((counts > 0) & prompt, counts, "kept_counts", "-1, a prompt")
        rule = "a set where it is trained"
        self._first((counts < 0) & self.loss_mask, counts, "kept_counts", rule)
        tokens = places.repeat_interleave(counts.clamp(min=0))  # of each kept id
        count = len(tokens)
        self._need(len(ids) == count, f"{len(ids)} kept_ids", f"{count}, as kept_counts")
        wrong = ids < 0
        wrong[1:] |= (ids[1:] <= ids[:-1]) & (tokens[1:] == tokens[:-1])
        if bool(wrong.any()):
            token = int(tokens[wrong.nonzero()[0, 0]])
            shown = cast(list[int], ids[tokens == token].tolist())  # pyright: ignore
            self._need(False, f"token {token} was drawn from {shown}", "rising ids >= 0")
        drawn = torch.zeros_like(self.loss_mask)
        drawn[tokens[ids == self.tokens[tokens]]] = True
        rule = "one of the kept_ids it was drawn from"
        self._first((counts > 0) & ~drawn, self.tokens, "token id", rule)

    def _check_routes(self) -> None:
        last = self.route_mask.numel() - 1
        self._need(
            not bool(self.route_mask[last]),
            f"route_mask True at token {last}, the last one",
            "False; the last token never was an input",
        )
        routes = self.routes
        layers = self.layer_ids
        if routes is None:
            empty = not layers and not bool(self.route_mask.any())
            self._need(empty, "routes None", "no layer_ids and an all-False route_mask with it")
            return
        self._need(
            routes.dim() == 3 and routes.shape[:2] == (last + 1, len(layers)),
            f"routes {list(routes.shape)}",
            f"[{last + 1} tokens, {len(layers)} layers, K]",
        )
        self._need(
            routes.dtype in (torch.uint8, torch.uint16),
            f"routes {routes.dtype}",
            "the narrowest unsigned type, uint8 (up to 256 experts) or uint16",
        )
        rising = all(a < b for a, b in pairwise(layers))
        self._need(rising, f"layer_ids {layers}", "rising global layer ids")

    def _check_images(self) -> None:
        start = 0
        for number, image in enumerate(self.images):
            end = image.row + image.rows
            self._need(
                start <= image.row < end <= self.prompt_len,
                f"image {number} at tokens {image.row} to {end - 1}",
                "tokens of the prompt, after those before",
            )
            count = math.prod(image.grid)
            found = f"image {number} with patches {list(image.patches.shape)}"
            self._need(len(image.patches) == count, found, f"{count}, as its grid {image.grid}")
            start = end

    def _shaped(self, name: str, dtype: torch.dtype) -> None:
        """Refuses a field unless it has one entry of this type a token."""
        value = getattr(self, name)
        shape = [self.tokens.numel()]
        found = f"{name} {list(value.shape)} {value.dtype}"
        good = list(value.shape) == shape and value.dtype == dtype
        self._need(good, found, f"{shape} {dtype}, one entry a token")

    def _first(self, bad: Tensor, value: Tensor, field: str, rule: str) -> None:
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            self._need(False, f"token {token} has {field} {value[token].item()}", rule)

    def _need(self, ok: bool, found: str, rule: str) -> None:
        if not ok:
            name = f"Sample(prompt {self.prompt_id}, sample {self.index})"
            raise ValueError(f"{name}: {found}, expected {rule}")


def route_dtype(num_experts: int) -> torch.dtype:
    """Narrowest unsigned type that holds expert ids 0..num_experts-1."""
    return dtype_of(route_id_dtype(num_experts))


def kept_counts(sets: Sequence[Sized], prompt_len: int) -> Tensor:
    """[T] int32, ``Sample.kept_counts`` of a prompt and a response drawn from ``sets``."""
    return torch.tensor([-1] * prompt_len + [len(each) for each in sets], dtype=torch.int32)
