"""publish: new weights for all servers, as a protocol whose every step has a deadline.

On each server: compare its identity, pause, start, update, finish, drop caches and resume; what
does not need the step before goes beside it. Then it generates, and is asked for the canary
meanwhile. The first rank leads; every rank that has a part of the weights sends it to all servers.
A server that fails at any step is left there: paused, and out of rotation. Its old weights are
whole unless it failed while it loaded the new ones, and then it refuses to generate.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from pyrl_ext.dist.agree import agree, gather_objects
from pyrl_ext.dist.buckets import Named
from pyrl_ext.rollout.servers import protocol
from pyrl_ext.rollout.servers.canary import Canary, Seen
from pyrl_ext.rollout.servers.client import Refused, Server, ServerFailed
from pyrl_ext.rollout.servers.identity import Identity
from pyrl_ext.rollout.servers.sender import Place, Transfer, address_towards
from pyrl_ext.rollout.servers.staged import Door, UpdateInfo
from pyrl_ext.rollout.servers.wire import WireError

ANSWER = 2.0  # for a server to say why it left a transfer [s]
Pause = Literal["finish", "keep", "abort"]


@dataclass(frozen=True)
class Weights:
    """One version of the weights, to be published.

    Args:
        named: (name, tensor); the stream is read in the caller's thread
        version: of them
        shapes: by name, of the tensors that servers hold, those that this rank sends
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
        bytes: that this rank sent to all servers together
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
    group: dist.ProcessGroup | None = None,
) -> Published:
    """Give every server the weights. The caller holds new requests until it returns.

    Args:
        loop: of the servers, in another thread
        servers: on the first rank; the others get to know them
        pause: what happens to requests that run, `rollout.pause`
        timeout: longest time that one server may take [seconds]
        identity: that a server needs to join; None: none is asked for
        canary: what each server is asked from then on, while it generates; None: nothing
        group: of all ranks; None: this process alone

    Raises: what ``weights.named`` raises; with a group RuntimeError on every rank, if it raised on
        one. All servers are then left paused.
    Communicates: a few lines of every rank; every byte once to each server.
    """
    result = Published()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    parts = [_Part(server, weights.version, timeout, result) for server in servers]
    ready = run(_each(parts, lambda part: part.prepare(pause, identity, weights.base)))
    addresses, *_ = gather_objects([part.server.address for part in ready], group)
    begin, shapes = time.monotonic(), weights.shapes
    if weights.only is not None:
        shapes = {name: shapes[name] for name in set(weights.only).intersection(shapes)}
    transfer = Transfer(
        *(loop, addresses, weights.version, shapes, timeout),
        bucket_bytes=weights.bucket_bytes,
        device=weights.device,
    )
    try:
        doors = gather_objects(run(_opened(transfer)), group)
        if wrong := [f"rank {n} {each}" for n, each in enumerate(doors) if isinstance(each, str)]:
            raise RuntimeError(f"publish: {'; '.join(wrong)}")
        run(_begin(transfer, ready, doors, weights))
        failed, result.bytes = _sent(transfer, weights, group, lambda: run(_why(ready)))
        left = run(_each(ready, lambda part: part.received(failed.get(part.server.address))))
    finally:
        run(_end(transfer, ready))
    result.seconds["transfer"] = time.monotonic() - begin
    resumed = run(_each(left, lambda part: part.complete(pause)))
    for part in resumed if canary is not None else ():
        asked = asyncio.run_coroutine_threadsafe(part.ask(canary), loop)
        result.asked[part.server.address] = asked
    return result


class _Part:
    """One server's part in a publish.

    Attributes:
        left: time that it may still take [s]
        fetching: the call in which the server fetches the weights
    """

    fetching: asyncio.Task[dict[str, Any]] | None = None

    def __init__(self, server: Server, version: int, timeout: float, result: Published):
        self.server, self.version, self.result = server, version, result
        self.left = timeout

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
        taken = time.monotonic() - begin
        self.left -= taken
        self.result.seconds[step] = max(self.result.seconds.get(step, 0.0), taken)

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
        address, fetching = self.server.address, self.fetching
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


async def _opened(transfer: Transfer) -> list[Place] | str:
    """A sender's doors for all servers; or why it has none."""
    try:
        return await transfer.open()
    except (OSError, WireError) as error:
        return f"cannot send weights: {error}"


async def _begin(
    transfer: Transfer, parts: Sequence[_Part], doors: Sequence[list[Place]], weights: Weights
) -> None:
    only = None if weights.only is None else tuple(weights.only)
    for number, part in enumerate(parts):
        of_all = (Door(rank, *each[number]) for rank, each in enumerate(doors) if each)
        silence = 2.0 * transfer.limit  # while another server takes bytes
        part.fetch(transfer, UpdateInfo(tuple(of_all), number, weights.version, silence, only))


def _sent(
    transfer: Transfer,
    weights: Weights,
    group: dist.ProcessGroup | None,
    servers_say: Callable[[], list[str]],
) -> tuple[dict[str, str], int]:
    """Send this rank's part, and wait for the others.

    Returns: address -> why a rank could not send it its part; bytes of all ranks to all servers.
    """
    error = None
    try:
        transfer.send(weights.named)
    except Exception as caught:  # every rank has to know, or the others wait forever
        error = caught
    try:
        agree("publish", error, weights.version, "weights", group)
        ends = gather_objects((transfer.failed, transfer.sent_bytes), group)
    except Exception as caught:
        if caught is error or not (said := servers_say()):
            raise
        raise RuntimeError("\n  ".join((str(caught), *said))) from caught  # also of a dead rank
    failed = dict[str, str]()
    for rank, (reasons, _) in enumerate(ends):
        for address, why in reasons.items():
            failed.setdefault(address, f"{why}, from rank {rank}" if rank else why)
    return failed, sum(sent for _, sent in ends)


async def _why(parts: Sequence[_Part]) -> list[str]:
    """The servers' reasons, where a rank did not send its part."""
    for part in parts:
        part.left = min(part.left, ANSWER)
    await _each(parts, lambda part: part.received(None))
    return [part.result.failed.get(part.server.address, "") for part in parts]


async def _end(transfer: Transfer, parts: Sequence[_Part]) -> None:
    calls = [part.fetching for part in parts if part.fetching is not None]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await transfer.close()
