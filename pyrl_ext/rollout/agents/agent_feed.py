"""The agents of a rollout, as the feed from which an engine takes its turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from pyrl_ext.data.agent import AgentCall
from pyrl_ext.data.workers import CallFailed, Pool
from pyrl_ext.rollout.agents.endpoint import Endpoint
from pyrl_ext.rollout.agents.trajectory import AgentTrajectory, TrajectoryConfig, over_error
from pyrl_ext.rollout.turns.check import check_trajectory
from pyrl_ext.rollout.turns.waiting_feed import WaitingFeed
from pyrl_ext.samples import Prompt, Sample, Turn

MODEL = "policy"
_Key = tuple[int, int, int]  # prompt id, index, number of the turn


@dataclass(frozen=True)
class AgentsConfig:
    """Settings of all agents of a run.

    Args:
        endpoint: that agents call; trajectories live in its event loop
        pool: worker processes of the agents
        trajectory: settings of trajectories
        in_waves: turns begin when every agent has called or ended: what the engine runs together
            does not depend on the time that agents take
        noted: kind of failure -> the first of it, which was printed
    """

    endpoint: Endpoint
    pool: Pool
    trajectory: TrajectoryConfig
    in_waves: bool = False
    noted: dict[str, str] = field(default_factory=dict[str, str])


class _Run:
    """An agent that runs, in the endpoint's loop.

    Attributes:
        key: of the endpoint; empty: the agent has ended
        owner: in the pool
        late: the timer while no call of it waits
        since: when it began to wait for nothing
    """

    def __init__(self, trajectory: AgentTrajectory, retries: int):
        self.trajectory = trajectory
        self.retries = retries
        self.key = ""
        self.owner = 0
        self.late: asyncio.TimerHandle | None = None
        self.since = time.monotonic()
        self.over = False


class AgentFeed(WaitingFeed[AgentTrajectory]):
    """Turns of the trajectories of an agent.

    Calls arrive in the thread of the endpoint; there trajectories change, and nowhere else. The
    thread of the engine takes turns and trajectories that are over from queues.

    Args:
        prompts: each begins ``size`` trajectories
    """

    def __init__(self, prompts: Sequence[Prompt], size: int, config: AgentsConfig):
        turns = config.trajectory.turns
        super().__init__("agent", len(prompts) * size, turns.max_tokens, config.noted)
        self._config = config
        self._loop = config.endpoint.loop
        self._begun = False
        keys = [(prompt, index) for prompt in prompts for index in range(size)]
        self._order = {(prompt.id, index): place for place, (prompt, index) in enumerate(keys)}
        self._starts = keys
        self._new = SimpleQueue[Turn]()
        self._done = SimpleQueue[AgentTrajectory]()
        self._retried = SimpleQueue[str]()
        self._failed = SimpleQueue[Exception]()  # of the endpoint's thread
        self._open = set(self._order)  # trajectories that are not over
        self._held: list[Turn] = []  # until the wave is complete
        self._sampling = 0
        # of the endpoint's thread
        self._runs: set[_Run] = set()
        self._asked: dict[_Key, asyncio.Future[Sample]] = {}
        self._closed = False

    # the engine's thread ---------------------------------------------------------------------

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._soon(self._start_all)

    def left(self) -> int:
        return len(self._open)

    def running(self) -> int:
        return len(self._open)  # agents run, or wait for the engine

    def ready(self) -> list[Turn]:
        if not self._failed.empty():
            raise self._failed.get()
        while not self._done.empty():
            trajectory = self._done.get()
            self._open.remove((trajectory.prompt.id, trajectory.index))
            if trajectory.samples is not None:
                check_trajectory(trajectory.samples)
            self.end(trajectory)
        while not self._retried.empty():
            self._retried.get()
            self.counts["retries"] += 1
        while not self._new.empty():
            self._held.append(self._new.get())
        # an agent may end while a call of it waits
        self._held = [turn for turn in self._held if (turn.prompt.id, turn.index) in self._open]
        if self._config.in_waves:
            callers = {(turn.prompt.id, turn.index) for turn in self._held}
            if self._sampling or len(callers) < len(self._open):
                return []
        turns = sorted(self._held, key=self._place)
        self._held = []
        self._sampling += len(turns)
        return turns

    def _place(self, turn: Turn) -> tuple[int, int]:
        return self._order[turn.prompt.id, turn.index], turn.number

    def answered(self, sample: Sample) -> None:
        self._sampling -= 1
        self._soon(self._deliver, sample)

    def close(self) -> None:
        """Stop the agents that still run."""
        self._soon(self._stop_all)
        super().close()

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the endpoint's thread, from any; the engine's raises its errors."""

        def call() -> None:
            try:
                function(*args)
            except Exception as error:
                self._failed.put(error)
                self.wake()

        self._loop.call_soon_threadsafe(call)

    # the endpoint's thread -------------------------------------------------------------------

    def _start_all(self) -> None:
        for prompt, index in self._starts:
            self._start(prompt, index, self._config.trajectory.turns.retries)

    def _start(self, prompt: Prompt, index: int, retries: int, first: int = 0) -> None:
        if self._closed:
            return
        run: _Run
        trajectory = AgentTrajectory(
            prompt, index, self._config.trajectory, self._ask, lambda: self._watch(run), first
        )
        run = _Run(trajectory, retries)
        run.key = self._config.endpoint.add(trajectory)
        run.owner = self._config.pool.owner()
        self._runs.add(run)
        self._watch(run)
        shown = replace(prompt, images=())
        call = AgentCall(shown, self._config.endpoint.url, run.key, MODEL)
        self._submit(run, "run", (call,))

    def _submit(self, run: _Run, method: str, args: tuple[Any, ...]) -> None:
        (future,) = self._config.pool.submit(method, [args], None, run.owner)
        future.add_done_callback(lambda future: self._soon(self._ended, run, method, future))

    def _watch(self, run: _Run) -> None:
        """Begin or end the time in which the agent has to call or to end."""
        if run.late is not None:
            run.trajectory.seconds += time.monotonic() - run.since
            run.late.cancel()
            run.late = None
        if not run.trajectory.waiting and not run.over:
            run.since = time.monotonic()
            limit = self._config.trajectory.turns.timeout
            run.late = self._loop.call_later(limit, self._give_up, run)

    def _give_up(self, run: _Run) -> None:
        if not self._config.pool.has_loaded(run.owner):  # loading has another limit
            self._watch(run)
            return
        limit = self._config.trajectory.turns.timeout
        message = f"no call and no end within turns.timeout {limit:g} s"
        failure = CallFailed("timeout", f"{message}, expected one of them")
        self._config.pool.give_up(run.owner, failure)

    async def _ask(self, turn: Turn) -> Sample:
        if self._closed:
            raise over_error()
        key = turn.prompt.id, turn.index, turn.number
        self._asked[key] = future = self._loop.create_future()
        self._new.put(turn)
        self.wake()
        try:
            return await future
        finally:
            del self._asked[key]

    def _deliver(self, sample: Sample) -> None:
        future = self._asked.get((sample.prompt_id, sample.index, sample.turn))
        if future is not None and not future.done():  # the agent may have gone away
            future.set_result(sample)

    def _ended(self, run: _Run, method: str, future: Future[Any]) -> None:
        """An agent, or the reward function of its trajectory, has ended."""
        if self._closed:
            return
        trajectory = run.trajectory
        scores = method == "run" and self._config.trajectory.turns.reward is not None
        try:
            reward, components = future.result()
            self._end_calls(run)
            if scores:
                shown = replace(trajectory.prompt, images=())
                self._submit(run, "score", (shown, trajectory.calls))
                return
            trajectory.end(reward, components)
        except CallFailed as failure:
            if failure.reason == "error" and trajectory.refused is not None:
                failure = trajectory.refused
            self._leave(run)
            if failure.reason == "error" and run.retries:
                self._retried.put(method)
                first = trajectory.next_number
                self._start(trajectory.prompt, trajectory.index, run.retries - 1, first)
                return
            trajectory.dropped = CallFailed(failure.reason, f"{self._named(run)}: {failure}")
        else:
            self._leave(run)
        self._done.put(trajectory)
        self.wake()

    def _named(self, run: _Run) -> str:
        name = self._config.trajectory.turns.name
        trajectory = run.trajectory
        return f"{name}(prompt {trajectory.prompt.id}, trajectory {trajectory.index})"

    def _end_calls(self, run: _Run) -> None:
        """Answer no call of an agent any more, also none that waits."""
        if run.key:
            self._config.endpoint.remove(run.key)
            run.key = ""
        run.trajectory.stop()
        place = run.trajectory.prompt.id, run.trajectory.index
        for key, future in self._asked.items():
            if key[:2] == place and not future.done():
                future.set_exception(over_error())

    def _leave(self, run: _Run) -> None:
        """Give up what there is of an agent in the endpoint and in the pool."""
        run.over = True
        self._watch(run)
        self._runs.discard(run)
        self._end_calls(run)
        self._config.pool.release(run.owner)

    def _stop_all(self) -> None:
        self._closed = True
        for run in [*self._runs]:
            self._config.pool.give_up(run.owner, CallFailed("stopped", "the rollout is over"))
            self._leave(run)
