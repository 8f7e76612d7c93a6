"""Updates: new weights for all servers of a run, and the proof that they compute with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from pyrl_ext.parallel.buckets import KeptBuckets, Named
from pyrl_ext.parallel.collective_errors import agree, gather_objects
from pyrl_ext.rollout.engine import ScoreCanaries, require_weights
from pyrl_ext.rollout.remote.publisher import Publisher
from pyrl_ext.rollout.remote.router import Lane, Router, Traffic

Counts = Callable[[], Mapping[str, float]]


class Updates:
    """Publishes weights to the servers of a router: every rank calls every method.

    Args:
        router: of this rank; used in the thread of ``publish.loop``
        publish: gives servers weights
        counts: numbers of this rank's prompts
        patience: time for the first servers to answer [s]
        group: of all ranks; None: this process alone
        keep: publishes go on in a thread, from a copy of what this rank sends; None: they do not
        beside: of all ranks, for that thread alone; None: this process alone

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
        beside: dist.ProcessGroup | None = None,
    ):
        self.router = router
        self.publish = publish
        self.counts = counts
        self.patience = patience
        self.group = group
        self._keep = keep
        self._beside = beside
        self.metrics: dict[str, float] = {}
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
            held = self._run(self._hold(version))
            self._publish(named, version, only, held, self.group)
            return
        error = None
        try:
            named = self._keep.take(named, self.publish.shapes)
        except Exception as caught:  # every rank has to know, or the others wait forever
            error = caught
        agree("ServersEngine.load_weights", error, version, "weights", self.group)
        held = self._run(self._hold(version))
        given = named, version, only, held, self._beside
        self._publishing = self._thread.submit(self._publish_beside, *given)

    def wait(self) -> None:
        """Until the publish that goes on is over.

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

    def confirm(self, check: Callable[[], None]) -> None:
        """Servers generate while digests are compared."""
        self._check = self._thread.submit(check)

    def disproved(self, score: ScoreCanaries | None) -> bool:
        """Take out servers that generate with other weights since the last publish.

        Returns: as `Engine.disproved`.
        Raises: RuntimeError on every rank for what `confirm` was given to check, or `wait` does.
        Communicates: the trainer's forward over the canary, and two lines of each rank.
        """
        if not self._unproved:
            return False
        self.wait()
        assert self._version is not None
        self._unproved = False
        error = None
        try:
            if self._check is not None:
                self._check.result()
        except Exception as caught:  # every rank has to know
            error = caught
        self._check = None
        agree("ServersEngine.disproved", error, self._version, "weights", self.group)
        wrong = self.publish.prove(self._version, score)
        wrong, *_ = gather_objects(dict(wrong), self.group)
        self.metrics |= self.publish.metrics
        self._run(self._take_out(wrong))
        return bool(wrong)

    def close(self) -> None:
        """End the thread; what it asks for ends with the connections."""
        self._thread.shutdown()

    def _publish_beside(
        self,
        named: Named,
        version: int,
        only: Collection[str] | None,
        held: Mapping[str, str],
        group: dist.ProcessGroup | None,
    ) -> None:
        try:
            self._publish(named, version, only, held, group)
        except BaseException as error:  # or requests would wait for the weights
            self._run(self._stop(error))
            raise

    def _publish(
        self,
        named: Named,
        version: int,
        only: Collection[str] | None,
        held: Mapping[str, str],
        group: dist.ProcessGroup | None,
    ) -> None:
        begin = time.monotonic()
        reports = gather_objects(held, group)
        error = None
        lanes = list[Lane]()
        try:
            if group is None or group.rank() == 0:
                if only is not None:
                    require_weights(
                        "ServersEngine.load_weights", self._version, "only some are sent"
                    )
                found = self._run(self._ready(reports))
                lanes = [lane for lane in found if only is None or lane.used]
        except Exception as caught:  # every rank has to know, or the others wait forever
            error = caught
        agree("ServersEngine.load_weights", error, version, "weights", group)
        failed = self.publish([lane.server for lane in lanes], named, version, only, group)
        tried = {lane.server.address: failed.get(lane.server.address) for lane in lanes}
        tried, *_ = gather_objects(tried, group)
        self._version = version
        numbers = self._run(self._released(version, tried))
        self._count(gather_objects(numbers, group))
        self.metrics["publish/seconds"] = time.monotonic() - begin

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the thread of the servers."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.publish.loop).result()

    async def _hold(self, version: int) -> dict[str, str]:
        return self.router.hold(version)

    async def _stop(self, error: BaseException) -> None:
        self.router.stop(error if isinstance(error, Exception) else RuntimeError(f"{error!r}"))

    async def _take_out(self, wrong: Mapping[str, str]) -> None:
        for lane in self.router.lanes:
            if (reason := wrong.get(lane.server.address)) is not None:
                self.router.take_out(lane, reason)

    async def _ready(self, reports: Sequence[Mapping[str, str]]) -> list[Lane]:
        """The servers that get the weights, without those that another rank took out."""
        for reasons in reports[1:]:
            for lane in self.router.lanes:
                if lane.used and (reason := reasons.get(lane.server.address)):
                    self.router.take_out(lane, reason)
        return await self.router.ready(self.patience)

    async def _released(self, version: int, tried: Mapping[str, str | None]) -> dict[str, float]:
        traffic, self.router.traffic = self.router.traffic, Traffic()
        self.router.release(version, tried)
        counts = asdict(traffic) | {f"prompts_{n}": count for n, count in self.counts().items()}
        return {name: float(count) for name, count in counts.items()}

    def _count(self, numbers: Sequence[Mapping[str, float]]) -> None:
        names = dict.fromkeys(f"prompts_{end}" for end in ("returned", "aborted", "failed"))
        whole = {n: sum(each.get(n, 0.0) for each in numbers) for n in (*names, *numbers[0])}
        whole["used"] = sum(lane.used for lane in self.router.lanes)
        whole["queue_max"] = max(each["queue_max"] for each in numbers)
        for name in ("seconds", "queue_seconds"):
            whole[name] /= max(whole["requests"], 1)
        self.metrics = {f"servers/{name}": value for name, value in whole.items()}
        self.metrics |= self.publish.metrics
