"""publish: new weights for all servers, as a protocol whose every step has a deadline.

On each server: compare its identity, pause, start, update, finish, drop caches, resume, and the
canary. A server that fails at any step is left there: paused, and out of rotation. Its old weights
are whole unless it failed while it loaded the new ones, and then it refuses to generate.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping, Sequence
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
        bucket_bytes: of each of the two buffers that they pass through
        device: of the tensors
    """

    named: Named
    version: int
    shapes: Mapping[str, Sequence[int]]
    only: Collection[str] | None = None
    bucket_bytes: int = 2**30
    device: torch.device | str = "cpu"


@dataclass
class Published:
    """How a publish ended.

    Attributes:
        failed: address -> why the server does not have the weights, or must not be used
        seen: address -> how the canary came back from it
        seconds: by step, the longest of any server
        bytes: sent to each server
    """

    failed: dict[str, str] = field(default_factory=dict[str, str])
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    bytes: int = 0

    def fail(self, server: Server, reason: str) -> None:
        self.failed.setdefault(server.address, reason)


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
        canary: what each server is asked afterwards; None: nothing

    Raises: what ``weights.named`` raises; all servers are then left paused.
    Communicates: every byte once to each server.
    """
    result = Published()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    parts = [_Part(server, weights.version, timeout, result) for server in servers]
    ready = run(_each(parts, lambda part: part.prepare(pause, identity)))
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
    result.bytes, result.seconds["transfer"] = transfer.bytes, time.monotonic() - begin
    run(_each(left, lambda part: part.complete(pause, canary)))
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

    async def prepare(self, pause: Pause, identity: Identity | None) -> None:
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

    async def complete(self, pause: Pause, canary: Canary | None) -> None:
        """Everything after the last byte."""
        await self._call("finish", protocol.FINISH, {"weight_version": str(self.version)})
        if pause != "keep":  # salts keep the blocks of running requests apart
            await self._call("reset", protocol.RESET)
        await self._call("resume", protocol.RESUME)
        if canary is None:
            return
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self.left):
                seen = await canary.ask(self.server, self.version)
        except (ServerFailed, Refused, TimeoutError) as error:
            with suppress(ServerFailed):
                await self.pause("abort")
            raise ServerFailed(str(error) or f"{self.server.address}: no canary in time") from error
        self.result.seen[self.server.address] = seen
        self._took("canary", begin)

    async def _call(self, step: str, path: str, body: Any = None) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            return await self.server.control(path, body, max(self.left, 0.0))
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
        if isinstance(end, ServerFailed):
            part.result.fail(part.server, str(end))
        elif isinstance(end, Exception):
            part.result.fail(part.server, f"{part.server.address}: {end!r}")
        elif isinstance(end, BaseException):
            raise end
    return [part for part, end in zip(parts, ends, strict=True) if end is None]


async def _begin(transfer: Transfer, parts: Sequence[_Part]) -> None:
    transfer.open()
    for number, part in enumerate(parts):
        part.fetch(transfer, number)


async def _end(transfer: Transfer, parts: Sequence[_Part]) -> None:
    for part in parts:
        part.fetching.cancel()
    await asyncio.gather(*(part.fetching for part in parts), return_exceptions=True)
    await transfer.close()
