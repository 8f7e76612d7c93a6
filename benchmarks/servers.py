"""``python -m benchmarks.servers [--requests N]``: the cost of the client and router a request.

1,000 trajectories at once, of 4 turns each, over two servers in processes that speak the protocol
and compute nothing. The time is this process's processor time, in which everything that a rank does
for a request is counted, from the turn to the finished sample; the memory is what it holds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import psutil

from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.engine import ServersEngine
from pyrl_ext.rollout.remote.model import Model
from pyrl_ext.rollout.remote.weight_sync import Publisher
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.http_engine import EXPERTS, LAYERS, VOCAB, HttpEngine, K
from tests.helpers.turns import ScriptedFeed, answers, first_turns

TRAJECTORIES = 1000
GROUP = 8
TURNS = 4
BUDGET = 12
BAR = 2e-3  # of a request [s]


def serve(connection: Connection) -> None:
    """A server, in its process, until the other end says so."""
    with HttpEngine() as engine:
        engine.forgets = True
        connection.send(engine.address)
        connection.recv()


class Nothing:
    """A publish without weights."""

    loop: Any
    metrics: dict[str, float]

    def __init__(self) -> None:
        self.metrics = {}

    def __call__(
        self, servers: Sequence[Server], named: Iterable[Any], version: int, *_: Any
    ) -> Mapping[str, str]:
        return {}

    def prove(self, version: int, score: Any) -> Mapping[str, str]:
        return {}


def script(sample: Sample) -> list[int] | None:
    return None if sample.turn == TURNS - 1 else [*sample.tokens.tolist(), 7, 8, 9]


def wave(engine: ServersEngine, number: int) -> int:
    """All turns of 1,000 trajectories; returns how many there were."""
    prompts = [Prompt(n, tuple(range(3, 35))) for n in range(TRAJECTORIES // GROUP)]
    turns = first_turns(prompts, GROUP, BUDGET)
    feed = ScriptedFeed(turns, script, max_tokens=256)
    return sum(1 for _ in answers(engine, feed, Sampling(BUDGET, seed=number)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    wanted = parser.parse_args(arguments).requests
    context = multiprocessing.get_context("spawn")
    ends = []
    processes = []
    for _ in range(2):
        end, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs,), daemon=True))
        processes[-1].start()
        ends.append(end)
    servers = [Server(end.recv()) for end in ends]
    model = Model(VOCAB, LAYERS, (1, 2, 3), EXPERTS, K)
    engine = ServersEngine(servers, model, cast(Publisher, Nothing()), max_num_seqs=TRAJECTORIES)
    engine.load_weights([], 1)
    done = 0
    number = 0
    memory = psutil.Process()
    first = 0.0
    spent = 0.0
    held = 0.0
    print(f"{'requests':>9} {'ms each':>8} {'requests/s':>10} {'MiB held':>9}")
    while done < wanted:
        begin = time.process_time()
        wall = time.monotonic()
        count = wave(engine, number)
        spent = (time.process_time() - begin) / count
        taken = time.monotonic() - wall
        done = done + count
        number = number + 1
        held = memory.memory_info().rss / 2**20
        first = held if number == 2 else first  # the first wave fills pools and caches
        print(f"{done:9,} {spent * 1e3:8.2f} {count / taken:10,.0f} {held:9.1f}", flush=True)
    engine.load_weights([], 1)
    assert engine.metrics()["servers/requests"] == done
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"a request: {spent * 1e3:.2f} ms, bar {BAR * 1e3:g}; memory since the second wave: ",
        end="",
    )
    print(f"{held - first:+.1f} MiB, at most {most:.0f} MiB")
    engine.close()
    for end, process in zip(ends, processes, strict=True):
        end.send(None)
        process.join()
    return int(spent > BAR)


if __name__ == "__main__":
    sys.exit(main())
