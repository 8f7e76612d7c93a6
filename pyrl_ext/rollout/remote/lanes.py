"""Requests in the embedded engine's server: those that draw in the same way share a lane."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.kv_slots import Key, key_of
from pyrl_ext.rollout.hf.run import Run
from pyrl_ext.rollout.hf.sampling import processed_logprobs, stream_keys
from pyrl_ext.rollout.remote.protocol import Answer, Request
from pyrl_ext.samples import Sample, Sampling, Turn


@dataclass(eq=False)
class Job:
    """A request, from its arrival to its answer.

    Attributes:
        token_ids, logprobs: grow as they are sampled; a log-prob is there before its token
        marks: (first token, version) of each of the weights that sampled it
        cached: tokens of the context that were not computed again
        answer: once it is done, or an error
    """

    request: Request
    turn: Turn
    loop: asyncio.AbstractEventLoop
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list[Any])
    marks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    cached: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer | Exception | None = None

    def finish(self, answer: Answer | Exception) -> None:
        self.answer = answer
        with suppress(RuntimeError):  # the server has ended, and nobody waits
            self.loop.call_soon_threadsafe(self.done.set)

    def end(self, reason: str, routes: np.ndarray | None) -> None:
        """All tokens are there."""
        count = len(self.token_ids)
        ends = [*(begin for begin, _ in self.marks[1:]), count]
        spans = ((b, e, v) for (b, v), e in zip(self.marks, ends))  # no mark: no token yet
        self.finish(
            Answer(
                self.request.request_id,
                tuple(self.token_ids),
                tuple(self.logprobs),
                reason,
                tuple((b, e, v) for b, e, v in spans if b < e),
                routes,
                self.cached,
                tuple(self.top),
            )
        )


class _Arrivals:
    """The feed of a lane: never waits, never ends."""

    def __init__(self, trajectories: int, max_tokens: int):
        self.trajectories = trajectories
        self.max_tokens = max_tokens
        self.turns: list[Turn] = []

    def take(self, wait: bool) -> list[Turn]:
        turns = self.turns
        self.turns = []
        return turns

    def fileno(self) -> int:
        raise NotImplementedError("fileno: the thread that serves lanes waits for calls")


class Lane(Run):
    """The requests that draw in one way."""

    def __init__(
        self, engine: HFEngine, sampling: Sampling, max_tokens: int, counts: dict[str, int]
    ):
        self.arrivals = _Arrivals(engine.max_num_seqs, max_tokens)
        super().__init__(engine, self.arrivals, sampling, "answer")
        self.jobs: dict[Key, Job] = {}
        self.counts = counts

    def put(self, job: Job) -> None:
        """Takes a request. Raises: ValueError for one that the engine cannot answer."""
        self._check(job.turn)
        key = key_of(job.turn)
        if key in self._busy:  # the same trajectory twice: the second shares nothing
            number = number_of(*key, id(job), time.monotonic_ns())
            job.turn = replace(job.turn, prompt=replace(job.turn.prompt, id=number))
            key = key_of(job.turn)
        if not job.request.reads_cache:
            self.slots.parked.pop(key, None)
        self.jobs[key] = job
        self.counts["prompt"] += len(job.request.token_ids)
        self._add(job.turn)

    def step(self) -> None:
        """One forward, if any request waits or runs."""
        self.goes_on()
        for sample in self.engine.step(self):
            self._end(sample, sample.finish_reason)

    def abort(self, jobs: Collection[Job]) -> None:
        """Ends requests; each answers with the part that it has."""
        keys = {key for key, job in self.jobs.items() if job in jobs}
        waiting = [turn for turn in self.waiting if key_of(turn) in keys]
        self.waiting = deque(turn for turn in self.waiting if key_of(turn) not in keys)
        for key in map(key_of, waiting):
            self._busy.discard(key)
            self.jobs.pop(key).end("abort", None)
        slots = self.slots
        done = np.array([key_of(t) in keys for t in slots.turn[: slots.running]], dtype=bool)
        if done.any():
            found = self._harvest(np.flatnonzero(done), np.zeros(int(done.sum()), dtype=bool))
            slots.retire(done, park=True)
            for sample in found:
                self._end(sample, "abort")

    def adopt(self) -> None:
        """Go on with the engine's new weights, and the keys and values of those before."""
        assert self.engine.version is not None
        self.version = self.engine.version
        self._loads = self.engine.loads
        for job in self.jobs.values():
            if job.token_ids:
                job.marks.append((len(job.token_ids), self.version))

    def forget(self) -> None:
        """Drop what finished requests left behind."""
        self.slots.parked.clear()

    def compute_again(self) -> None:
        """Running requests wait until their context and tokens are computed anew."""
        rows = range(self.slots.running)
        jobs = [self.jobs[key_of(self.slots.turn[row])] for row in rows]
        self._busy -= {key_of(job.turn) for job in jobs}
        self.slots.retire(np.ones(len(jobs), dtype=bool), park=False)
        for job in jobs:
            left = job.request.max_tokens - len(job.token_ids)
            context = job.request.token_ids + tuple(job.token_ids)
            prompt = replace(job.turn.prompt, tokens=context)
            job.turn = replace(job.turn, prompt=prompt, max_new_tokens=left)
            self._add(job.turn)

    def continuing(self, max_tokens: int) -> list[Turn]:
        found = super().continuing(max_tokens)
        for key in map(key_of, found):
            self.jobs[key].cached = int(self.slots.length[self.slots.parked[key]]) - 1
            self.counts["cached"] += self.jobs[key].cached
        return found

    def begin(self, turns: Sequence[Turn]) -> None:
        streams = [self.jobs[key_of(turn)].request.random_stream for turn in turns]
        keys = torch.zeros(len(turns), dtype=torch.int64)
        for seed in {seed for seed, _, _ in streams}:
            mine = [row for row, stream in enumerate(streams) if stream[0] == seed]
            ids, indices = (torch.tensor([signed(streams[r][n]) for r in mine]) for n in (1, 2))
            keys[mine] = stream_keys(seed, ids, indices)
        self.slots.begin(turns, keys)

    def drawn(self, first: int, tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        rows = range(first, self.slots.running)
        jobs = [self.jobs[key_of(self.slots.turn[row])] for row in rows]
        wanted = [row for row, job in enumerate(jobs) if job.request.top]
        for row in wanted:
            best = processed_logprobs(logits[row : row + 1], self.sampling)[0]
            best = best.topk(jobs[row].request.top)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            jobs[row].top.append(tuple((t, p) for t, p in pairs if p > -np.inf))
        for job, token, logprob in zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True):
            if not job.marks:
                job.marks.append((0, self.version))
            job.logprobs.append(min(logprob, 0.0))
            job.token_ids.append(token)
        self.counts["generation"] += len(jobs)

    def _add(self, turn: Turn) -> None:
        """A context that leaves what its parked row holds goes on from where both are equal."""
        key = key_of(turn)
        context = turn.prompt.tokens
        if (row := self.slots.parked.get(key)) is not None:
            held = self.slots.held[row]
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, context)))
            if equal:
                self.slots.held[row], self.slots.length[row] = held[:equal], equal
        super()._add(turn)

    def _end(self, sample: Sample, reason: str) -> None:
        job = self.jobs.pop((sample.prompt_id, sample.index))
        self.counts["answers"] += 1
        routes = None
        if sample.routes is not None:
            begin = job.request.routes_from
            rows = sample.routes[begin : len(sample.tokens) - 1].numpy()
            layers = int(self.engine.text.num_hidden_layers)
            routes = np.zeros((len(rows), layers, rows.shape[2]), dtype=rows.dtype)
            routes[:, list(sample.layer_ids)] = rows  # as vLLM: rows of dense layers are 0
        job.end(reason, routes)


def number_of(*parts: object) -> int:
    """Names a group within this server: equal for equal parts."""
    text = repr(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def signed(number: int) -> int:
    """The integer of 64 bits that has the same bits, with a sign."""
    return (number + 2**63) % 2**64 - 2**63
