"""Publisher: publishes the weights of a run, as its plan says, and counts what that takes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops.dtypes import dtype_of
from pyrl_ext.parallel.buckets import names_here
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.adapters import applied_lora
from pyrl_ext.rollout.engine import ScoreCanaries
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.remote.canary import Canary, prove
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.identity import Identity
from pyrl_ext.rollout.remote.model import Model
from pyrl_ext.rollout.remote.publish import Published, Spread, Weights, publish


class Publisher:
    """Every rank calls it, with the servers on the first, and `prove`.

    Args:
        plan: of the run
        device: of the weights

    Attributes:
        loop: of the servers; to be set before the first publish
        metrics: of the last publish
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, plan: Plan, device: torch.device):
        self.plan = plan
        self.device = device
        self.metrics: dict[str, float] = {}
        self._done = Published()
        self.canary = canary_of(plan)
        self._version: int | None = None

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
        shapes = self.shapes
        weights = Weights(
            named,
            version,
            {name: shapes[name] for name in names_here(named, shapes)},
            only,
            None if only is None else self._version,
            rollout.bucket_bytes,
            self.device,
            self._spread(only),
        )
        self._done.cancel()
        self._done = publish(
            self.loop,
            servers,
            weights,
            # caches of a trainer before this one may be of other weights of the same version
            pause="abort" if self._version is None else rollout.pause,
            timeout=rollout.publish_timeout,
            identity=self.identity,
            canary=self.canary,
            group=group,
        )
        self._version = version
        self._count()
        return self._done.failed

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """See `shapes_of`."""
        return shapes_of(self.plan)

    @cached_property
    def identity(self) -> Identity:
        """See `identity_of`."""
        return identity_of(self.plan)

    def _spread(self, only: Collection[str] | None) -> Spread:
        """How a sender's bytes get to several servers, the same on all ranks."""
        if self.plan.rollout.transport == "broadcast":
            return "broadcast"
        shapes = self.shapes
        names = shapes if only is None else shapes.keys() & set(only)
        each = dtype_of(self.plan.model.dtype).itemsize
        sent = each * sum(math.prod(shapes[name]) for name in names)
        return "relay" if self.plan.rollout.relays(sent) else "each"

    def prove(self, version: int, score: ScoreCanaries | None) -> Mapping[str, str]:
        """Compares what servers made of the canary with the trainer's forward; every rank calls it.

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
        self.metrics["publish/again"] = self._done.again


def shapes_of(plan: Plan) -> dict[str, torch.Size]:
    """Shape of every tensor that an engine of this plan holds, by its checkpoint name."""
    held = Destinations.from_config(plan.hf, applied_lora(plan))
    return {name: held.shape(name) for name in held.parts}


def identity_of(plan: Plan) -> Identity:
    """The identity of the plan's engines."""
    known = shapes_of(plan), plan.rollout_dtype, plan.tokenizer_path, applied_lora(plan)
    return Identity.of(plan.hf, *known)


def canary_of(plan: Plan) -> Canary | None:
    """The canary of this plan; None: its model takes images, which the canary has not."""
    if plan.modules:
        return None
    room = int(plan.hf.get("max_position_embeddings") or 2**20)
    canary = Canary.of(
        Model.of(plan),
        room,
        plan.rollout.engine == "vllm",
        plan.rollout.temperature,
        {plan.model.dtype, plan.rollout_dtype} == {"float32"},
    )
    if plan.rollout.engine == "vllm" or plan.sizes.state_mixer is None:
        return canary
    return replace(canary, cached=0)  # the embedded engine keeps no states of finished requests
