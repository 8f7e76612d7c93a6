"""A run with remote engines, simulated event by event: who waits for whom, and for how long.

The trainer publishes the weights of a step, waits for its samples, trains on them, and begins the
next step. Where it publishes beside its passes, it waits until it has gathered the weights, and for
the rest before its first optimizer step. Requests of step s go to the engines after a publish, of
step s - ahead at the earliest, so no token is more than `ahead` versions old when it is trained on.
All steps begin that may, where the trainer has to wait; else one, and none where the next one was
complete as well, at `SPARE` steps in a row. A group goes to the engine with the fewest requests, as
soon as one has room, and stays there. An engine decodes a token of all its running sequences at a
time, and reads prompts in between.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import itemgetter

from pyrl_ext.plan.forecast.loop import Loop, Steady, Step, Trajectory
from pyrl_ext.schedule.look_ahead import SPARE, LookAhead

SAME = 1e-9
"""Tokens: sequences that are no further apart end together."""


@dataclass(eq=False)
class _Request:
    """The trajectory that runs, or waits, on an engine."""

    step: int
    group: int
    trajectory: Trajectory
    turn: int = 0
    left: float = 0.0
    """Tokens left of this turn, when last looked at."""
    context: float = 0.0
    """Tokens that a new version of the weights has to read again, without the prompt."""
    spans: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(version, tokens) in order."""
    ended: float = math.inf


class _Engine:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.now = self.clock = self.stall = 0.0
        self.running: list[tuple[float, int, _Request]] = []  # clock at the end of each
        self.waiting: deque[_Request] = deque()
        self.known: set[tuple[int, int]] = set()  # prompts in the cache, by (step, group)
        self.open = False
        self.stamp = 0
        self.busy = self.ran = self.queued = 0.0  # seconds, and sequences times seconds
        self._number = count()

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def advance(self, now: float) -> None:
        """Decode until `now`; `clock` counts the tokens of a sequence that always runs."""
        passed = now - self.now
        self.now = now
        self.queued += passed * len(self.waiting)
        if self.running and (self.open or self.loop.pause == "finish"):
            self.busy += passed
            self.ran += passed * len(self.running)
            read = min(self.stall, passed)
            self.stall -= read
            self.clock += (passed - read) / self.loop.token(len(self.running))

    def admit(self, version: int) -> None:
        """Let requests in that wait, while there is room."""
        while self.open and self.waiting and len(self.running) < self.loop.slots:
            each = self.waiting.popleft()
            prompt = (each.step, each.group)
            if prompt not in self.known:
                self.known.add(prompt)
                self.stall += self.loop.read(each.trajectory.prompt)
            if each.context and (not each.spans or each.spans[-1][0] != version):
                self.stall += self.loop.read(round(each.context))
            heapq.heappush(self.running, (self.clock + each.left, next(self._number), each))

    def next_end(self) -> float:
        """The time at which the next sequence ends."""
        if not self.running or not (self.open or self.loop.pause == "finish"):
            return math.inf
        left = max(0.0, self.running[0][0] - self.clock)
        return self.now + self.stall + left * self.loop.token(len(self.running))

    def ended(self, version: int) -> list[_Request]:
        """The sequences that end now, one at least."""
        self.clock = max(self.clock, self.running[0][0])
        found: list[_Request] = []
        while self.running and self.running[0][0] <= self.clock + SAME:
            found.append(heapq.heappop(self.running)[-1])
            self._mark(found[-1], 0.0, version)
        return found

    def publish(self, version: int) -> None:
        """Note the tokens that `version` generated; with abort, requests wait for the next one."""
        self.open = False
        for end, _, request in self.running:
            self._mark(request, end - self.clock, version)
        if self.loop.pause == "abort":
            going = [request for _, _, request in sorted(self.running, key=itemgetter(1))]
            self.waiting.extendleft(reversed(going))
            self.running.clear()
        if self.loop.pause != "keep":
            self.stall = 0.0
        self.known.clear()

    def drop(self, step: int) -> None:
        """Abort the requests of a step."""
        self.running = [each for each in self.running if each[2].step != step]
        heapq.heapify(self.running)
        self.waiting = deque(each for each in self.waiting if each.step != step)

    @staticmethod
    def _mark(request: _Request, left: float, version: int) -> None:
        request.spans.append((version, request.left - left))
        request.context += request.left - left
        request.left = left


class Simulation:
    """A run from its start.

    Attributes:
        steps: those that the trainer has finished
        queued: requests times seconds that they waited for any engine
        readied: finished trajectories times seconds that they waited for the trainer
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.now = 0.0
        self.version = -1
        self.engines = [_Engine(loop) for _ in range(loop.engines)]
        self.steps: list[Step] = []
        self.queued = self.readied = 0.0
        self._unbound: deque[list[_Request]] = deque()
        self._free = 0  # requests in them
        self._events: list[tuple[float, int, Callable[[], None] | tuple[_Engine, int]]] = []
        self._number = count()
        self._asked = self._step = 0
        self._end = 1  # steps before this one are asked for
        self._look = LookAhead()
        self._began = self._published = 0.0
        self._training = self._draining = self._gathered = False
        self._since: float | None = None  # start of training during a publish
        # by step and number, that no step has taken; those of them that are complete
        self._groups: dict[int, dict[int, list[_Request]]] = {}
        self._complete: dict[int, list[list[_Request]]] = {}
        self._taken: list[_Request] = []
        self._begin()

    def run(self, steps: int) -> None:
        """Go on until the trainer has finished so many steps."""
        while len(self.steps) < steps:
            time, _, what = heapq.heappop(self._events)
            if isinstance(what, tuple) and what[1] != what[0].stamp:
                continue
            self.queued += (time - self.now) * self._free
            self.now = time
            if isinstance(what, tuple):
                self._ended(what[0])
            else:
                what()

    # The trainer --------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._began = self.now
        self._training = False
        self._gathered = False
        if self.loop.gather is None:
            self._halt()
        else:
            self._at(self.loop.gather, self._go_on)

    def _go_on(self) -> None:
        """The trainer has what it publishes."""
        self._gathered = True
        self._published = self.now
        self._look_ahead()
        self._halt()
        self._train_if_ready()

    def _look_ahead(self) -> None:
        """The trainer turns to its samples: as many steps begin as it may need."""
        now = self._step, self._asked, self.loop.ahead
        self._end = self._look.end(*now, self._is_complete)

    def _is_complete(self, step: int) -> bool:
        """True if the groups of the steps from this one to `step` are all there."""
        done = sum(len(groups) for of, groups in self._complete.items() if of <= step)
        return step < self._asked and done >= self.loop.keep * (step - self._step + 1)

    def _halt(self) -> None:
        if self.loop.pause == "finish":  # what runs goes on, what waits waits
            self._draining = True
            for engine in self._advanced():
                engine.open = False
            self._drained()
        else:
            self._publish()

    def _drained(self) -> None:
        if self._draining and not any(engine.running for engine in self.engines):
            self._draining = False
            self._publish()

    def _publish(self) -> None:
        for engine in self._advanced():
            engine.publish(self.version)
            self._plan(engine)
        self._at(self.loop.publish - (self.loop.gather or 0.0), self._resume)

    def _resume(self) -> None:
        self.version = self._step
        if self._since is not None:
            end = max(self._since, self.now - self.loop.beside) + self.loop.train
            self._at(end - self.now, partial(self._trained, self._since))
            self._since = None
        if not self._gathered:
            self._published = self.now
            self._look_ahead()
        for engine in self._advanced():
            engine.open = True
        while self._asked < self._end:
            self._ask(self._asked)
            self._asked += 1
        self._pump(self.engines)
        self._train_if_ready()

    def _train_if_ready(self) -> None:
        last = self._step - self.loop.carry
        step = self._step
        groups = [each for of in range(last, step + 1) for each in self._complete.get(of, ())]
        resumed = self.version == self._step
        if self._training or not (resumed or self._gathered) or len(groups) < self.loop.keep:
            return
        self._training = True
        del groups[self.loop.keep :]
        for each in groups:
            self._groups[each[0].step].pop(each[0].group, None)
        taken = {id(each) for each in groups}
        left = [each for each in self._complete[step] if id(each) not in taken]
        self._complete = {**self._complete, last: [], step: left}
        self._taken = [request for each in groups for request in each]
        self._drop(last)  # what it carried, or has just trained on
        if resumed:
            self._at(self.loop.train, partial(self._trained, self.now))
        else:
            self._since = self.now

    def _trained(self, ready: float) -> None:
        ages = dict[int, float]()
        for request in self._taken:
            self.readied += ready - request.ended
            for version, tokens in request.spans:
                age = self._step - version
                ages[age] = ages.get(age, 0.0) + tokens
        times = (self._began, self._published, ready, self.now)
        self.steps.append(Step(*times, tuple(sorted(ages.items()))))
        self._step += 1
        self._begin()

    # Requests -----------------------------------------------------------------------------------

    def _ask(self, step: int) -> None:
        asked = self.loop.groups(step)
        carried = 0
        if self.loop.carry:
            left = sum(map(len, self._groups.values()))
            carried = max(0, left - self.loop.keep * (step - self._step))
        self._groups[step], self._complete[step] = {}, []
        for number, group in enumerate(asked[: len(asked) - carried]):
            requests = [_Request(step, number, each, left=each.turns[0]) for each in group]
            self._groups[step][number] = requests
            self._unbound.append(requests)
            self._free += len(requests)

    def _pump(self, engines: Sequence[_Engine]) -> None:
        """Give engines that have room what waits for them, then what waits for any."""
        for engine in engines:
            engine.admit(self.version)
        touched = list(engines)
        while self._unbound:
            engine = min(self.engines, key=lambda each: each.load)
            if not engine.open or engine.load >= self.loop.slots:
                break
            engine.advance(self.now)
            group = self._unbound.popleft()
            self._free -= len(group)
            engine.waiting.extend(group)
            engine.admit(self.version)
            touched.append(engine)
        for engine in dict.fromkeys(touched):
            self._plan(engine)

    def _ended(self, engine: _Engine) -> None:
        engine.advance(self.now)
        for request in engine.ended(self.version):
            self._at(self.loop.latency, partial(self._answered, engine, request))
        self._pump([engine])
        self._drained()

    def _answered(self, engine: _Engine, request: _Request) -> None:
        """The environment has answered; the next turn begins, or the trajectory has ended."""
        group = self._groups[request.step].get(request.group)
        if group is None:
            return  # aborted in the meantime
        request.turn += 1
        if request.turn < len(request.trajectory.turns):
            request.left = request.trajectory.turns[request.turn]
            engine.advance(self.now)
            engine.waiting.append(request)
            self._pump([engine])
            return
        request.ended = self.now
        if all(each.ended < math.inf for each in group):
            complete = self._complete[request.step]
            complete.append(group)
            if len(complete) == self.loop.keep and not self.loop.carry:
                self._drop(request.step)
            self._train_if_ready()

    def _drop(self, step: int) -> None:
        """Abort the requests of a step; what is complete stays."""
        self._groups[step] = {}
        for engine in self._advanced():
            engine.drop(step)
        self._unbound = deque(each for each in self._unbound if each[0].step != step)
        self._free = sum(map(len, self._unbound))
        self._pump(self.engines)
        self._drained()

    # Time ---------------------------------------------------------------------------------------

    def _advanced(self) -> Iterator[_Engine]:
        for engine in self.engines:
            engine.advance(self.now)
            yield engine

    def _at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._number), what))

    def _plan(self, engine: _Engine) -> None:
        """Look at the engine again when its next sequence ends."""
        engine.stamp += 1
        if (time := engine.next_end()) < math.inf:
            heapq.heappush(self._events, (time, next(self._number), (engine, engine.stamp)))


def simulate(loop: Loop, measured: int = 6) -> Steady:
    """The mean of `measured` steps, after as many as the run takes to settle."""
    run = Simulation(loop)
    settles = loop.ahead + 2 + SPARE * max(0, loop.ahead - 1)
    run.run(settles)
    before = run.now
    busy = _sums(run)
    run.run(settles + measured)
    seconds = run.now - before
    steps = run.steps[-measured:]
    worked, ran, queued, readied = (
        (after - was) / seconds for after, was in zip(_sums(run), busy, strict=True)
    )
    ages = [each for step in steps for each in step.ages]
    return Steady(
        loop.ahead,
        seconds / measured,
        loop.train,
        sum(step.published - step.began for step in steps) / measured,
        sum(step.trained - step.published for step in steps) / measured - loop.train,
        worked / loop.engines,
        ran,
        queued,
        readied,
        sum(age * tokens for age, tokens in ages) / sum(tokens for _, tokens in ages),
        max(age for age, _ in ages),
    )


def _sums(run: Simulation) -> tuple[float, float, float, float]:
    for engine in run.engines:
        engine.advance(run.now)
    sums = ((each.busy, each.ran, each.queued) for each in run.engines)
    busy, ran, queued = map(sum, zip(*sums, strict=True))
    return busy, ran, queued + run.queued, run.readied
