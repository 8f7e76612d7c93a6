"""Taker: the part of one server in a publish, step by step, within its time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from pyrl_ext.rollout.remote import protocol
from pyrl_ext.rollout.remote.canary import Canary, Seen
from pyrl_ext.rollout.remote.client import Refused, Server, ServerFailed
from pyrl_ext.rollout.remote.identity import Identity
from pyrl_ext.rollout.remote.sender import Transfer, address_towards
from pyrl_ext.rollout.remote.staged import UpdateInfo

ANSWER = 2.0  # for a server to say why it left a transfer [s]
Pause = Literal["finish", "keep", "abort"]


class Taker:
    """One server's part in a publish.

    Args:
        version: of the weights
        failed: gets the reason of each server that fails, by address
        seconds: gets the longest time of any server, by step

    Attributes:
        left: time that it may still take [s]
        fetching: the call in which the server fetches the weights
    """

    fetching: asyncio.Task[dict[str, Any]] | None = None
    _counted = 0.0  # until when time is taken off

    def __init__(
        self,
        server: Server,
        version: int,
        timeout: float,
        failed: dict[str, str],
        seconds: dict[str, float],
    ):
        self.server = server
        self.version = version
        self.left = timeout
        self.failed = failed
        self.seconds = seconds

    async def prepare(self, pause: Pause, identity: Identity | None, base: int | None) -> None:
        """Everything before the first byte."""
        known, self.server.joined = self.server.joined, False
        self.server.failure = None  # also of one that failed earlier, and is there again
        if known:  # it is the trainer's to pause, whoever answers there now
            await asyncio.gather(self._identify(identity), self.pause(pause))
        else:
            await self._identify(identity)
            await self.pause(pause)
        if base is not None:
            found = await self._call("start", protocol.WEIGHT_INFO, method="GET")
            if (has := found.get("weight_version")) != str(base):
                raise ServerFailed(
                    f"{self.server.address}: it has weights of version {has}, expected {base}, of "
                    "which a part is replaced; it needs all of them first"
                )
        await self._start()

    async def again(self) -> None:
        """Everything before the first byte once more, for a server that missed some."""
        del self.failed[self.server.address]
        self.fetching = None
        await self._start()

    async def _start(self) -> None:
        try:
            await self._call("start", protocol.START)
        except ServerFailed:  # of a trainer that died: vLLM takes no second start
            with suppress(ServerFailed):
                await self._call("start", protocol.UPDATE, {"update_info": {"drop": True}})
            await self._call("start", protocol.START)

    async def _identify(self, identity: Identity | None) -> None:
        # senders look again: here a server that cannot be reached fails alone
        await asyncio.to_thread(address_towards, self.server.address)
        if identity is not None:
            found = await self._call("identity", protocol.RPC, {"method": "identity"})
            for each in found.get("results") or [{}]:
                if why := identity.differs(each):
                    raise ServerFailed(f"{self.server.address}: {why}; it may not join")

    async def pause(self, pause: Pause) -> None:
        """With ``keep`` requests that run go on with the keys and values of the old weights."""
        keep = str(pause != "keep").lower()
        mode = protocol.PAUSE_MODES[pause]
        await self._call("pause", f"{protocol.PAUSE}?mode={mode}&clear_cache={keep}")

    async def complete(self, pause: Pause) -> None:
        """Everything after the last byte."""
        finish = self._call("finish", protocol.FINISH, {"weight_version": str(self.version)})
        if pause == "keep":  # salts keep the blocks of running requests apart
            await finish
        else:  # in any order: nothing is computed, and so cached, before it is resumed
            await asyncio.gather(finish, self._call("reset", protocol.RESET))
        await self._call("resume", protocol.RESUME)
        self.server.joined = True

    async def ask(self, canary: Canary) -> Seen:
        """The canary's answers; a server whose answers are wrong is taken out and paused."""
        try:
            return await self._seen(canary)
        except ServerFailed as error:
            self.server.fail(str(error))  # requests would wait there until it resumes
            with suppress(ServerFailed):
                await self.pause("abort")
            raise

    async def _seen(self, canary: Canary) -> Seen:
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self.left):
                seen = await canary.ask(self.server, self.version)
        except (ServerFailed, Refused, TimeoutError) as error:
            raise ServerFailed(str(error) or f"{self.server.address}: no canary in time") from error
        self._took("canary", begin)
        return seen

    async def _call(
        self, step: str, path: str, body: Any = None, method: str = "POST"
    ) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            return await self.server.control(path, body, max(self.left, 0.0), method)
        finally:
            self._took(step, begin)

    def _took(self, step: str, begin: float) -> None:
        self._spent(begin)
        self.seconds[step] = max(self.seconds.get(step, 0.0), time.monotonic() - begin)

    def _spent(self, begin: float) -> None:
        """Take the time since then off, once for calls that run side by side."""
        now = time.monotonic()
        self.left -= now - max(begin, self._counted)
        self._counted = now

    def fetch(self, transfer: Transfer, info: UpdateInfo) -> None:
        """Ask the server to fetch the weights; it answers once it has verified everything."""
        body = {"update_info": info.to_json()}
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
        fetching = self.fetching
        begin = time.monotonic()
        assert fetching is not None
        if reason is not None:
            why = reason if address in reason else f"{address}: it {reason}"
            try:  # the server may say what it did not like, a moment after it left
                await asyncio.wait_for(fetching, min(self.left, ANSWER))
            except ServerFailed as error:
                why = why if str(error) in why else f"{why}; {error}"
            except TimeoutError:
                pass
            raise ServerFailed(why)
        try:
            await asyncio.wait_for(fetching, self.left)
        except TimeoutError:
            raise ServerFailed(f"{address}: no answer after the last tensor") from None
        finally:
            self._spent(begin)


async def each_of(parts: Sequence[Taker], step: Any) -> list[Taker]:
    """One step of all servers at once; those that did not fail."""
    ends = await asyncio.gather(*map(step, parts), return_exceptions=True)
    for part, end in zip(parts, ends, strict=True):
        if isinstance(end, Exception):
            address = part.server.address
            part.failed[address] = reason_of(address, end)
        elif isinstance(end, BaseException):
            raise end
    return [part for part, end in zip(parts, ends, strict=True) if end is None]


def reason_of(address: str, error: Exception) -> str:
    return str(error) if isinstance(error, ServerFailed) else f"{address}: {error!r}"
