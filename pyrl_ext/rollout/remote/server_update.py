"""The part of one server in a weight sync, step by step, within its time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pyrl_ext.parallel.waiting import Wait
from pyrl_ext.rollout.remote import protocol
from pyrl_ext.rollout.remote.canary import Canary
from pyrl_ext.rollout.remote.client import NotReached, Refused, Server, ServerFailed
from pyrl_ext.rollout.remote.cuts import reached_soon
from pyrl_ext.rollout.remote.holder import Run
from pyrl_ext.rollout.remote.identity import Identity, difference
from pyrl_ext.rollout.remote.protocol import Answer
from pyrl_ext.rollout.remote.weight_protocol import UpdateInfo
from pyrl_ext.rollout.remote.weight_sender import Transfer, way_to

ANSWER_TIMEOUT_S = 2.0  # for a server to name the reason why it left a transfer
SHOWN = 8  # servers that a line names
ADVICE = "An engine that takes longer is removed (rollout.publish_timeout)"
Pause = Literal["finish", "keep", "abort"]


@dataclass(eq=False)
class ServerUpdate:
    """One server's part in a weight sync.

    Args:
        version: of the weights
        timeout: longest time of a step [s]
        failed: gets the reason of each server that fails, by address
        seconds: gets the longest time of any server, by step

    Attributes:
        kept: number of the sync whose bytes it holds; "": it holds none, or was not asked
        fetching: the call in which the server fetches the weights
        waits_for: address and path of the call that the step waits for
        until: longest time of that call is over then, on the monotonic clock [s]
    """

    server: Server
    version: int
    timeout: float
    failed: dict[str, str]
    seconds: dict[str, float]
    kept: str = ""
    fetching: asyncio.Task[dict[str, Any]] | None = None
    waits_for: str = ""
    until: float = 0.0

    async def prepare(
        self, pause: Pause, run: Run | None, identity: Identity | None, base: int | None
    ) -> None:
        """Everything before the first byte."""
        address = self.server.address
        self._waits("")
        self.server.failure = None  # also of one that failed earlier, and is there again
        # senders look again: here a server that cannot be reached fails alone
        patience = min(self.timeout, self.server.patience)
        try:
            await reached_soon(lambda: asyncio.to_thread(way_to, address), patience)
        except OSError as error:
            raise ServerFailed(f"{address}: no way there ({error}), expected one") from error
        await self._identify(identity)
        await self._claim(run)
        await self.pause(pause)
        if base is not None:
            info = await self._call("start", protocol.WEIGHT_INFO, method="GET")
            version = info.get("weight_version")
            if version != str(base):
                raise ServerFailed(
                    f"{address}: it has weights of version {version}, expected {base}, of which a "
                    "part is replaced; it needs all of them first"
                )
        await self._start()

    async def look(self) -> None:
        """Ask which bytes the server holds, of which changes are enough."""
        answer = await self._call("start", protocol.RPC, {"method": "kept"})
        self.kept = next(filter(None, answer.get("results") or ()), "")

    async def repeat(self) -> None:
        """Everything before the first byte once more, for a server that missed some."""
        del self.failed[self.server.address]
        self.fetching = None
        await self._start()

    async def _start(self) -> None:
        try:
            await self._call("start", protocol.START)
        except NotReached:
            raise
        except ServerFailed:  # of a trainer that died: vLLM takes no second start
            with suppress(ServerFailed):
                await self._call("start", protocol.UPDATE, {"update_info": {"drop": True}})
            await self._call("start", protocol.START)

    async def _claim(self, run: Run | None) -> None:
        if run is not None:
            answer = await self._call("identity", protocol.RPC, {"method": "claim", "args": run})
            for other in filter(None, answer.get("results") or ()):
                raise ServerFailed(
                    f"{self.server.address}: it serves another run, {other}, expected none. End "
                    "that run; if it has been killed, resume it or start the engine again"
                )

    async def _identify(self, identity: Identity | None) -> None:
        if identity is not None:
            answer = await self._call("identity", protocol.RPC, {"method": "identity"})
            for worker in answer.get("results") or [{}]:
                reason = difference(identity, worker)
                if reason:
                    raise ServerFailed(f"{self.server.address}: {reason}; it may not join")

    async def pause(self, pause: Pause) -> None:
        """With ``keep`` requests that run continue with the keys and values of the old weights."""
        clear = str(pause != "keep").lower()
        mode = protocol.PAUSE_MODES[pause]
        await self._call("pause", f"{protocol.PAUSE}?mode={mode}&clear_cache={clear}")

    async def complete(self, pause: Pause) -> None:
        """Everything after the last byte."""
        await self._call("finish", protocol.FINISH, {"weight_version": str(self.version)})
        if pause != "keep":  # salts separate the blocks of requests that continue
            await self._call("reset", protocol.RESET)
        await self._call("resume", protocol.RESUME)

    async def ask(self, canary: Canary) -> Answer:
        """The canary's answer; a server whose answer is wrong is taken out and paused."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout):
                answer = await canary.ask(self.server, self.version)
        except (ServerFailed, Refused, TimeoutError) as error:
            reason = str(error) or f"{self.server.address}: no canary in time"
            self.server.fail(reason)  # requests would wait there until it resumes
            with suppress(ServerFailed):
                await self.pause("abort")
            raise ServerFailed(reason) from error
        self._took("canary", begin)
        return answer

    async def _call(
        self, step: str, path: str, body: Any = None, method: str = "POST"
    ) -> dict[str, Any]:
        begin = time.monotonic()
        self._waits(path.partition("?")[0])
        try:
            return await self.server.control(path, body, self.timeout, method)
        finally:
            self._took(step, begin)

    def _waits(self, path: str) -> None:
        self.waits_for = f"{self.server.address}{path}"
        self.until = time.monotonic() + self.timeout

    def _took(self, step: str, begin: float) -> None:
        self.seconds[step] = max(self.seconds.get(step, 0.0), time.monotonic() - begin)

    def fetch(self, transfer: Transfer, info: UpdateInfo) -> None:
        """Ask the server to fetch the weights; it answers once it has verified everything."""
        body = {"update_info": info.model_dump()}
        call = self.server.control(protocol.UPDATE, body, math.inf)  # `received` sets its time
        self.fetching = asyncio.get_running_loop().create_task(call)

        def ended(fetching: asyncio.Task[dict[str, Any]]) -> None:
            if not fetching.cancelled() and (error := fetching.exception()):
                transfer.fail(info.engine, str(error))

        self.fetching.add_done_callback(ended)

    async def received(self, reason: str | None) -> None:
        """Wait until the server has verified everything.

        Args:
            reason: why a rank could not send it its part; None: all could
        """
        address = self.server.address
        assert self.fetching is not None
        timeout = self.timeout if reason is None else min(self.timeout, ANSWER_TIMEOUT_S)
        self._waits(protocol.UPDATE)
        try:  # the server may name the cause a moment after it left
            await asyncio.wait_for(self.fetching, timeout)
        except TimeoutError:
            if reason is None:
                raise ServerFailed(f"{address}: no answer after the last tensor") from None
        except ServerFailed as error:
            if reason is None:
                raise
            reason = reason if str(error) in reason else f"{reason}; {error}"
        if reason is not None:
            raise ServerFailed(reason if address in reason else f"{address}: it {reason}")


Step = Callable[[ServerUpdate], Coroutine[Any, Any, None]]


async def run_step(updates: Sequence[ServerUpdate], step: Step) -> list[ServerUpdate]:
    """One step of all servers at once; returns those that did not fail.

    A step that takes long prints which servers have not answered.
    """
    tasks = [asyncio.ensure_future(step(update)) for update in updates]
    results = asyncio.gather(*tasks, return_exceptions=True)
    wait = Wait("remote engines that get new weights", advice=ADVICE)
    while not results.done():
        await asyncio.wait({results}, timeout=wait.due - wait.seconds)
        left = [u for u, task in zip(updates, tasks, strict=True) if not task.done()]
        if left:
            wait.limit = round(max(update.until for update in left) - wait.began)
            wait.goes_on(_named(left))
    succeeded: list[ServerUpdate] = []
    for update, result in zip(updates, await results, strict=True):
        if result is None:
            succeeded.append(update)
        elif isinstance(result, Exception):
            address = update.server.address
            update.failed[address] = reason_of(address, result)
        else:
            raise result
    return succeeded


def _named(updates: Sequence[ServerUpdate]) -> str:
    """The calls that have no answer."""
    names = [update.waits_for for update in updates[:SHOWN]]
    if len(updates) > SHOWN:
        names.append(f"and {len(updates) - SHOWN} more")
    return f"no answer from {', '.join(names)}"


def reason_of(address: str, error: Exception) -> str:
    """The message of a server's failure, with its address."""
    return str(error) if isinstance(error, ServerFailed) else f"{address}: {error!r}"
