"""A trainer that publishes a few tensors to the servers of a config, says "half", and stalls.

Its arguments are overrides of configs/tiny.yaml.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.identity import shapes_of
from pyrl_ext.rollout.remote.weight_sync import Weights, publish
from tests.helpers.tiny import tiny_plan


def main() -> None:
    plan = tiny_plan(*sys.argv[1:])
    shapes = shapes_of(plan)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def half() -> Iterator[tuple[str, Tensor]]:
        for name in list(shapes)[: len(shapes) // 2]:
            yield name, torch.zeros(shapes[name])
        print("half", flush=True)
        time.sleep(3600)

    keys = Keys.read(plan.rollout.keys)
    servers = [Server(address, keys) for address in plan.addresses]
    weights = Weights(half(), 1, shapes, bucket_bytes=1 << 12)
    publish(loop, servers, weights, pause="abort", timeout=600.0)


if __name__ == "__main__":
    main()
