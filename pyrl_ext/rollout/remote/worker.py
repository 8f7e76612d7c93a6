"""The thread of the embedded engine's server: requests come and go between its forwards."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.lanes import Job, Lane, number_of, signed
from pyrl_ext.rollout.remote.protocol import Request
from pyrl_ext.samples import Prompt, Sampling, Turn

IDLE_LANES = 4  # that keep their caches
MOST_LANES = 16  # each has a cache of all rows


class Refused(RuntimeError):
    """A call that comes at the wrong time."""


class Worker(threading.Thread):
    """Runs the engine's forwards, and between them what `call` is given; lanes take turns.

    Args:
        engine: without a thread that uses it beside this one
        max_tokens: longest context and response together

    Attributes:
        state: "runs"; "drains": running requests end, new ones wait; or "paused"
    """

    def __init__(self, engine: HFEngine, max_tokens: int):
        super().__init__(daemon=True, name="engine")
        self.engine = engine
        self.max_tokens = max_tokens
        self.lanes: dict[Sampling, Lane] = {}
        self.state = "runs"
        self.held: list[Job] = []  # they came while it does not run
        self.counts: dict[str, int] = dict.fromkeys(
            ("prompt", "cached", "generation", "answers"), 0
        )
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._drained: list[Callable[[], None]] = []

    async def call[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in this thread, between two forwards; its result or error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function(*arguments)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._calls.put(run)
        return await future

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run a function in this thread, without waiting for it."""
        self._calls.put(lambda: (function(*arguments), None)[1])

    def run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            idle = self.state == "paused" or not self.busy
            while idle or not self._calls.empty():
                if (call := self._calls.get()) is None:
                    return
                call()
                idle = False
            if self.state == "paused":
                continue
            for lane in list(self.lanes.values()):
                self._step(lane)
            if self.state == "drains" and not self.busy:
                self._paused()

    def stop(self) -> None:
        """Ends the thread before its next forward."""
        self._calls.put(None)

    @property
    def rows(self) -> int:
        """Number of requests that run."""
        return sum(lane.slots.running for lane in list(self.lanes.values()))

    @property
    def busy(self) -> list[Job]:
        """The requests that wait for a row or run."""
        return [job for lane in self.lanes.values() for job in lane.jobs.values()]

    def _step(self, lane: Lane) -> None:
        try:
            lane.step()
        except Exception as error:  # such as weights that make nan
            for job in lane.jobs.values():
                job.finish(error)
            self.lanes = {key: each for key, each in self.lanes.items() if each is not lane}

    # in this thread, through `call` ---------------------------------------------------------------

    def add(self, request: Request, loop: asyncio.AbstractEventLoop) -> Job:
        """Take a request. Raises: ValueError for one that the engine cannot answer."""
        if self.engine.version is None:
            raise Refused("generate: the engine has no complete weights, expected a publish first")
        seed, prompt, index = request.random_stream
        tokens = Prompt(number_of(request.salt, seed, prompt), request.token_ids)
        job = Job(request, Turn(tokens, signed(index), 0, request.max_tokens), loop)
        if self.state == "runs":
            self._put(job)
        else:
            self.held.append(job)
        return job

    def _put(self, job: Job) -> None:
        self._lane(job.request).put(job)

    def _lane(self, request: Request) -> Lane:
        greedy = request.temperature == 0
        sampling = Sampling(
            max_new_tokens=1,
            temperature=1.0 if greedy else request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_ids=request.stop_ids,
            stop=request.stop,
            greedy=greedy,
        )
        if sampling not in self.lanes:
            idle = [key for key, lane in self.lanes.items() if not lane.jobs]
            if len(self.lanes) - len(idle) >= MOST_LANES:
                raise ValueError(
                    f"generate: requests that draw in {MOST_LANES} ways already, expected one of "
                    "their temperatures, top_p, top_k and stops. Send it when one has ended"
                )
            for key in idle[: max(len(idle) - IDLE_LANES + 1, 0)]:
                del self.lanes[key]
            self.lanes[sampling] = Lane(self.engine, sampling, self.max_tokens, self.counts)
        return self.lanes[sampling]

    def abort(self, jobs: Iterable[Job]) -> int:
        """End requests; returns how many there were."""
        chosen = set(jobs)
        for job in [job for job in self.held if job in chosen]:
            job.end("abort", None)
        self.held = [job for job in self.held if job not in chosen]
        for lane in self.lanes.values():
            lane.abort(chosen)
        return len(chosen)

    def pause(self, mode: str, clear: bool, paused: Callable[[], None]) -> None:
        """Stop generating; ``paused`` is called once it has.

        Args:
            mode: wait, keep or abort, for requests that run
            clear: drop what finished requests left in the caches
        """
        if mode == "abort":
            self.abort(self.busy)
        self._drained.append(paused)
        if clear:
            self._drained.append(self._forget)
        waits = mode == "wait" and self.state != "paused" and self.busy
        self.state = "drains" if waits else "paused"
        if not waits:
            self._paused()

    def _paused(self) -> None:
        self.state = "paused"
        calls = self._drained
        self._drained = []
        for call in reversed(calls):
            call()

    def resume(self) -> None:
        """Go on, with the requests that came in the meantime."""
        if self.engine.version is None and self.busy:
            raise Refused("resume: the engine has no complete weights, expected a publish first")
        self.state = "runs"
        held = self.held
        self.held = []
        for job in held:
            try:
                self._put(job)
            except ValueError as error:
                job.finish(error)

    def load(self, named: dict[str, Tensor], version: int, only: Collection[str] | None) -> None:
        """New weights, while it is paused."""
        self.need_paused("load")
        self.engine.load_weights(named.items(), version, only)
        for lane in self.lanes.values():
            lane.adopt()

    def need_paused(self, call: str) -> None:
        """Raises Refused if requests may run."""
        if self.state != "paused":
            raise Refused(f"{call}: the engine {self.state}, expected it paused")

    def reset(self, running: bool) -> bool:
        """Drop everything cached; whether nothing of earlier weights is left.

        Args:
            running: also of the requests that run, which are computed again
        """
        self._forget()
        if running:
            for lane in self.lanes.values():
                lane.compute_again()
        return not any(lane.slots.running for lane in self.lanes.values())

    def _forget(self) -> None:
        for lane in self.lanes.values():
            lane.forget()


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
