"""Gives requests to servers, and what a failed server leaves to the others."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from pyrl_ext.parallel.ports import Absence, absence_at
from pyrl_ext.parallel.waiting import NotYet
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.holder import salt_of
from pyrl_ext.rollout.remote.parts import Parts
from pyrl_ext.rollout.remote.protocol import GENERATE, Answer, Partial, ProtocolError, Request

PROBE_S = 2.0  # between two questions to a server that is not used
SHOWN = 8  # servers that a line names

Check = Callable[[Answer], None]


@dataclass
class Traffic:
    """Numbers of requests, which add up over ranks; ``queue_max`` is the largest of them."""

    requests: int = 0
    resent: int = 0
    aborted_parts: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    queue_max: int = 0


@dataclass(eq=False)
class ServerState:
    """A server, as a router knows it.

    Attributes:
        used: it has the weights, and gets requests
        there: it answered when it was asked last
        absence: why it did not; None: it did, or was not asked yet
        load: number of requests that it has
    """

    server: Server
    used: bool = False
    there: bool = False
    absence: Absence | None = None
    load: int = 0

    @property
    def reason(self) -> str:
        """Why it is not used, with its address."""
        if self.server.reason:
            return self.server.reason
        return f"{self.server.address}: {self.absence.reason if self.absence else 'not used'}"


class Router:
    """Servers, and the requests that wait for one. All methods are for the thread of the loop.

    A group goes to the server with the fewest requests, and stays there: its requests share a
    prompt, and its turns a context.

    Args:
        servers: none is used before `release` names it
        limit: requests that a server has at once; further ones wait here, for any server
        least: the run stops when fewer servers are used
        check: raises ProtocolError for an answer that cannot be right
        name: of this rank, for messages
        run: folder of the run

    Attributes:
        version: of the weights that servers have; requests wait until there are any
        newest: of those that some may have already, while they are published
        traffic: see `Traffic`
    """

    def __init__(
        self,
        servers: Sequence[Server],
        limit: int,
        least: int,
        check: Check,
        name: str = "",
        run: str = "",
    ):
        self.states = [ServerState(server) for server in servers]
        self.limit = limit
        self.least = least
        self.check = check
        self.name = name
        self.run = run
        self.version: int | None = None
        self.newest: int | None = None
        self.traffic = Traffic()
        self._held = True
        self._publishes = 0
        self._broken: Exception | None = None
        self._bound: dict[Hashable, ServerState] = {}
        self._waiting: deque[tuple[Hashable, asyncio.Future[ServerState]]] = deque()
        self._probe: asyncio.Task[None] | None = None
        self._probed_all = False  # once
        self._closed = False

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
            state = await self._placed(group)
            began = loop.time()
            self.traffic.queue_seconds += began - asked_at
            version = self.version or 0
            asked = parts.rest(salt_of(self.run, version))
            part = Partial(asked)
            try:
                await self._answer(state.server, asked, part, parts, version)
            except ServerFailed as error:
                self.take_out(state, str(error), error.keeps)
                # where weights are replaced, nobody knows which tokens are of which
                if error.keeps and self.newest == version:
                    parts.keep(part, version)
                self.traffic.resent += 1
            finally:
                self.traffic.seconds += loop.time() - began
                self._left(state)
        return parts

    async def _answer(
        self, server: Server, asked: Request, part: Partial, parts: Parts, version: int
    ) -> None:
        """One server's part of a response. Raises: ServerFailed; Refused."""
        where = f"{server.address}{GENERATE}: answer to {asked.request_id}"
        publishes = self._publishes
        answer = await server.generate(asked, part)
        try:
            self.check(answer)
        except ProtocolError as error:
            raise ServerFailed(f"{where}: {error}") from error
        # a server that has new weights generates, while others still take them
        newest = self.newest or 0
        wrong = [v for _, _, v in answer.versions if not version <= v <= newest]
        if wrong:
            raise ServerFailed(f"{where}: weights of version {wrong[0]}, expected {version}")
        count = len(parts.token_ids)
        parts.add(answer)
        if answer.finish_reason == "abort":
            self.traffic.aborted_parts += 1
            published = self._held or self._publishes > publishes
            if len(parts.token_ids) == count and not published:  # it would do so again and again
                raise ServerFailed(
                    f"{where}: an abort without a new token, expected that while weights are "
                    "published",
                    keeps=True,
                )

    async def _placed(self, group: Hashable) -> ServerState:
        """The server of the group, once it has room and no publish runs."""
        if self._broken is not None:
            raise self._broken
        waiter: asyncio.Future[ServerState] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, waiter))
        self._pump()
        if not waiter.done():
            self.traffic.queue_max = max(self.traffic.queue_max, len(self._waiting))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._left(waiter.result())
            raise

    def _pump(self) -> None:
        """Give servers with room the requests that wait."""
        used = [state for state in self.states if state.used]
        later: list[tuple[Hashable, asyncio.Future[ServerState]]] = []
        while self._waiting and not self._held and any(s.load < self.limit for s in used):
            group, waiter = self._waiting.popleft()
            if waiter.done():  # its stream was closed
                continue
            state = self._bound.get(group) or min(used, key=lambda s: s.load)
            if state.load >= self.limit:
                later.append((group, waiter))
                continue
            self._bound[group] = state
            state.load += 1
            waiter.set_result(state)
        self._waiting.extendleft(reversed(later))

    def _left(self, state: ServerState) -> None:
        state.load -= 1
        self._pump()

    def forget(self, groups: Sequence[Hashable]) -> None:
        """These groups have no further requests."""
        for group in groups:
            self._bound.pop(group, None)

    # servers -----------------------------------------------------------------------------------

    def take_out(self, state: ServerState, reason: str, keeps: bool = False) -> None:
        """Give no further requests to a server; those that it has go to others.

        Args:
            keeps: the tokens that it sent before are good
        """
        state.server.fail(reason, keeps)
        if self._closed or not (state.used or state.there):
            return
        state.used = False
        state.there = False
        self._bound = {group: to for group, to in self._bound.items() if to is not state}
        left = sum(other.used for other in self.states)
        servers = f"{left} of {len(self.states)} servers are left"
        print(f"{self.name}: {reason}; {servers}", file=sys.stderr, flush=True)
        if left < self.least:
            self.stop(RuntimeError(self.too_few()))
        self._pump()

    def stop(self, error: Exception) -> None:
        """End all requests with an error."""
        self._broken = error
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)

    def too_few(self) -> str:
        """The message that servers are missing, and why each of them is."""
        lines = [f"\n  {state.reason}" for state in self.states if not state.used]
        used = len(self.states) - len(lines)
        return (
            f"rollout.min_servers: {used} of {len(self.states)} servers are left, expected at "
            f"least {self.least}; unused servers:{''.join(lines)}"
        )

    def hold(self, version: int) -> dict[str, str]:
        """Give no server a request until `release`; running ones may be silent.

        Args:
            version: of the weights that are published

        Returns: address -> reason of the servers that this rank took out.
        """
        self._held = True
        self.newest = version
        for state in self.states:
            state.server.paused = True
        return {s.server.address: s.server.reason for s in self.states if s.server.reason}

    def release(self, version: int, tried: Mapping[str, str | None]) -> None:
        """End a publish.

        Args:
            version: of the weights that servers have now
            tried: address -> why it failed, of the servers that took part; None: it has the
                weights. The others are not used
        """
        self._publishes += 1
        for state in self.states:
            server = state.server
            if server.address in tried and tried[server.address] is None:
                state.used = True
                server.failure = None
            elif state.used or server.address in tried:
                reason = tried.get(server.address) or "the first rank does not use it"
                self.take_out(state, reason)
            server.paused = False
        self.version = self.newest = version
        self._held = False
        if sum(state.used for state in self.states) < self.least:
            self.stop(RuntimeError(self.too_few()))
        self._pump()

    async def look(self) -> list[ServerState]:
        """The servers that take part in the next publish, if there are enough.

        Raises: NotYet with the reason of each server when there are too few for the first publish;
            RuntimeError when there are too few for a later one.
        """
        if self._probe is None:
            self._probe = asyncio.get_running_loop().create_task(self._probing())
        if self._broken is not None:
            raise self._broken
        if not self._probed_all:
            raise NotYet("asked, without an answer so far")
        present = [state for state in self.states if state.used or state.there]
        if len(present) >= self.least:
            return present
        if self.version is not None:
            raise RuntimeError(self.too_few())
        absent = [state for state in self.states if state not in present]
        reasons = [state.reason for state in absent[:SHOWN]]
        if len(absent) > SHOWN:
            reasons.append(f"and {len(absent) - SHOWN} more")
        is_taken = any(state.absence is not None and state.absence.is_taken for state in absent)
        raise NotYet("; ".join(reasons), at_once=is_taken)

    async def _probing(self) -> None:
        while True:
            await self._probe_unused()
            self._probed_all = True
            await asyncio.sleep(PROBE_S)

    async def _probe_unused(self) -> None:
        unused = [state for state in self.states if not state.used]
        servers = [state.server for state in unused]
        asked = (asyncio.to_thread(absence_at, each.address, tls=each.tls) for each in servers)
        absences = await asyncio.gather(*asked)
        for state, absence in zip(unused, absences, strict=True):
            state.absence = absence
            state.there = absence is None

    async def end_tasks(self) -> None:
        """Cancel all tasks of the loop: aiohttp does not tell a reader that its session was closed,
        and does not close a session before it has sent the bodies of its requests."""
        self._closed = True
        self.stop(RuntimeError("Router: closed, expected no open requests"))
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End all tasks, and close all connections."""
        await self.end_tasks()
        await asyncio.gather(*(state.server.close() for state in self.states))
