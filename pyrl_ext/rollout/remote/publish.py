"""publish: new weights for all servers, as a protocol whose every step has a deadline.

On each server: compare its identity, pause, start, update, finish, drop caches and resume; what
does not need the step before goes beside it. Then it generates, and is asked for the canary
meanwhile. The first rank leads; every rank that has a part of the weights sends it to all servers.
A server that fails at any step is left there: paused, and out of rotation. Its old weights are
whole unless it failed while it loaded the new ones, and then it refuses to generate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from pyrl_ext.parallel.buckets import Named
from pyrl_ext.parallel.collective_errors import agree, gather_objects
from pyrl_ext.rollout.remote.broadcast import BROKEN
from pyrl_ext.rollout.remote.canary import Canary, Seen
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.identity import Identity
from pyrl_ext.rollout.remote.sender import Place, Transfer
from pyrl_ext.rollout.remote.staged import BEFORE, Door, UpdateInfo
from pyrl_ext.rollout.remote.taker import ANSWER, Pause, Taker, each_of, reason_of
from pyrl_ext.rollout.remote.wire import WireError

Spread = Literal["each", "relay", "broadcast"]


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
        spread: a sender's bytes go to each server; to one, which passes them on to the next
            ("relay"); or to all at once ("broadcast"). Unless "each", ``named`` has to give the
            tensors again, for servers that miss them since another one failed
    """

    named: Named
    version: int
    shapes: Mapping[str, Sequence[int]]
    only: Collection[str] | None = None
    base: int | None = None
    bucket_bytes: int = 2**30
    device: torch.device | str = "cpu"
    spread: Spread = "each"

    def here(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the tensors that this rank has to send."""
        if self.only is None:
            return self.shapes
        return {name: self.shapes[name] for name in set(self.only).intersection(self.shapes)}


@dataclass
class Published:
    """How a publish ended.

    Attributes:
        failed: address -> why the server does not have the weights, or must not be used
        asked: address -> how the canary comes back from it
        seen: the same, of those that `wait` found right
        seconds: by step, the longest of any server
        bytes: that all ranks sent to servers together
        again: servers that were sent the weights a second time, since another one failed
    """

    failed: dict[str, str] = field(default_factory=dict[str, str])
    asked: dict[str, Future[Seen]] = field(default_factory=dict[str, Any])
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    bytes: int = 0
    again: int = 0

    def wait(self) -> dict[str, str]:
        """Address -> why its canary is wrong, once every server answered it or failed."""
        failed = dict[str, str]()
        for address, asked in self.asked.items():
            try:
                self.seen[address] = asked.result()
            except Exception as error:
                failed[address] = reason_of(address, error)
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
    Communicates: a few lines of every rank; every byte once, to each server or as `Weights` says.
    """
    result = Published()
    run = partial(_result, loop)
    parts = [
        Taker(server, weights.version, timeout, result.failed, result.seconds) for server in servers
    ]
    ready = run(each_of(parts, lambda part: part.prepare(pause, identity, weights.base)))
    begin = time.monotonic()
    left = _transfer(loop, ready, weights, timeout, group, result, weights.spread)
    if weights.spread != "each":
        failed = {part: result.failed.get(part.server.address, "") for part in ready}
        missed = [part for part, why in failed.items() if BEFORE in why or BROKEN in why]
        again, *_ = gather_objects(len(missed), group)
        if again:  # each from the senders themselves, so that no other server can fail it
            result.again = again
            missed = run(each_of(missed, Taker.again))
            left += _transfer(loop, missed, weights, timeout, group, result, "each")
    result.seconds["transfer"] = time.monotonic() - begin
    resumed = run(each_of(left, lambda part: part.complete(pause)))
    for part in resumed if canary is not None else ():
        asked = asyncio.run_coroutine_threadsafe(part.ask(canary), loop)
        result.asked[part.server.address] = asked
    return result


def _result(loop: asyncio.AbstractEventLoop, coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def _transfer(
    loop: asyncio.AbstractEventLoop,
    parts: Sequence[Taker],
    weights: Weights,
    timeout: float,
    group: dist.ProcessGroup | None,
    result: Published,
    spread: Spread,
) -> list[Taker]:
    """The bytes to all servers; returns those that have verified everything."""
    run = partial(_result, loop)
    mine = weights.here()
    rank = 0 if group is None else group.rank()
    known = gather_objects(([part.server.address for part in parts], bool(mine)), group)
    addresses, _ = known[0]
    first = sum(sends for _, sends in known[:rank])  # each sender's bytes begin at another server
    transfer = Transfer(
        loop,
        addresses,
        weights.version,
        mine,
        timeout,
        bucket_bytes=weights.bucket_bytes,
        device=weights.device,
        relay=first % len(addresses) if spread == "relay" and addresses else None,
        broadcast=spread == "broadcast",
    )
    try:
        doors = gather_objects(run(_opened(transfer)), group)
        if wrong := [f"rank {n} {each}" for n, each in enumerate(doors) if isinstance(each, str)]:
            raise RuntimeError(f"publish: {'; '.join(wrong)}")
        run(_begin(transfer, parts, doors, weights))
        failed, sent = _sent(transfer, weights, group, lambda: run(_why(parts)))
        result.bytes += sent
        return run(each_of(parts, lambda part: part.received(failed.get(part.server.address))))
    finally:
        run(_end(transfer, parts))


async def _opened(transfer: Transfer) -> list[Place] | str:
    """A sender's doors for all servers; or why it has none."""
    try:
        return await transfer.open()
    except (OSError, WireError) as error:
        return f"cannot send weights: {error}"


async def _begin(
    transfer: Transfer, parts: Sequence[Taker], doors: Sequence[list[Place]], weights: Weights
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


async def _why(parts: Sequence[Taker]) -> list[str]:
    """The servers' reasons, where a rank did not send its part."""
    for part in parts:
        part.left = min(part.left, ANSWER)
    await each_of(parts, lambda part: part.received(None))
    return [part.failed.get(part.server.address, "") for part in parts]


async def _end(transfer: Transfer, parts: Sequence[Taker]) -> None:
    calls = [part.fetching for part in parts if part.fetching is not None]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await transfer.close()
