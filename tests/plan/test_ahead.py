"""Simulation of remote engines: against a loop that looks at every request at every event, and
against what follows without any simulation."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest

from pyrl_ext.plan.forecast.ahead import Simulation, simulate
from pyrl_ext.plan.forecast.loop import Group, Loop, Pause, Trajectory
from pyrl_ext.schedule.look_ahead import SPARE


@dataclass
class Held:
    """A trajectory of the brute-force loop."""

    step: int
    group: int
    tokens: Trajectory
    engine: int
    order: int
    state: str = "unbound"  # waiting, running, thinking, done, aborted
    turn: int = 0
    left: float = 0.0
    until: float = 0.0
    admitted: int = 0
    by_version: list[list[float]] = field(default_factory=list[list[float]])

    def generate(self, version: int, tokens: float) -> None:
        if not self.by_version or self.by_version[-1][0] != version:
            self.by_version.append([version, 0.0])
        self.by_version[-1][1] += tokens
        self.left -= tokens


class BruteForce:
    """The same run, with one list of all requests, which every event walks through."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.now = 0.0
        self.held = list[Held]()
        self.stall = [0.0] * loop.engines
        self.known: set[tuple[int, int, int]] = set()
        self.version = -1
        self.step = 0
        self.asked = 0
        self.turns = 0
        self.begins = 0  # steps that begin after this publish
        self.spared: list[bool] = []
        self.phase = "drain"
        self.until = math.inf
        self.times: list[tuple[float, float, float, float]] = []
        self.ages: list[dict[int, float]] = []
        self.taken: list[Held] = []
        self.began = self.published = self.ready = 0.0
        self.since: float | None = None  # the trainer trains next to a publish
        self.gathers = loop.gather is not None
        if self.gathers:
            self.phase = "gather"
            self.until = loop.gather or 0.0

    def at(self, engine: int, state: str) -> list[Held]:
        found = [each for each in self.held if (each.engine, each.state) == (engine, state)]
        return sorted(found, key=lambda each: each.admitted if state == "running" else each.order)

    def decodes(self) -> bool:
        return self.phase != "publish" and (self.phase != "drain" or self.loop.pause == "finish")

    def take(self) -> None:
        """The groups that this step trains on."""
        self.ready = self.now
        taken = self.candidates()[: self.loop.keep]
        for each in self.held:
            if (each.step, each.group) in taken:
                each.state = "taken"
            elif each.step == self.step - 1 and each.state != "taken":
                each.state = "aborted"
        self.taken = [h for h in self.held if (h.step, h.group) in taken]

    def admit(self) -> None:
        if self.phase not in ("wait", "train", "gather"):
            return
        self.fill()
        while free := [each for each in self.held if each.state == "unbound"]:
            loads = [
                sum(h.engine == e and h.state in ("waiting", "running") for h in self.held)
                for e in range(self.loop.engines)
            ]
            engine, first = loads.index(min(loads)), min(free, key=lambda each: each.order)
            if len(self.at(engine, "running")) >= self.loop.slots:
                break
            for each in free:
                if (each.step, each.group) == (first.step, first.group):
                    each.engine = engine
                    each.state = "waiting"
            self.fill()

    def fill(self) -> None:
        for engine in range(self.loop.engines):
            while len(self.at(engine, "running")) < self.loop.slots:
                waiting = self.at(engine, "waiting")
                if not waiting:
                    break
                each = waiting[0]
                key = (engine, each.step, each.group)
                if key not in self.known:
                    self.stall[engine] += self.loop.read(each.tokens.prompt)
                self.known.add(key)
                before = sum(tokens for _, tokens in each.by_version)
                if before and each.by_version[-1][0] != self.version:
                    self.stall[engine] += self.loop.read(round(before))
                self.turns += 1
                each.state = "running"
                each.admitted = self.turns

    def kept(self, step: int) -> list[int]:
        """Groups that are complete and not taken, as they became so."""
        groups = {h.group for h in self.held if h.step == step and h.state != "aborted"}
        members = {g: [h for h in self.held if (h.step, h.group) == (step, g)] for g in groups}
        whole = [g for g in groups if all(h.state == "done" for h in members[g])]
        return sorted(whole, key=lambda g: max(h.until for h in members[g]))

    def candidates(self) -> list[tuple[int, int]]:
        """(step, group) that this step may train on."""
        last = self.step - 1
        carried = [(last, group) for group in self.kept(last)] if self.loop.carry else []
        return [*carried, *((self.step, group) for group in self.kept(self.step))]

    def run(self, steps: int) -> None:
        while len(self.times) < steps:
            self.settle()
            if len(self.times) == steps:
                break
            ends = [self.until]
            ends += [h.until for h in self.held if h.state == "thinking"]
            for engine in range(self.loop.engines) if self.decodes() else ():
                running = self.at(engine, "running")
                rate = self.loop.token(len(running)) if running else 0.0
                ends += [self.now + self.stall[engine] + h.left * rate for h in running]
            self.pass_until(min(ends))

    def pass_until(self, time: float) -> None:
        for engine in range(self.loop.engines) if self.decodes() else ():
            if running := self.at(engine, "running"):
                passed = time - self.now
                reads = min(self.stall[engine], passed)
                self.stall[engine] -= reads
                tokens = (passed - reads) / self.loop.token(len(running))
                for each in running:
                    each.generate(self.version, tokens)
        self.now = time

    def settle(self) -> None:
        """Everything that happens now."""
        for each in [h for h in self.held if h.state == "running" and h.left < 1e-7]:
            each.state = "thinking"
            each.until = self.now + self.loop.latency
        self.admit()
        answered = [h for h in self.held if h.state == "thinking" and h.until <= self.now]
        for each in sorted(answered, key=lambda each: (each.until, each.admitted)):
            if each.state == "aborted":
                continue
            each.turn += 1
            if each.turn < len(each.tokens.turns):
                self.turns += 1
                each.order = self.turns
                each.state = "waiting"
                each.left = each.tokens.turns[each.turn]
                continue
            each.state = "done"
            kept = self.kept(each.step)
            if len(kept) == self.loop.keep and not self.loop.carry:
                for other in self.held:
                    if other.step == each.step and other.group not in kept:
                        other.state = "aborted"
        self.admit()
        self.trainer()

    def look_ahead(self) -> None:
        """Every step that may begin, if the trainer waits; else one, or none if it would not wait
        in the next step either, and has not for long."""
        may = self.step + self.loop.ahead + 1 - self.asked
        there = len(self.candidates())
        if self.step < self.asked and there >= self.loop.keep:
            more = len(self.kept(self.step + 1))
            known = self.step + 1 < self.asked
            self.spared.append(known and there + more >= 2 * self.loop.keep)
            fewer = len(self.spared) >= SPARE and all(self.spared[-SPARE:])
            may = min(may, 0 if fewer else 1)
            self.spared = [] if fewer else self.spared
        else:
            self.spared = []
        self.begins = may

    def trainer(self) -> None:
        if self.phase == "gather" and self.now >= self.until:
            self.look_ahead()
            self.phase = "drain"
            self.until = math.inf
            self.published = self.now
            self.settle()
            return
        beside = self.gathers and self.phase in ("drain", "publish") and self.since is None
        if beside and len(self.candidates()) >= self.loop.keep:
            self.since = self.now
            self.take()
            self.settle()
            return
        if self.phase == "drain":
            running = any(each.state == "running" for each in self.held)
            if not (running and self.loop.pause == "finish"):
                if self.loop.pause == "abort":
                    for each in self.held:
                        if each.state == "running":
                            each.state = "waiting"
                            each.order = each.admitted - 10**9
                if self.loop.pause != "keep":
                    self.stall = [0.0] * self.loop.engines
                self.known.clear()
                rest = self.loop.publish - (self.loop.gather or 0.0)
                self.phase = "publish"
                self.until = self.now + rest
        elif self.phase == "publish" and self.now >= self.until:
            self.phase = "wait"
            self.until = math.inf
            self.version = self.step
            if not self.gathers:
                self.published = self.now
                self.look_ahead()
            if self.since is not None:
                end = max(self.since, self.now - self.loop.beside) + self.loop.train
                self.phase = "train"
                self.until = end
                self.since = None
            for _ in range(self.begins):
                self.ask(self.loop.groups(self.asked))
            self.settle()
        elif self.phase == "wait" and len(self.candidates()) >= self.loop.keep:
            self.phase = "train"
            self.until = self.now + self.loop.train
            self.take()
            self.settle()
        elif self.phase == "train" and self.now >= self.until:
            self.times.append((self.began, self.published, self.ready, self.now))
            ages = dict[int, float]()
            for each in self.taken:
                for version, tokens in each.by_version:
                    age = self.step - int(version)
                    ages[age] = ages.get(age, 0.0) + tokens
            self.ages.append(ages)
            self.phase = "drain"
            self.until = math.inf
            self.began = self.now
            if self.gathers:
                self.phase = "gather"
                self.until = self.now + (self.loop.gather or 0.0)
            self.step += 1
            self.settle()

    def ask(self, groups: Any) -> None:
        if self.loop.carry:
            states = ("taken", "aborted")
            left = {(h.step, h.group) for h in self.held if h.state not in states}
            carried = len(left) - self.loop.keep * (self.asked - self.step)
            groups = groups[: len(groups) - max(0, carried)]
        for number, group in enumerate(groups):
            for each in group:
                self.turns += 1
                new = Held(self.asked, number, each, -1, self.turns, left=each.turns[0])
                self.held.append(new)
        self.asked += 1


def some_loop(seed: int) -> Loop:
    """A small run at random, whose times never meet by chance."""
    draw = random.Random(seed)
    prompts = draw.randint(1, 4)
    size = draw.randint(1, 3)
    turns = draw.randint(1, 2)
    more = draw.randint(0, 3)

    def trajectory() -> Trajectory:
        return Trajectory(
            draw.randint(1, 30),
            tuple(draw.randint(1, draw.choice([400, 8000])) for _ in range(turns)),
        )

    steps: list[tuple[Group, ...]] = [
        tuple(tuple(trajectory() for _ in range(size)) for _ in range(prompts + more))
        for _ in range(12)
    ]
    fixed = draw.uniform(1e-4, 1e-3)
    each = draw.uniform(0, 2e-4)
    reads = draw.uniform(0, 1e-4)
    ahead = draw.randint(0, 3)
    publish = draw.uniform(0.01, 0.5)
    beside = ahead > 0 and draw.choice([False, True])
    train = draw.uniform(0, 4)
    return Loop(
        engines=draw.randint(1, 3),
        slots=draw.randint(1, 4),
        token=lambda running: fixed + each * running,
        read=lambda tokens: reads * tokens,
        train=train,
        publish=publish,
        groups=lambda step: steps[step],
        keep=prompts,
        ahead=ahead,
        gather=draw.uniform(0, publish) if beside else None,
        beside=draw.uniform(0, train) if beside else 0.0,
        pause=draw.choice(get_args(Pause)),
        latency=draw.choice([0.0, draw.uniform(0.05, 1)]),
        carry=draw.choice([False, True]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_Simulation_equals_a_loop_over_every_request(seed: int):
    loop = some_loop(seed)
    fast = Simulation(loop)
    slow = BruteForce(loop)
    fast.run(9)
    slow.run(9)
    for found, times, ages in zip(fast.steps, slow.times, slow.ages, strict=True):
        assert found[:4] == pytest.approx(times, abs=1e-6)
        ours = {age: tokens for age, tokens in found.ages if tokens > 1e-6}
        assert ours == pytest.approx({a: t for a, t in ages.items() if t > 1e-6}, abs=1e-4)
        assert max(ours) <= loop.ahead + loop.carry


def equal_loop(ahead: int, train: float) -> Loop:
    """One engine decodes four sequences of 10 tokens at 0.1 s each: a second a step."""
    group = tuple(Trajectory(1, (10,)) for _ in range(4))
    return Loop(1, 4, lambda k: 0.1, lambda n: 0.0, train, 0.25, lambda step: [group], 1, ahead)


@pytest.mark.parametrize("train", [0.3, 1.0, 3.0])
def test_simulate_gives_what_follows_by_hand(train: float):
    """Without ahead everything adds up; with it a step is as long as the slower of both sides."""
    zero = simulate(equal_loop(0, train))
    assert zero.seconds == pytest.approx(0.25 + 1.0 + train)
    assert (zero.wait, zero.busy) == pytest.approx((1.0, 1 / zero.seconds))
    assert (zero.age, zero.oldest, zero.queued) == (0, 0, 0)
    one = simulate(equal_loop(1, train))
    assert one.seconds == pytest.approx(0.25 + max(1.0, train))
    assert one.trainer_idle == pytest.approx(max(0, 1 - train) / one.seconds)
    assert one.engines_idle == pytest.approx(1 - 1 / one.seconds)
    assert one.train + one.publish + one.wait == pytest.approx(one.seconds)
    assert one.oldest == 1


def test_simulate_counts_what_waits():
    """Two of four sequences wait for a second, then half of a group waits for the other half."""
    loop = replace(equal_loop(0, 1.0), slots=2)
    found = simulate(loop)
    assert found.seconds == pytest.approx(0.25 + 2.0 + 1.0)
    assert found.queued == pytest.approx(2 * 1.0 / found.seconds)
    assert found.running == pytest.approx(2 * 2.0 / found.seconds)
    assert found.ready == pytest.approx(2 * 1.0 / found.seconds)


def test_simulate_carries_groups_for_the_next_step_alone():
    """A step trains on two of three groups; the third goes on, and the next asks for two."""
    groups = [tuple(Trajectory(1, (10 * (1 + number),)) for _ in "ab") for number in range(3)]
    loop = Loop(1, 8, lambda k: 0.1, lambda n: 0.0, 1.5, 0.25, lambda step: groups, 2)
    aborts = simulate(loop)
    carries = simulate(replace(loop, carry=True))
    assert aborts.seconds == pytest.approx(0.25 + 2.0 + 1.5)
    assert (aborts.oldest, carries.oldest) == (0, 1)
    # the carried group ends while the trainer works, and one of ten tokens after the publish
    assert carries.seconds == pytest.approx((2 * 0.25 + 2 * 1.5 + 1.0 + 2.0) / 2, rel=0.2)


def test_simulate_rereads_after_an_abort_and_not_after_keep():
    loop = replace(equal_loop(1, 0.5), read=lambda tokens: 0.01 * tokens)
    abort, keep = (simulate(replace(loop, pause=pause)) for pause in ("abort", "keep"))
    assert keep.seconds < abort.seconds
    finish = simulate(replace(loop, pause="finish"))
    assert finish.publish > abort.publish == pytest.approx(0.25)
    assert finish.wait < abort.wait
