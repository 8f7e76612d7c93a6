"""Weights to another process: ``python -m benchmarks.transports [--megabytes N] [--bucket MiB]``.

A process reads every tensor into its memory, as an engine does; one in this process does the
same by a copy, which is the floor: with two cores, packing here and reading there could overlap,
so that a transport comes down to one copy. gloo copies four more times and through the kernel.
Bar: shared memory at most 2 copies, which is just met or just missed (lab book).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import in_turns
from pyrl_ext.rollout.process.sender import IncomingWeights, Kind, Sender

BAR = 2.0  # copies


def weights(megabytes: int) -> list[tuple[str, Tensor]]:
    """Float32 matrices of 64 KiB to 4 MiB, as in a small mixture of experts."""
    sizes = (128, 256, 512, 1024)
    total = 0
    found: list[tuple[str, Tensor]] = []
    while total < megabytes << 20:
        size = sizes[len(found) % len(sizes)]
        found.append((f"tensor {len(found)}", torch.rand(size, size)))
        total += found[-1][1].nbytes
    return found


def read(given: Any, done: Any) -> None:
    """In the other process: take publishes until there are none."""
    torch.set_num_threads(1)
    held: dict[str, Tensor] = {}
    for incoming in iter(given.recv, None):
        take(held, incoming)
        done.send(len(held))


def take(held: dict[str, Tensor], named: IncomingWeights | list[tuple[str, Tensor]]) -> None:
    for name, tensor in named:
        held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def publisher(
    kind: Kind, named: list[tuple[str, Tensor]], bucket: int
) -> Iterator[Callable[[], None]]:
    """Yields a function that publishes once and returns when all is read."""
    context = multiprocessing.get_context("spawn")
    (theirs, given), (done, their_done) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    reader = context.Process(target=read, args=(theirs, their_done))
    reader.start()
    sender = Sender(kind, bucket_bytes=bucket << 20)

    def publish() -> None:
        given.send(sender.incoming)
        sender.send(named, wait)
        assert done.recv() == len(named)

    yield publish
    given.send(None)
    reader.join()
    sender.drop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket", type=int, default=32, help="MiB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    named = weights(options.megabytes)
    size = sum(tensor.nbytes for _, tensor in named)
    held: dict[str, Tensor] = {}
    ways: dict[str, Callable[[], None]] = {"copy": lambda: take(held, named)}
    open_ways = {kind: publisher(kind, named, options.bucket) for kind in ("shm", "broadcast")}
    ways |= {kind: next(way) for kind, way in open_ways.items()}
    times = in_turns(ways.values(), options.rounds)  # the warm one touches all memory first
    seconds = dict(zip(ways, times, strict=True))
    for way in open_ways.values():
        next(way, None)
    print(
        f"{size / 1e6:.0f} MB in {len(named)} tensors, torch {torch.__version__}, CPU, load "
        f"{os.getloadavg()[0]:.1f}; fastest of {options.rounds} (median)"
    )
    floor = min(seconds["copy"])
    for name, each in seconds.items():
        best = min(each)
        usual = statistics.median(each)
        rate = f"{size / best / 1e9:5.2f} GB/s ({size / usual / 1e9:.2f})"
        print(f"{name:10s} {best * 1e3:7.1f} ms  {rate}  {best / floor:5.2f} copies")
    good = min(seconds["shm"]) <= BAR * floor
    print(f"{'pass' if good else 'FAIL'}: shared memory takes at most {BAR:g} copies")


if __name__ == "__main__":
    main()
