"""A trainer that publishes, and embedded engines' servers as processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.canary import Canary
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.model import ServedModel
from pyrl_ext.rollout.remote.protocol import Answer, Partial, Request
from pyrl_ext.rollout.remote.weight_sync import Published, Weights, publish
from tests.helpers.deadline import DEADLINE
from tests.helpers.engines import GLM
from tests.helpers.servers import NO_KEYS

# the embedded engine has no cache
CANARY = replace(Canary.of(ServedModel(128, 4, (1, 2, 3), 8, 2), 512, False, 1.0, True), cached=0)
REQUEST = Request("r", tuple(range(3, 20)), 4)


class Trainer:
    """A trainer's loop, which runs in another thread, and the servers that it knows."""

    def __init__(self, stack: ExitStack, addresses: Iterable[str], keys: Keys = NO_KEYS):
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self.loop.call_soon_threadsafe, self.loop.stop)
        self.servers = [Server(address, keys) for address in addresses]
        stack.callback(lambda: [self.run(server.close()) for server in self.servers])
        held = Destinations.from_config(GLM)
        self.shapes = {name: held.shape(name) for name in held.parts}

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE)

    def publish(
        self,
        named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        version: int,
        servers: Sequence[Server] | None = None,
        **more: Any,
    ) -> Published:
        options = {"pause": "abort", "timeout": DEADLINE, "canary": CANARY} | more
        pairs = named.items() if isinstance(named, Mapping) else named
        pairs = cast(Iterable[tuple[str, Tensor]], pairs)
        names = ("only", "base", "broadcast", "sent", "certificate")
        part = {name: options.pop(name) for name in names if name in options}
        shapes = options.pop("shapes", self.shapes)
        weights = Weights(pairs, version, shapes, bucket_bytes=1 << 16, **part)
        given = self.servers if servers is None else servers
        done = publish(self.loop, given, weights, **options)
        done.failed |= done.wait()
        return done

    def generate(self, server: Server, request: Request = REQUEST) -> Answer:
        return self.run(server.generate(request, Partial(request)))
