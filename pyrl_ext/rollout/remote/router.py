"""Gives requests to servers, and to other ones what a server that failed leaves."""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.parts import Parts
from pyrl_ext.rollout.remote.protocol import GENERATE, Answer, Partial, ProtocolError, Request

PROBE = 2.0  # servers that are not used are asked so often whether they are there [s]
SETTLED = 0.2  # weight of the last response in a server's pace

Check = Callable[[Request, Answer], None]
Waiter = tuple[Hashable, asyncio.Future["Lane"]]  # of a group


@dataclass
class Traffic:
    """Numbers of requests, which add up over ranks; `largest` are those that do not."""

    requests: int = 0
    resent: int = 0
    aborted_parts: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    queue_max: int = 0


@dataclass(eq=False)
class Lane:
    """A server, as a router knows it.

    Attributes:
        used: it has the weights, and gets requests
        there: it answered when it was asked last
        load: requests that it has
        waiting: requests of groups that are bound to it
        pace: seconds that a response takes it, a token; None: not known
        failures: times that it was taken out
        due: number of the publish in which it may take part again
    """

    server: Server
    used: bool = False
    there: bool = False
    load: int = 0
    waiting: deque[Waiter] = field(default_factory=deque[Waiter])
    pace: float | None = None
    failures: int = 0
    due: int = 0


class Router:
    """Servers, and the requests that wait for one. All methods are for the thread of the loop.

    A group goes to the server that would begin with it first, by the number of its requests and
    its pace, and stays there: its requests share a prompt, and its turns a context.

    Args:
        servers: none is used before `release` names it
        limit: requests that a server has at once; further ones wait here, for any server
        least: the run stops when fewer servers are used
        check: raises ProtocolError for an answer that cannot be right
        name: of this rank, for messages

    Attributes:
        version: of the weights that servers have; requests wait until there are any
        newest: of those that some may have already, while they are published
        traffic: see `Traffic`
    """

    def __init__(
        self, servers: Sequence[Server], limit: int, least: int, check: Check, name: str = ""
    ):
        self.lanes = [Lane(server) for server in servers]
        self.limit = limit
        self.least = least
        self.check = check
        self.name = name
        self.version: int | None = None
        self.newest: int | None = None
        self.traffic = Traffic()
        self._held = True
        self._publishes = 0
        self._broken: Exception | None = None
        self._bound: dict[Hashable, Lane] = {}
        self._unbound: OrderedDict[Hashable, deque[Waiter]] = OrderedDict()
        self._queued = 0
        self._probe: asyncio.Task[None] | None = None

    # requests ----------------------------------------------------------------------------------

    async def answer(self, group: Hashable, request: Request) -> Parts:
        """The whole response to a request, from as many servers as it takes.

        Raises: RuntimeError when too few servers are left; Refused.
        """
        parts = Parts(request)
        loop = asyncio.get_running_loop()
        self.traffic.requests += 1
        while parts.finish_reason is None:
            asked_at = loop.time()
            lane = await self._placed(group)
            began = loop.time()
            version = self.version or 0
            publishes = self._publishes
            self.traffic.queue_seconds += began - asked_at
            asked = parts.rest(str(version))
            part = Partial(asked)
            pace = None
            try:
                answer = await lane.server.generate(asked, part)
                self._checked(lane.server, asked, answer, version)
                if answer.token_ids:
                    pace = (loop.time() - began) / len(answer.token_ids)
                known = len(parts.token_ids)
                parts.add(answer)
                if answer.finish_reason == "abort":
                    self.traffic.aborted_parts += 1
                    if len(parts.token_ids) == known and not self._publishes > publishes:
                        self._need_publish(lane.server, asked)
            except ServerFailed as error:
                self.take_out(lane, str(error), error.keeps)
                # where weights are replaced, nobody knows which tokens are of which
                if error.keeps and self.newest == version:
                    parts.keep(part, version)
                self.traffic.resent += 1
            finally:
                self.traffic.seconds += loop.time() - began
                self._left(lane, pace)
        return parts

    def _need_publish(self, server: Server, asked: Request) -> None:
        if not self._held:  # it would do so again and again
            raise ServerFailed(
                f"{server.address}{GENERATE}: {asked.request_id} aborted without a new token, "
                "expected that while weights are published",
                keeps=True,
            )

    def _checked(self, server: Server, asked: Request, answer: Answer, version: int) -> None:
        where = f"{server.address}{GENERATE}: answer to {asked.request_id}"
        try:
            self.check(asked, answer)
        except ProtocolError as error:
            raise ServerFailed(f"{where}: {error}") from error
        # a server that has new weights goes on, while others still take them
        newest = self.newest or 0
        if wrong := [v for _, _, v in answer.versions if not version <= v <= newest]:
            raise ServerFailed(f"{where}: weights of version {wrong[0]}, expected {version}")

    async def _placed(self, group: Hashable) -> Lane:
        """The server of the group, once it has room and no publish runs."""
        if self._broken is not None:
            raise self._broken
        waiter: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        lane = self._bound.get(group)
        queue = self._unbound.setdefault(group, deque()) if lane is None else lane.waiting
        queue.append((group, waiter))
        self._queued += 1
        self._pump()
        if not waiter.done():
            self.traffic.queue_max = max(self.traffic.queue_max, self._queued)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._left(waiter.result(), None)
            else:
                self._queued -= 1
            raise

    def _pump(self) -> None:
        """Give servers with room what waits for them."""
        if self._held:
            return
        used = [lane for lane in self.lanes if lane.used]
        for lane in used:
            self._fill(lane)
        while self._unbound and used:
            lane = min(used, key=self._delay)
            if lane.load >= self.limit:
                return  # a request that waits is begun sooner there than where there is room
            group, waiters = self._unbound.popitem(last=False)
            if any(not waiter.done() for _, waiter in waiters):
                self._bound[group] = lane
                lane.waiting.extend(waiters)
                self._fill(lane)

    def _fill(self, lane: Lane) -> None:
        while lane.waiting and lane.load < self.limit:
            _, waiter = lane.waiting.popleft()
            if not waiter.done():  # else its stream was closed
                lane.load += 1
                self._queued -= 1
                waiter.set_result(lane)

    def _delay(self, lane: Lane) -> float:
        """About how long a further response would take."""
        known = [each.pace for each in self.lanes if each.pace is not None and each.used]
        pace = min(known, default=1.0) if lane.pace is None else lane.pace
        return (lane.load + len(lane.waiting) + 1) * pace

    def _left(self, lane: Lane, pace: float | None) -> None:
        lane.load -= 1
        if pace is not None:
            before = pace if lane.pace is None else lane.pace
            lane.pace = before + SETTLED * (pace - before)
        self._pump()

    def forget(self, groups: Sequence[Hashable]) -> None:
        """These groups have no further requests."""
        for group in groups:
            self._bound.pop(group, None)
            self._unbound.pop(group, None)

    # servers -----------------------------------------------------------------------------------

    def take_out(self, lane: Lane, reason: str, keeps: bool = False) -> None:
        """Give no further requests to a server; those that it has go to others.

        Args:
            keeps: the tokens that it sent before are good
        """
        lane.server.fail(reason, keeps)
        if not (lane.used or lane.there):
            return
        lane.used = False
        lane.there = False
        lane.pace = None
        lane.failures += 1
        lane.due = self._publishes + 2 ** (lane.failures - 1)
        self._bound = {group: to for group, to in self._bound.items() if to is not lane}
        waiting = lane.waiting
        lane.waiting = deque()
        for group, waiter in waiting:
            self._unbound.setdefault(group, deque()).append((group, waiter))
            self._unbound.move_to_end(group, last=False)
        left = sum(each.used for each in self.lanes)
        print(f"{self.name}: {reason}; {left} servers are left", file=sys.stderr, flush=True)
        if left < self.least:
            self.stop(RuntimeError(self.too_few()))
        self._pump()

    def stop(self, error: Exception) -> None:
        """End all requests with an error."""
        self._broken = error
        queues = [*self._unbound.values(), *(lane.waiting for lane in self.lanes)]
        for waiter in [waiter for queue in queues for _, waiter in queue]:
            if not waiter.done():
                waiter.set_exception(error)

    def too_few(self) -> str:
        """The message that servers are missing, and why each of them is."""
        lines = [
            f"\n  {lane.server.reason or f'{lane.server.address}: does not answer'}"
            for lane in self.lanes
            if not lane.used
        ]
        used = len(self.lanes) - len(lines)
        return (
            f"rollout.min_servers: {used} of {len(self.lanes)} servers are left, expected at least "
            f"{self.least}; those that are not used:{''.join(lines)}"
        )

    def hold(self, version: int) -> dict[str, str]:
        """Give no server a request until `release`; those under way may be silent.

        Args:
            version: of the weights that are published

        Returns: address -> reason of the servers that this rank took out.
        """
        self._held = True
        self.newest = version
        for lane in self.lanes:
            lane.server.paused = True
        return {
            lane.server.address: lane.server.reason for lane in self.lanes if lane.server.reason
        }

    def release(self, version: int | None, tried: Mapping[str, str | None]) -> None:
        """Go on after a publish.

        Args:
            version: of the weights that servers have now; None: requests go on waiting
            tried: address -> why it failed, of the servers that took part; None: it has the
                weights. The others are not used
        """
        self._publishes += 1
        for lane in self.lanes:
            server = lane.server
            if server.address in tried and tried[server.address] is None:
                lane.used = True
                server.failure = None
            elif lane.used or server.address in tried:
                self.take_out(lane, tried.get(server.address) or "the first rank does not use it")
            server.paused = False
        self.version = self.newest = version
        self._held = version is None
        if sum(lane.used for lane in self.lanes) < self.least:
            self.stop(RuntimeError(self.too_few()))
        self._pump()

    async def ready(self, patience: float) -> list[Lane]:
        """The servers that take part in the next publish, as soon as there are enough.

        Raises: RuntimeError when there are too few of them for ``patience`` [s].
        """
        if self._probe is None:
            await self._probed()
            self._probe = asyncio.get_running_loop().create_task(self._probing())
        end = asyncio.get_running_loop().time() + (patience if self.version is None else 0.0)
        while True:
            if self._broken is not None:
                raise self._broken
            due = self._publishes + 1
            found = [lane for lane in self.lanes if lane.used or (lane.there and lane.due <= due)]
            if len(found) >= self.least:
                return found
            if asyncio.get_running_loop().time() > end:
                raise RuntimeError(self.too_few())
            await asyncio.sleep(PROBE / 4)

    async def _probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE)
            await self._probed()

    async def _probed(self) -> None:
        out = [lane for lane in self.lanes if not lane.used]
        found = await asyncio.gather(*(lane.server.healthy() for lane in out))
        for lane, there in zip(out, found, strict=True):
            lane.there = there

    async def close(self) -> None:
        """Close all connections."""
        if self._probe is not None:
            self._probe.cancel()
        await asyncio.gather(*(lane.server.close() for lane in self.lanes))
