"""publish: new weights for all servers, as a protocol whose every step has a deadline.

On each server: compare its identity, pause, start, update, finish, drop caches and resume. Then it
generates, and is asked for the canary meanwhile. A server that fails at any step is left there:
paused, and out of rotation. Its old weights are whole unless it failed while it loaded the new
ones, and then it refuses to generate.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from pyrl_ext.dist.buckets import Named
from pyrl_ext.rollout.servers import protocol
from pyrl_ext.rollout.servers.canary import Canary, Seen
from pyrl_ext.rollout.servers.client import Refused, Server, ServerFailed
from pyrl_ext.rollout.servers.identity import Identity
from pyrl_ext.rollout.servers.sender import Transfer, address_towards

ANSWER = 2.0  # for a server to say why it left a transfer [s]
Pause = Literal["finish", "keep", "abort"]


@dataclass(frozen=True)
class Weights:
    """One version of the weights, to be published.

    Args:
        named: (name, tensor); the stream is read in the caller's thread
        version: of them
        shapes: of all tensors that servers hold, by name
        only: names of the tensors that are sent, the others stay; None: all
        base: version that servers need to have with ``only``; None: any
        bucket_bytes: of each of the two buffers that they pass through
        device: of the tensors
    """

    named: Named
    version: int
    shapes: Mapping[str, Sequence[int]]
    only: Collection[str] | None = None
    base: int | None = None
    bucket_bytes: int = 2**30
    device: torch.device | str = "cpu"


@dataclass
class Published:
    """How a publish ended.

    Attributes:
        failed: address -> why the server does not have the weights, or must not be used
        asked: address -> how the canary comes back from it
        seen: the same, of those that `wait` found right
        seconds: by step, the longest of any server
        bytes: sent to all servers together
    """

    failed: dict[str, str] = field(default_factory=dict[str, str])
    asked: dict[str, Future[Seen]] = field(default_factory=dict[str, Any])
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    bytes: int = 0

    def wait(self) -> dict[str, str]:
        """Address -> why its canary is wrong, once every server answered it or failed."""
        failed = dict[str, str]()
        for address, asked in self.asked.items():
            try:
                self.seen[address] = asked.result()
            except Exception as error:
                failed[address] = _reason(address, error)
        return failed

    def cancel(self) -> None:
        """Ask no server for the canary any more."""
        for asked in self.asked.values():
            asked.cancel()


def publish(
    loop: asyncio.AbstractEventLoop,
    servers: Sequence[Server],
    weights: Weights,
    *,
    pause: Pause,
    timeout: float,
    identity: Identity | None = None,
    canary: Canary | None = None,
) -> Published:
    """Give every server the weights. The caller holds new requests until it returns.

    Args:
        loop: of the servers, in another thread
        pause: what happens to requests that run, `rollout.pause`
        timeout: longest time that one server may take [seconds]
        identity: that a server needs to join; None: none is asked for
        canary: what each server is asked from then on, while it generates; None: nothing

    Raises: what ``weights.named`` raises; all servers are then left paused.
    Communicates: every byte once to each server.
    """
    result = Published()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    parts = [_Part(server, weights.version, timeout, result) for server in servers]
    ready = run(_each(parts, lambda part: part.prepare(pause, identity, weights.base)))
    hosts = {part.server.address: part.host for part in ready}
    transfer = Transfer(
        *(loop, hosts, weights.version, weights.shapes, timeout),
        bucket_bytes=weights.bucket_bytes,
        device=weights.device,
        only=weights.only,
    )
    begin = time.monotonic()
    run(_begin(transfer, ready))
    try:
        transfer.send(weights.named)
        left = run(_each(ready, lambda part: part.received(transfer)))
    finally:
        run(_end(transfer, ready))
    result.bytes, result.seconds["transfer"] = transfer.bytes * len(ready), time.monotonic() - begin
    resumed = run(_each(left, lambda part: part.complete(pause)))
    for part in resumed if canary is not None else ():
        asked = asyncio.run_coroutine_threadsafe(part.ask(canary), loop)
        result.asked[part.server.address] = asked
    return result


class _Part:
    """One server's part in a publish.

    Attributes:
        left: time that it may still take [s]
        host: this host's address towards the server
        fetching: the call in which the server fetches the weights
    """

    fetching: asyncio.Task[dict[str, Any]]

    def __init__(self, server: Server, version: int, timeout: float, result: Published):
        self.server, self.version, self.result = server, version, result
        self.left, self.host = timeout, ""

    async def prepare(self, pause: Pause, identity: Identity | None, base: int | None) -> None:
        """Everything before the first byte."""
        self.server.failure = None  # also of one that failed earlier, and is there again
        place = urlsplit(self.server.address)
        assert place.hostname is not None and place.port is not None
        self.host = await asyncio.to_thread(address_towards, place.hostname, place.port)
        if identity is not None:
            found = await self._call("identity", protocol.RPC, {"method": "identity"})
            for each in found.get("results") or [{}]:
                if why := identity.differs(each):
                    raise ServerFailed(f"{self.server.address}: {why}; it may not join")
        await self.pause(pause)
        if base is not None:
            found = await self._call("start", protocol.WEIGHT_INFO, method="GET")
            if (has := found.get("weight_version")) != str(base):
                raise ServerFailed(
                    f"{self.server.address}: it has weights of version {has}, expected {base}, of "
                    "which a part is replaced; it needs all of them first"
                )
        try:
            await self._call("start", protocol.START)
        except ServerFailed:  # of a trainer that died: vLLM takes no second start
            with suppress(ServerFailed):
                await self._call("start", protocol.UPDATE, {"update_info": {"drop": True}})
            await self._call("start", protocol.START)

    async def pause(self, pause: Pause) -> None:
        """With ``keep`` requests that run go on with the keys and values of the old weights."""
        keep = str(pause != "keep").lower()
        mode = protocol.PAUSE_MODES[pause]
        await self._call("pause", f"{protocol.PAUSE}?mode={mode}&clear_cache={keep}")

    async def complete(self, pause: Pause) -> None:
        """Everything after the last byte."""
        await self._call("finish", protocol.FINISH, {"weight_version": str(self.version)})
        if pause != "keep":  # salts keep the blocks of running requests apart
            await self._call("reset", protocol.RESET)
        await self._call("resume", protocol.RESUME)

    async def ask(self, canary: Canary) -> Seen:
        """The canary's answers; a server whose answers are wrong is paused."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self.left):
                seen = await canary.ask(self.server, self.version)
        except (ServerFailed, Refused, TimeoutError) as error:
            with suppress(ServerFailed):
                await self.pause("abort")
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
        taken = time.monotonic() - begin
        self.left -= taken
        self.result.seconds[step] = max(self.result.seconds.get(step, 0.0), taken)

    def fetch(self, transfer: Transfer, number: int) -> None:
        """Ask the server to fetch the weights; it answers once it has verified everything."""
        info = {"update_info": transfer.info(number).to_json()}
        call = self.server.control(protocol.UPDATE, info, math.inf)  # `received` sets its time
        self.fetching = asyncio.get_running_loop().create_task(call)

        def ended(fetching: asyncio.Task[dict[str, Any]]) -> None:
            if not fetching.cancelled() and (error := fetching.exception()):
                transfer.fail(number, str(error))

        self.fetching.add_done_callback(ended)

    async def received(self, transfer: Transfer) -> None:
        """Wait until the server has verified everything."""
        address = self.server.address
        if (reason := transfer.failed.get(address)) is not None:
            why = reason if address in reason else f"{address}: it {reason}"
            try:  # the server may say what it did not like, a moment after it left
                await asyncio.wait_for(self.fetching, min(self.left, ANSWER))
            except ServerFailed as error:
                why = why if str(error) in why else f"{why}; {error}"
            except TimeoutError:
                pass
            raise ServerFailed(why)
        try:
            await asyncio.wait_for(self.fetching, self.left)
        except TimeoutError:
            raise ServerFailed(f"{address}: no answer after the last tensor") from None


async def _each(parts: Sequence[_Part], step: Any) -> list[_Part]:
    """One step of all servers at once; those that did not fail."""
    ends = await asyncio.gather(*map(step, parts), return_exceptions=True)
    for part, end in zip(parts, ends, strict=True):
        if isinstance(end, Exception):
            address = part.server.address
            part.result.failed[address] = _reason(address, end)
        elif isinstance(end, BaseException):
            raise end
    return [part for part, end in zip(parts, ends, strict=True) if end is None]


def _reason(address: str, error: Exception) -> str:
    return str(error) if isinstance(error, ServerFailed) else f"{address}: {error!r}"


async def _begin(transfer: Transfer, parts: Sequence[_Part]) -> None:
    transfer.open()
    for number, part in enumerate(parts):
        part.fetch(transfer, number)


async def _end(transfer: Transfer, parts: Sequence[_Part]) -> None:
    for part in parts:
        part.fetching.cancel()
    await asyncio.gather(*(part.fetching for part in parts), return_exceptions=True)
    await transfer.close()
