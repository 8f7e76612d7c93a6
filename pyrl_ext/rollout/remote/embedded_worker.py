"""The thread of the embedded engine's server: requests join and leave between its forwards."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.rollout.engine import AllAtOnce
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.run import EngineRun, check_turn
from pyrl_ext.rollout.hf.sampling import need_tokenizer, processed_logprobs, stream_keys
from pyrl_ext.rollout.remote.protocol import Answer, Request, Top
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn

log = logging.getLogger(__name__)

# of clients that have the key for generating alone; the trainer is not limited
MAX_BATCHES = 8  # each has a cache of all rows
MAX_REQUESTS = 1024


class WrongState(RuntimeError):
    """A call that comes at the wrong time."""


class TooBusy(RuntimeError):
    """There is no place for a request now."""


@dataclass(eq=False)
class Job:
    """A request, from its arrival to its answer.

    Args:
        turn: its context; its index is the number of the request
        is_trainers: it has the trainer's key

    Attributes:
        token_ids, logprobs: grow as they are sampled; a log-prob is there before its token
        marks: (first token, version) of each of the weights that sampled it
        answer: once it is done, or an error
    """

    request: Request
    turn: Turn
    loop: asyncio.AbstractEventLoop
    is_trainers: bool = True
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[Top] = field(default_factory=list[Top])
    marks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    done: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer | Exception | None = None

    def finish(self, answer: Answer | Exception) -> None:
        self.answer = answer
        with suppress(RuntimeError):  # the server has ended, and nobody waits
            self.loop.call_soon_threadsafe(self.done.set)

    def end(self, reason: str, routes: np.ndarray | None) -> None:
        """All tokens are there."""
        ends = [*(begin for begin, _ in self.marks[1:]), len(self.token_ids)]
        spans = ((b, e, v) for (b, v), e in zip(self.marks, ends))  # no mark: no token yet
        self.finish(
            Answer(
                self.request.request_id,
                tuple(self.token_ids),
                tuple(self.logprobs),
                reason,
                tuple((b, e, v) for b, e, v in spans if b < e),
                routes,
                0,
                tuple(self.top),
            )
        )


class SamplingBatch(EngineRun):
    """The running requests with the same sampling parameters.

    Args:
        max_tokens: longest context and response together
        counts: numbers of tokens and answers so far

    Attributes:
        is_trainers: a request of the trainer came
    """

    is_trainers = False

    def __init__(self, engine: HFEngine, sampling: Sampling, max_tokens: int, counts: Counter[str]):
        feed = AllAtOnce([], sampling)
        feed.trajectories = engine.max_num_seqs
        feed.max_tokens = max_tokens
        assert engine.version is not None
        rows = engine.max_num_seqs
        tokenizer = engine.tokenizer
        super().__init__(engine.routed, engine.version, feed, sampling, rows, tokenizer)
        self.engine = engine
        self.open = False  # requests come through `put`
        self.jobs: dict[int, Job] = {}
        self.counts = counts

    def put(self, job: Job) -> None:
        """Takes a request that was checked. The trainer's come before others that wait."""
        self.jobs[job.turn.index] = job
        self.counts["prompt"] += len(job.request.token_ids)
        place = len(self.waiting)
        if job.is_trainers:
            self.is_trainers = True
            while place and not self.jobs[self.waiting[place - 1].index].is_trainers:
                place -= 1
        self.waiting.insert(place, job.turn)

    def step(self) -> None:
        """One forward, if any request waits or runs."""
        for sample in self.forward():
            self._end(sample, sample.finish_reason)

    def abort(self, jobs: Collection[Job]) -> None:
        """Ends requests; each answers with the part that it has."""
        numbers = {number for number, job in self.jobs.items() if job in jobs}
        for turn in [turn for turn in self.waiting if turn.index in numbers]:
            self.waiting.remove(turn)
            self.jobs.pop(turn.index).end("abort", None)
        slots = self.slots
        done = np.array([t.index in numbers for t in slots.turn[: slots.running]], dtype=bool)
        if done.any():
            samples = self.harvest(np.flatnonzero(done), np.zeros(int(done.sum()), dtype=bool))
            slots.retire(done)
            for sample in samples:
                self._end(sample, "abort")

    def adopt(self) -> None:
        """Continue with the engine's new weights, and the keys and values of the old ones."""
        assert self.engine.version is not None
        self.version = self.engine.version
        for job in self.jobs.values():
            if job.token_ids:
                job.marks.append((len(job.token_ids), self.version))

    def begin(self, turns: Sequence[Turn]) -> None:
        keys = torch.zeros(len(turns), dtype=torch.int64)
        for row, turn in enumerate(turns):
            seed, *stream = self.jobs[turn.index].request.random_stream
            prompt, index = (torch.tensor([_signed(number)]) for number in stream)
            keys[row : row + 1] = stream_keys(seed, prompt, index)
        self.slots.begin(turns, keys)

    def drawn(self, first: int, tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        jobs = [self.jobs[turn.index] for turn in self.slots.turn[first : self.slots.running]]
        for row, job in enumerate(jobs):
            if job.request.top:
                every = processed_logprobs(logits[row : row + 1], self.sampling)[0]
                best = every.topk(job.request.top)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                job.top.append(tuple((t, p) for t, p in pairs if p > -np.inf))
        for job, token, logprob in zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True):
            if not job.marks:
                job.marks.append((0, self.version))
            job.logprobs.append(min(logprob, 0.0))
            job.token_ids.append(token)
        self.counts["generation"] += len(jobs)

    def _end(self, sample: Sample, reason: str) -> None:
        job = self.jobs.pop(sample.index)
        self.counts["answers"] += 1
        routes = None
        if sample.routes is not None:
            rows = sample.routes[job.request.routes_from : len(sample.tokens) - 1].numpy()
            layers = int(self.model.text.num_hidden_layers)
            routes = np.zeros((len(rows), layers, rows.shape[2]), dtype=rows.dtype)
            routes[:, list(sample.layer_ids)] = rows  # as vLLM: rows of dense layers are 0
        job.end(reason, routes)


class Worker(threading.Thread):
    """Runs the engine's forwards, and between them what `call` is given; batches take turns.

    Args:
        engine: used by this thread alone
        max_tokens: longest context and response together

    Attributes:
        state: "runs"; "drains": running requests end, new ones wait; or "paused"
    """

    def __init__(self, engine: HFEngine, max_tokens: int):
        super().__init__(daemon=True, name="engine")
        self.engine = engine
        self.max_tokens = max_tokens
        self.batches: dict[Sampling, SamplingBatch] = {}
        self.state = "runs"
        self.queued: list[Job] = []  # they came while it does not run
        self.counts = Counter[str](prompt=0, generation=0, answers=0)
        self._numbers = count()
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._drained: list[Callable[[], object]] = []

    async def call[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in this thread, between two forwards; its result or error."""
        future = Future[T]()
        future.set_running_or_notify_cancel()  # a caller that leaves does not stop the call

        def run() -> None:
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)

        self._calls.put(run)
        return await asyncio.wrap_future(future)

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run a function in this thread, without waiting for it; its error is logged."""

        def run() -> None:
            try:
                function(*arguments)
            except Exception:
                log.exception("engine: %s failed, and other requests go on", function)

        self._calls.put(run)

    def run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            idle = self.state == "paused" or not self.busy
            while idle or not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    return
                call()
                idle = False
            if self.state == "paused":
                continue
            for batch in list(self.batches.values()):
                self._step(batch)
            if self.state == "drains" and not self.busy:
                self._paused()

    def stop(self) -> None:
        """Ends the thread before its next forward."""
        self._calls.put(None)

    @property
    def running(self) -> int:
        """Number of requests that run."""
        return sum(batch.slots.running for batch in list(self.batches.values()))

    @property
    def busy(self) -> list[Job]:
        """The requests that wait for a row or run."""
        return [job for batch in self.batches.values() for job in batch.jobs.values()]

    def _step(self, batch: SamplingBatch) -> None:
        try:
            batch.step()
        except Exception as error:  # such as weights that make nan
            for job in batch.jobs.values():
                job.finish(error)
            self.batches = {key: b for key, b in self.batches.items() if b is not batch}

    # in this thread, through `call` ---------------------------------------------------------------

    def add(
        self, request: Request, loop: asyncio.AbstractEventLoop, is_trainers: bool = True
    ) -> Job:
        """Take a request. Raises: ValueError for one that the engine cannot answer; TooBusy."""
        if self.engine.version is None:
            raise WrongState("generate: the engine has no complete weights, expected a publish")
        # requests with the same context share its forward
        prompt = Prompt(hash(request.token_ids), request.token_ids)
        turn = Turn(prompt, next(self._numbers), 0, request.max_tokens)
        job = Job(request, turn, loop, is_trainers)
        need_tokenizer("generate", _sampling(request), self.engine.tokenizer)
        check_turn(turn, self.engine.routed, self.max_tokens)
        if not is_trainers:
            others = sum(not each.is_trainers for each in (*self.queued, *self.busy))
            if others >= MAX_REQUESTS:
                raise TooBusy(f"generate: {others} requests wait or run, expected fewer; try later")
        if self.state == "runs":
            self._put(job)
        else:
            self.queued.append(job)
        return job

    def _put(self, job: Job) -> None:
        sampling = _sampling(job.request)
        if sampling not in self.batches:  # each has a cache of all rows
            self.batches = {key: batch for key, batch in self.batches.items() if batch.jobs}
            others = sum(not batch.is_trainers for batch in self.batches.values())
            if not job.is_trainers and others >= MAX_BATCHES:
                raise TooBusy(
                    f"generate: requests with {others} other ways to sample run, expected fewer; "
                    "try later"
                )
            batch = SamplingBatch(self.engine, sampling, self.max_tokens, self.counts)
            self.batches[sampling] = batch
        self.batches[sampling].put(job)

    def abort(self, jobs: Iterable[Job]) -> None:
        """End requests."""
        chosen = set(jobs)
        for job in [job for job in self.queued if job in chosen]:
            job.end("abort", None)
        self.queued = [job for job in self.queued if job not in chosen]
        for batch in self.batches.values():
            batch.abort(chosen)

    def pause(self, mode: str, paused: Callable[[], object]) -> None:
        """Stop generating; ``paused`` is called once it has.

        Args:
            mode: wait, keep or abort, for requests that run
        """
        if mode == "abort":
            self.abort(self.busy)
        self._drained.append(paused)
        waits = mode == "wait" and self.state != "paused" and self.busy
        self.state = "drains"
        if not waits:
            self._paused()

    def _paused(self) -> None:
        self.state = "paused"
        calls = self._drained
        self._drained = []
        for call in calls:
            call()

    def resume(self) -> None:
        """Continue, with the requests that came in the meantime."""
        if self.engine.version is None and self.busy:
            raise WrongState("resume: the engine has no complete weights, expected a publish")
        self._paused()  # answers a pause that still waits for what runs
        self.state = "runs"
        queued = self.queued
        self.queued = []
        for job in queued:
            try:
                self._put(job)
            except TooBusy as error:
                job.finish(error)

    def load(self, named: dict[str, Tensor], version: int, only: Collection[str] | None) -> None:
        """New weights, while it is paused."""
        self.require_paused("load")
        self.engine.load_weights(named.items(), version, only)
        for batch in self.batches.values():
            batch.adopt()

    def require_paused(self, call: str) -> None:
        """Raises WrongState if requests may run."""
        if self.state != "paused":
            raise WrongState(f"{call}: the engine {self.state}, expected it paused")


def _sampling(request: Request) -> Sampling:
    """Parameters that requests of a batch have in common."""
    greedy = request.temperature == 0
    return Sampling(
        max_new_tokens=1,
        temperature=1.0 if greedy else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop_ids=request.stop_ids,
        stop=request.stop,
        greedy=greedy,
    )


def _signed(number: int) -> int:
    """The integer of 64 bits that has the same bits, with a sign."""
    return (number + 2**63) % 2**64 - 2**63
