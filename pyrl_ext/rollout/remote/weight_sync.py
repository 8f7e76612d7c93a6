"""Weight sync: new weights for all remote engines, and the proof that they compute with them.

A sync is a protocol whose every step has a deadline. For each server: compare its identity, pause,
start, update, finish, drop caches and resume; independent steps run at the same time. Then it
generates, and is asked for the canary meanwhile. The first rank leads; every rank that has a part
of the weights sends it to all servers. A server that fails at any step stays paused, and out of
rotation. Its old weights are whole unless it failed while it loaded the new ones, and then it
refuses to generate.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.parallel.buckets import KeptBuckets, Named, names_here
from pyrl_ext.parallel.collective_errors import agree, agreeing, gather_objects
from pyrl_ext.parallel.waiting import wait_for
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.engine import ScoreCanaries, require_weights
from pyrl_ext.rollout.remote.broadcast import BROKEN
from pyrl_ext.rollout.remote.canary import Canary, canary_of, prove
from pyrl_ext.rollout.remote.changes import SentBuckets
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.holder import Run
from pyrl_ext.rollout.remote.identity import Identity, identity_of, shapes_of
from pyrl_ext.rollout.remote.protocol import RPC, Answer
from pyrl_ext.rollout.remote.router import Router, ServerState, Traffic
from pyrl_ext.rollout.remote.server_update import Pause, ServerUpdate, Step, reason_of, run_step
from pyrl_ext.rollout.remote.tls import Certificate, certificate_of
from pyrl_ext.rollout.remote.weight_protocol import NO_BASE, SILENCE_SHARE, UpdateInfo
from pyrl_ext.rollout.remote.weight_sender import Transfer, Way

RELEASE_S = 2.0  # for a server to take leave of the run

Counts = Callable[[], Mapping[str, float]]


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
        broadcast: the sender's bytes go to all servers at once. ``named`` then has to give the
            tensors again, for servers that miss them because another one failed
        certificate: of this host, for encrypted bytes; None: they are not encrypted
        sent: copies of what this rank sent before: only changes are sent where all servers hold the
            same; None: everything is sent. ``named`` then has to give the tensors again too
    """

    named: Named
    version: int
    shapes: Mapping[str, Sequence[int]]
    only: Collection[str] | None = None
    base: int | None = None
    bucket_bytes: int = 2**30
    device: torch.device | str = "cpu"
    broadcast: bool = False
    sent: SentBuckets | None = None
    certificate: Certificate | None = None


@dataclass
class Published:
    """The result of `publish`.

    Attributes:
        failed: address -> why the server does not have the weights, or must not be used
        asked: address -> the canary's answer to come
        seen: address -> the canary's answer, of servers that `wait` found right
        seconds: by step, the longest of any server
        bytes: that all ranks sent to servers together
        saved: bytes that were not sent, since they had not changed
        again: servers that were sent the weights a second time, because another one failed, or
            changes did not fit
    """

    failed: dict[str, str] = field(default_factory=dict[str, str])
    asked: dict[str, Future[Answer]] = field(default_factory=dict[str, Any])
    seen: dict[str, Answer] = field(default_factory=dict[str, Answer])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    bytes: int = 0
    saved: int = 0
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


def publish(
    loop: asyncio.AbstractEventLoop,
    servers: Sequence[Server],
    weights: Weights,
    *,
    pause: Pause,
    timeout: float,
    run: Run | None = None,
    identity: Identity | None = None,
    canary: Canary | None = None,
    group: dist.ProcessGroup | None = None,
) -> Published:
    """Give every server the weights. The caller holds new requests until it returns.

    Args:
        loop: of the servers, in another thread
        servers: on the first rank; the others get to know them
        pause: fate of requests that run, `rollout.pause`
        timeout: longest time that one server may take for a step [seconds]
        run: that the servers are given to; None: they are not asked for another one
        identity: that a server needs to join; None: none is asked for
        canary: that each server is asked from then on, while it generates; None: nothing
        group: of all ranks; None: this process alone

    Raises: what ``weights.named`` raises; with a group RuntimeError on every rank, if it raised on
        one. All servers are then left paused.
    Communicates: a few lines of every rank; every byte once to each server, or with a broadcast to
        all of them.
    """
    result = Published()
    sync = _Sync(loop, weights, timeout, group, result)
    updates = [
        ServerUpdate(server, weights.version, timeout, result.failed, result.seconds)
        for server in servers
    ]
    ready = sync.step(updates, lambda update: update.prepare(pause, run, identity, weights.base))
    if weights.sent is not None:
        ready = sync.step(ready, ServerUpdate.look)
    begin = time.monotonic()
    received = sync.transfer(ready, weights.broadcast)
    if weights.broadcast or weights.sent is not None:
        missed = [u for u in ready if may_repeat(result.failed.get(u.server.address, ""))]
        again, *_ = gather_objects(len(missed), group)
        if again:  # each by TCP, so that no other server can fail it
            result.again = again
            missed = sync.step(missed, ServerUpdate.repeat)
            received += sync.transfer(missed, broadcast=False, delta=False)
    result.seconds["transfer"] = time.monotonic() - begin
    resumed = sync.step(received, lambda update: update.complete(pause))
    if canary is not None:
        for update in resumed:
            asked = asyncio.run_coroutine_threadsafe(update.ask(canary), loop)
            result.asked[update.server.address] = asked
    return result


def may_repeat(reason: str) -> bool:
    """True if a server that failed for this reason would take all bytes by TCP."""
    return BROKEN in reason or NO_BASE in reason


@dataclass(frozen=True)
class _Sync:
    """The arguments of one `publish`."""

    loop: asyncio.AbstractEventLoop
    weights: Weights
    timeout: float
    group: dist.ProcessGroup | None
    result: Published
    number: str = field(default_factory=lambda: secrets.token_hex(8))

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the thread of the servers."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def step(self, updates: Sequence[ServerUpdate], step: Step) -> list[ServerUpdate]:
        """See `run_step`."""
        return self.run(run_step(updates, step))

    def transfer(
        self, updates: Sequence[ServerUpdate], broadcast: bool, delta: bool = True
    ) -> list[ServerUpdate]:
        """The bytes to all servers, or with ``delta`` their changes where all of them hold the
        bytes before; returns those that have verified everything."""
        weights = self.weights
        sent = weights.sent
        held = "" if sent is None else sent.sync
        delta = delta and held != "" and all(update.kept == held for update in updates)
        wanted = weights.shapes.keys() if weights.only is None else set(weights.only)
        here = [update.server.address for update in updates], self.number, delta
        (addresses, number, delta), *_ = gather_objects(here, self.group)
        transfer = Transfer(
            addresses,
            weights.version,
            {name: shape for name, shape in weights.shapes.items() if name in wanted},
            self.timeout,
            bucket_bytes=weights.bucket_bytes,
            device=weights.device,
            broadcast=broadcast and bool(addresses),
            sent=sent if addresses else None,
            delta=delta,
            certificate=weights.certificate,
        )
        if sent is not None:
            sent.sync = ""
        try:
            with agreeing("publish", "addresses", self.group):
                here = transfer.open(0 if self.group is None else self.group.rank())
            senders = [ways for ways in gather_objects(here, self.group) if ways]
            keep = None if sent is None else number
            self.run(self._fetch(transfer, updates, senders, keep, held if delta else None))
            reasons = self._send(transfer, updates)
            if sent is not None and addresses:
                sent.sync = number
            return self.step(updates, lambda u: u.received(reasons.get(u.server.address)))
        finally:
            self.run(_cancel(updates))
            transfer.close()

    async def _fetch(
        self,
        transfer: Transfer,
        updates: Sequence[ServerUpdate],
        senders: Sequence[list[Way]],
        keep: str | None,
        base: str | None,
    ) -> None:
        only = self.weights.only
        for number, update in enumerate(updates):
            info = UpdateInfo(
                senders=[ways[number].sender for ways in senders],
                engine=number,
                version=self.weights.version,
                silence=SILENCE_SHARE * transfer.limit,
                only=None if only is None else list(only),
                broadcast=senders[0][number].route,
                keep=keep,
                base=base,
            )
            update.fetch(transfer, info)

    def _send(self, transfer: Transfer, updates: Sequence[ServerUpdate]) -> dict[str, str]:
        """Send this rank's part, and wait for the others.

        Returns: address -> why a rank could not send it its part.
        """
        error = None
        try:
            transfer.send(self.weights.named)
        except Exception as caught:  # every rank has to know, or the others wait forever
            error = caught
        try:
            agree("publish", error, self.weights.version, "weights", self.group)
            end = transfer.failed, transfer.sent_bytes, transfer.saved_bytes
            ends = gather_objects(end, self.group)
        except Exception as caught:
            if caught is error:
                raise
            self.step(updates, lambda update: update.received(""))  # they know of a dead rank too
            reasons = [self.result.failed.get(update.server.address, "") for update in updates]
            if not reasons:
                raise
            raise RuntimeError("\n  ".join((str(caught), *reasons))) from caught
        failed = dict[str, str]()
        for rank, (reasons, *_) in enumerate(ends):
            for address, reason in reasons.items():
                failed.setdefault(address, f"{reason}, from rank {rank}" if rank else reason)
        self.result.bytes += sum(sent for _, sent, _ in ends)
        self.result.saved += sum(saved for *_, saved in ends)
        return failed


async def _cancel(updates: Sequence[ServerUpdate]) -> None:
    calls = [update.fetching for update in updates if update.fetching is not None]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def release(servers: Sequence[Server], run: Run) -> None:
    """Let other runs have those servers that answer in time."""
    body = {"method": "release", "args": run}
    calls = (server.control(RPC, body, RELEASE_S) for server in servers)
    await asyncio.gather(*calls, return_exceptions=True)


class Publisher:
    """Publishes the weights of a run as its plan says. Every rank calls it, with the servers on the
    first, and `prove`.

    Args:
        plan: of the run
        device: of the weights

    Attributes:
        loop: of the servers; to be set before the first publish
        metrics: of the last publish
        folder: of the run
        run: that servers belong to until `release`
        shapes: of the tensors that servers hold, by name
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, plan: Plan, device: torch.device):
        self.plan = plan
        self.device = device
        self.metrics: dict[str, float] = {}
        self.canary = canary_of(plan)
        self.shapes = shapes_of(plan)
        self.folder = plan.run
        self.run = Run.of(plan.run)
        self.identity = identity_of(plan)
        self._done = Published()
        self._version: int | None = None
        self._sent = SentBuckets() if plan.rollout.delta_sync else None
        self._certificate = certificate_of(plan)

    def __call__(
        self,
        servers: Sequence[Server],
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None,
        group: dist.ProcessGroup | None = None,
    ) -> Mapping[str, str]:
        """Gives servers the weights; returns address -> reason of those that failed.

        Those that lack the version before fail where ``only`` some tensors are sent.
        """
        rollout = self.plan.rollout
        weights = Weights(
            named,
            version,
            {name: self.shapes[name] for name in names_here(named, self.shapes)},
            only,
            None if only is None else self._version,
            rollout.bucket_bytes,
            self.device,
            rollout.transport == "broadcast",
            self._sent,
            self._certificate,
        )
        for asked in self._done.asked.values():
            asked.cancel()
        self._done = publish(
            self.loop,
            servers,
            weights,
            # caches of a trainer before this one may be of other weights of the same version
            pause="abort" if self._version is None else rollout.pause,
            timeout=rollout.publish_timeout,
            run=self.run,
            identity=self.identity,
            canary=self.canary,
            group=group,
        )
        self._version = version
        self._count()
        return self._done.failed

    def prove(self, version: int, score: ScoreCanaries | None) -> Mapping[str, str]:
        """Compares the servers' canaries with the trainer's forward; every rank calls it.

        Returns: address -> how its answer differs, on the first rank.
        Communicates: as ``score`` does. Waits for the answers.
        """
        if self.canary is None:
            return {}
        begin = time.monotonic()
        done = self._done
        failed = done.wait()
        if score is not None:
            failed |= prove(self.canary, done.seen, version, score)
        done.seconds["proof"] = time.monotonic() - begin
        self._count()
        return failed

    def _count(self) -> None:
        self.metrics = {f"publish/{step}_seconds": s for step, s in self._done.seconds.items()}
        self.metrics["publish/bytes"] = self._done.bytes
        self.metrics["publish/saved_bytes"] = self._done.saved
        self.metrics["publish/again"] = self._done.again


class WeightSync:
    """Publishes weights to the servers of a router: every rank calls every method.

    Args:
        router: of this rank; used in the thread of ``publish.loop``
        publish: gives servers weights
        counts: numbers of this rank's prompts
        patience: time for the first servers to answer [s]
        group: of all ranks; None: this process alone
        keep: publishes run in a thread, from a copy of what this rank sends; None: they do not
        thread_group: of all ranks, for that thread alone; None: this process alone
        advice: how to start servers, as a sentence

    Attributes:
        metrics: of the last publish, and of the requests between the last two
    """

    def __init__(
        self,
        router: Router,
        publish: Publisher,
        counts: Counts,
        patience: float,
        group: dist.ProcessGroup | None = None,
        keep: KeptBuckets | None = None,
        thread_group: dist.ProcessGroup | None = None,
        advice: str = "",
    ):
        self.router = router
        self.publish = publish
        self.counts = counts
        self.patience = patience
        self.advice = advice
        self.group = group
        self.metrics: dict[str, float] = {}
        self._keep = keep
        self._thread_group = thread_group
        self._version: int | None = None
        self._unproved = False
        # one thread: digests are compared once the servers have the weights
        self._thread = ThreadPoolExecutor(1, "publish")
        self._publishing: Future[None] | None = None
        self._check: Future[None] | None = None

    def load(self, named: Named, version: int, only: Collection[str] | None) -> None:
        """Gives all servers new weights; requests that come from now on wait for them.

        With ``keep`` this returns once what this rank sends is copied, and `wait` does the rest.
        """
        self.wait()
        self._unproved = True
        if self._keep is None:
            failed = self._run(self.router.hold, version)
            self._publish(named, version, only, failed, self.group)
            return
        with agreeing("ServersEngine.load_weights", "weights", self.group) as doing:
            doing.append(version)
            named = self._keep.take(named, self.publish.shapes)
        failed = self._run(self.router.hold, version)
        publish = partial(self._publish, named, version, only, failed, self._thread_group)
        self._publishing = self._thread.submit(self._or_stop, publish)

    def wait(self) -> None:
        """Until the publish in the thread is over.

        Raises: what it does: RuntimeError on every rank if one failed, or too few servers are left.
        """
        begin = time.monotonic()
        self.finished()
        if self._publishing is not None:
            self.metrics["publish/wait_seconds"] = time.monotonic() - begin
        self._publishing = None

    def finished(self) -> None:
        """`wait`, for any thread."""
        publishing = self._publishing
        if publishing is not None:
            publishing.result()

    def verify_weights(self, check: Callable[[], None]) -> None:
        """Servers generate while digests are compared."""
        self._check = self._thread.submit(check)

    def samples_stale(self, score: ScoreCanaries | None) -> bool:
        """Take out servers that generate with other weights since the last publish.

        Returns: as `Engine.samples_stale`.
        Raises: RuntimeError on every rank if the check of `verify_weights`, or `wait`, fails.
        Communicates: the trainer's forward over the canary, and two lines of each rank.
        """
        if not self._unproved:
            return False
        self.wait()
        assert self._version is not None
        self._unproved = False
        check = self._check
        self._check = None
        with agreeing("ServersEngine.samples_stale", "weights", self.group) as doing:
            doing.append(self._version)
            if check is not None:
                check.result()
        reasons = self.publish.prove(self._version, score)
        wrong, *_ = gather_objects(dict(reasons), self.group)
        self.metrics |= self.publish.metrics
        self._run(self._take_out, wrong)
        return bool(wrong)

    def close(self) -> None:
        """End the thread; its calls end with the connections."""
        self._thread.shutdown()

    def _or_stop(self, publish: Callable[[], None]) -> None:
        try:
            publish()
        except BaseException as error:  # or requests would wait for the weights
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._run(self.router.stop, failure)
            raise

    def _publish(
        self,
        named: Named,
        version: int,
        only: Collection[str] | None,
        failed_here: Mapping[str, str],
        group: dist.ProcessGroup | None,
    ) -> None:
        begin = time.monotonic()
        reports = gather_objects(failed_here, group)
        servers = list[Server]()
        with agreeing("ServersEngine.load_weights", "weights", group) as doing:
            doing.append(version)
            if group is None or group.rank() == 0:
                if only is not None:
                    where = "ServersEngine.load_weights"
                    require_weights(where, self._version, "only some are sent")
                for reasons in reports[1:]:
                    self._run(self._take_out, reasons)
                states = self._wait_for_servers()
                servers = [state.server for state in states if only is None or state.used]
        failed = self.publish(servers, named, version, only, group)
        results = {server.address: failed.get(server.address) for server in servers}
        tried, *_ = gather_objects(results, group)
        self._version = version
        numbers = self._run(self._release, version, tried)
        self._count(gather_objects(numbers, group))
        self.metrics["publish/seconds"] = time.monotonic() - begin

    def _wait_for_servers(self) -> list[ServerState]:
        """The servers that take part in the publish. The first publish waits for them."""
        router = self.router
        loop = self.publish.loop

        def look() -> list[ServerState]:
            return asyncio.run_coroutine_threadsafe(router.look(), loop).result()

        number = len(router.states)
        what = "the remote engine" if number == 1 else f"{router.least} of {number} remote engines"
        return wait_for(what, look, self.patience, self.advice)

    def _run[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function in the thread of the servers."""

        async def call() -> T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self.publish.loop).result()

    def _take_out(self, wrong: Mapping[str, str]) -> None:
        for state in self.router.states:
            reason = wrong.get(state.server.address)
            if reason:
                self.router.take_out(state, reason)

    def _release(self, version: int, tried: Mapping[str, str | None]) -> dict[str, float]:
        traffic = self.router.traffic
        self.router.traffic = Traffic()
        self.router.release(version, tried)
        return asdict(traffic) | {f"prompts_{n}": count for n, count in self.counts().items()}

    def _count(self, numbers: Sequence[Mapping[str, float]]) -> None:
        names = dict.fromkeys(f"prompts_{end}" for end in ("returned", "aborted", "failed"))
        whole = {n: sum(rank.get(n, 0.0) for rank in numbers) for n in (*names, *numbers[0])}
        whole["used"] = sum(state.used for state in self.router.states)
        whole["queue_max"] = max(rank["queue_max"] for rank in numbers)
        for name in ("seconds", "queue_seconds"):
            whole[name] /= max(whole["requests"], 1)
        self.metrics = {f"servers/{name}": float(value) for name, value in whole.items()}
        self.metrics |= self.publish.metrics
