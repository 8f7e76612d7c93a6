"""Weights from four ranks into the engine of each: ``python -m benchmarks.publish``.

A model of 1,200 small tensors on four gloo ranks, in buckets (`pyrl_ext.weights.gather`) against a
gather of one tensor after the other: an all-gather of what tensor-parallel ranks divide, a
broadcast from the rank that has an expert and one from the stage that has a layer, with shapes
known beforehand.
Both end in the embedded engine's `load_weights`, whose share is another row.

What must move is little: 17 MB into a buffer, over a socket and into the engine, 0.05 s with four
ranks on two cores. What is predicted, before it was measured: a collective of a few KB takes 0.7 to
1.1 ms here, whatever its size, so 2,000 tensors with one or two each take 2 to 4 s (that many in
ten layers; six are measured now). Five buckets have three collectives each, of 1 to 3 ms: 0.1 s,
and as much again for Python to cut 2,000 views and copy them into the engine. So 10 to 20 times as
fast to gather, 5 to 10 times with the load.

For an engine in another process the tensors end in the memory of a channel. Written there directly,
they save a copy of 17 MB and 2,000 allocations over tensors that are packed one by one. Predicted:
10 to 30 ms of 150, so 1.1 to 1.3 times as fast. Measured, on a machine under a load of 25: 1.26
times with tp2 pp2 ep2, 1.62 times with dp4 ep4, where experts are not even concatenated.

The last table is of remote engines: two servers of the embedded engine in processes, which get the
same weights over HTTP and TCP from one or two of the ranks (`rollout.senders`), in turns. The floor
is what one sender writes, 20 MB, over the rate of one socket, which is measured first; with two
senders half of it. What was predicted, when each tensor had a digest and 35 MB moved: a transfer is
not near it, since names, views and copies of so many tensors take most of the time. Two senders
share out the first part of that, gathering and packing, and servers do the second all the same: 1.1
to 1.4 times as fast. Measured since, on two cores for six processes and under loads of 13 and 12:
0.82 and 0.99 times. So the cores seem to be the limit there, not a socket, which no run with more
cores has confirmed. A second sender is for hosts with a network connection each.
Predicted of a broadcast, in which the sender writes every byte once: 0.6 to 0.9 times as fast on
these cores, since it first makes a group of three processes and connects each with each.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import extra_bytes
from benchmarks.run import device_name
from pyrl_ext.models.shards import whole_of
from pyrl_ext.models.weight_table import tensor_split
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.buckets import buckets_of
from pyrl_ext.plan import compile_plan
from pyrl_ext.rollout.build import build_engine
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights.gather import Shards
from tests.helpers.server_processes import server_processes

CONFIGS = Path(__file__).parents[1] / "configs"
RANKS = 4
ROUNDS = 1
MODEL = {
    "num_hidden_layers": 6,
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "n_routed_experts": 72,
}
LAYOUTS = {
    "tp2 pp2 ep2": ("parallel.tp=2", "parallel.pp=2", "parallel.ep=2", "parallel.etp=1"),
    "dp4 ep4": ("parallel.dp=4", "parallel.ep=4"),
}
COMMON = ("rollout.bucket_bytes=4MiB", "replay=off", "threads=1")
TIMES = 3.0  # bar: as fast as this, load included
# the first turn is not counted
SERVERS = 2
TURNS = 7
BROADCAST = "rollout.transport=broadcast"
WAYS = {
    "to each from one rank": (),
    "to each from two ranks": ("rollout.senders=2",),
    "to all at once (gloo)": (BROADCAST,),
}
DEADLINE = 120  # of a collective and of a publish: then the benchmark fails, naming who is late [s]
SOCKET_BYTES = 1 << 28
CHUNK = 4 << 20


def one_by_one(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `Policy.weights`, with separate collectives for every parameter."""
    live = policy.llm.named_parameters()
    topo = policy.topo
    for bucket in policy.tensors.buckets["llm"]:
        for shards in bucket.shards:
            row = shards.row
            whole = None
            if bucket.stage == topo.pp_rank and shards.owner in (None, topo.groups.ep.rank()):
                size, _, group = tensor_split(row, topo)
                part = live[row.megatron_name].detach().contiguous()
                parts = [part]
                if size > 1 and row.shard != "same":
                    parts = [torch.empty_like(part) for _ in range(size)]
                    dist.all_gather(parts, part, group=group)
                whole = whole_of(row, parts)
            yield from zip(row.hf_names, _spread(shards, bucket.stage, whole, topo), strict=True)


def _spread(shards: Shards, stage: int, whole: list[Tensor] | None, topo: Any) -> list[Tensor]:
    """``whole`` of the rank that has it, on all: first over its stage, then over the stages."""
    groups = [(topo.groups.pp, stage)]
    if shards.owner is not None and topo.pp_rank == stage:
        groups.insert(0, (topo.groups.ep, shards.owner))
    sizes = shards.row.shapes
    tensors = whole or [torch.empty(s, dtype=shards.dtype, device=topo.device) for s in sizes]
    for group, source in groups:
        if group.size() > 1:
            tensors = [tensor.contiguous() for tensor in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
    return tensors


@dataclass
class Row:
    """A layout's times [s], by what was done in buckets and one by one, and its memory [bytes]."""

    tensors: int
    bytes: int
    buckets: int
    largest: int
    gather: tuple[float, float]
    load: float
    publish: tuple[float, float]
    pack: tuple[float, float]
    extra: int


def measure(overrides: tuple[str, ...], config: Path) -> Row:
    """On this rank; every time is the slowest rank's."""
    plan = compile_plan(CONFIGS / "tiny.yaml", (f"model.config={config}", *COMMON, *overrides))
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo, trainable=False)
        engine = build_engine(plan, topo.device)
        held = [(name, tensor.clone()) for name, tensor in policy.weights()]
        for (name, ours), (other, theirs) in zip(held, one_by_one(policy), strict=True):
            if name != other or not torch.equal(ours, theirs):
                raise ValueError(f"{name}: gathered one by one it is another, expected the same")
        size = max(bucket.bucket.bytes for bucket in policy.tensors.buckets["llm"])
        times = _in_turns(
            lambda: _drain(policy.weights()),
            lambda: _drain(one_by_one(policy)),
            lambda: engine.load_weights(held, version=0),
            lambda: engine.load_weights(policy.weights(), version=0),
            lambda: engine.load_weights(one_by_one(policy), version=0),
            lambda: _pack(policy.weights(), size),
            lambda: _pack(iter(policy.weights()), size),
        )
        extra = torch.tensor(extra_bytes(lambda: _drain(policy.weights()), "cpu"))
        dist.all_reduce(extra, dist.ReduceOp.MAX)
        moved = sum(tensor.nbytes for _, tensor in held)
        sizes = [bucket.scratch for bucket in policy.tensors.buckets["llm"]]
        gathered = times[:2]
        load = times[2]
        published = times[3:5]
        packed = times[5:]
        return Row(
            len(held), moved, len(sizes), max(sizes), gathered, load, published, packed, int(extra)
        )  # fmt: skip


def _drain(named: Iterable[tuple[str, Tensor]]) -> None:
    for _ in named:
        pass


def _pack(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> None:
    """Into two buffers in turn, as a sender does without readers."""
    turns = cycle((0, 1))
    memory = dict[int, Tensor]()

    def allocate(size: int) -> Tensor:
        turn = next(turns)
        if turn not in memory or len(memory[turn]) < size:
            memory[turn] = torch.empty(size, dtype=torch.uint8)
        return memory[turn]

    for _ in buckets_of(named, bucket_bytes, allocate):
        pass


def _in_turns(*runs: Callable[[], Any]) -> Any:
    """The fastest round of each; the first is not counted."""
    best = torch.full((ROUNDS + 1, len(runs)), float("inf"))
    for times in best:
        for i, run in enumerate(runs):
            dist.barrier()
            start = time.perf_counter()
            run()
            times[i] = time.perf_counter() - start
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return tuple(best[1:].amin(0).tolist())


@dataclass
class Apart:
    """Publishes to servers with some number of senders, the first rank's times [s].

    Attributes:
        bytes: to all servers: from the sender that has most, and from all
        transfer: of each turn, from the first byte to the servers' last verified one
        publish: of each turn, the whole call
    """

    bytes: tuple[int, int]
    transfer: list[float]
    publish: list[float]


def measure_apart(config: Path, addresses: Sequence[str]) -> dict[str, Apart]:
    """By how the bytes go, in turns."""
    keys = (f"model.config={config}", *COMMON, *LAYOUTS["tp2 pp2 ep2"])
    keys += (f"rollout.servers=[{', '.join(addresses)}]", f"rollout.publish_timeout={DEADLINE}")
    plans = [compile_plan(CONFIGS / "tiny.yaml", (*keys, *way)) for way in WAYS.values()]
    found = {name: Apart((0, 0), [], []) for name in WAYS}
    version = 0
    with topology.start(plans[0]) as topo:
        policies = [Policy.build(plan, topo, trainable=False) for plan in plans]
        engines = [build_engine(plan, topo.device, topo.rank, topo.world) for plan in plans]
        for _ in range(TURNS):
            for policy, engine, row in zip(policies, engines, found.values(), strict=True):
                named = policy.tensors.published(policy.live())
                version = version + 1
                names = named.names or ()
                buckets = policy.tensors.buckets["llm"]
                mine = [b.bucket for b in buckets if b.bucket.slots[0].name in names]
                here = torch.tensor(sum(bucket.bytes for bucket in mine))
                dist.all_reduce(here, dist.ReduceOp.MAX)
                start = time.perf_counter()
                engine.load_weights(named, version)
                row.publish.append(time.perf_counter() - start)
                if engine.samples_stale() or engine.metrics()["servers/used"] != SERVERS:
                    raise RuntimeError("benchmarks.publish: a server left, expected both to serve")
                if topo.rank == 0:
                    row.transfer.append(engine.metrics()["publish/transfer_seconds"])
                    sent = engine.metrics()["publish/bytes"]
                    row.bytes = int(here), int(sent)
        for engine in engines:
            engine.close()
    return found


def on_rank(rank: int, folder: str, addresses: Sequence[str], rate: float) -> None:
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(RANKS)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=DEADLINE),
        rank=rank,
        world_size=RANKS,
    )
    config = Path(folder, "config.json")
    rows = {name: measure(o, config) for name, o in LAYOUTS.items()}
    apart = measure_apart(config, addresses)
    if rank == 0:
        show(rows)
        show_apart(apart, rate)
    dist.barrier()
    dist.destroy_process_group()


def socket_rate() -> float:
    """Bytes a second from one thread to another over a socket of this host."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        ends = [socket.create_connection(door.getsockname()), door.accept()[0]]
    for end in ends:
        end.settimeout(DEADLINE)
    sending, taking = ends
    chunk = bytes(CHUNK)
    into = bytearray(CHUNK)

    def send() -> None:
        for _ in range(SOCKET_BYTES // CHUNK):
            sending.sendall(chunk)
        sending.close()

    thread = threading.Thread(target=send)
    start = time.perf_counter()
    thread.start()
    while taking.recv_into(into):
        pass
    seconds = time.perf_counter() - start
    thread.join()
    taking.close()
    return SOCKET_BYTES / seconds


def show_apart(rows: dict[str, Apart], rate: float) -> None:
    table = Table(
        "bytes go",
        "MB in all",
        "floor ms",
        "transfer ms",
        "of turns",
        "publish ms",
        title=f"{SERVERS} servers: {RANKS} ranks, one socket {rate / 1e9:.2f} GB/s, "
        f"load {os.getloadavg()[0]:.1f}, {date.today()}",
        caption="floor: what the sender that has most writes, over the rate of one socket; "
        "transfer: weights to all servers, verified; publish: with the other calls of the protocol."
        f" Median of {TURNS - 1} turns",
        caption_justify="left",
        padding=(0, 1),
    )
    first, *others = rows.values()
    for (name, way), row in zip(WAYS.items(), rows.values(), strict=True):
        most = row.bytes[0] * (1 if BROADCAST in way else SERVERS)
        turns = [1e3 * seconds for seconds in row.transfer[1:]]
        cells = [
            name,
            f"{row.bytes[1] / 1e6:.1f}",
            f"{1e3 * most / rate:.0f}",
        ]
        cells += [f"{statistics.median(turns):.0f}", " ".join(f"{each:.0f}" for each in turns)]
        table.add_row(*cells, f"{1e3 * statistics.median(row.publish[1:]):.0f}")
    Console(width=180).print(table)
    for name, row in zip(list(rows)[1:], others, strict=True):
        times = [a / b for a, b in zip(first.transfer[1:], row.transfer[1:], strict=True)]
        print(f"{name}, turn by turn: {statistics.median(times):.2f} times as fast as the first")


def show(rows: dict[str, Row]) -> None:
    load = os.getloadavg()[0]
    table = Table(
        "layout",
        "tensors",
        "MB",
        "buckets",
        "gather ms",
        "one by one",
        "times",
        "load ms",
        "publish ms",
        "one by one",
        "times",
        "pack ms",
        "by tensor",
        "times",
        "extra MB",
        "buckets",
        title=f"publish: torch {torch.__version__}, {RANKS} ranks, {device_name('cpu')} each, "
        f"load {load:.1f}, {date.today()}",
        caption="gather: every tensor whole on every rank; load: into the engine, from tensors "
        "that are there; publish: both; pack: gather into a channel's memory. Fastest of "
        f"{ROUNDS} rounds, slowest rank. extra: peak memory of a gather, in MB and in buckets of "
        "the largest size",
        caption_justify="left",
        padding=(0, 1),
    )
    for name, row in rows.items():
        cells = [f"{row.tensors}", f"{row.bytes / 1e6:.1f}", f"{row.buckets}"]
        cells += [f"{1e3 * s:.0f}" for s in row.gather] + [f"{_ratio(row.gather):.1f}x"]
        cells += [f"{1e3 * row.load:.0f}"]
        cells += [f"{1e3 * s:.0f}" for s in row.publish] + [f"{_ratio(row.publish):.1f}x"]
        cells += [f"{1e3 * s:.0f}" for s in row.pack] + [f"{_ratio(row.pack):.2f}x"]
        cells += [f"{row.extra / 1e6:.1f}", f"{row.extra / row.largest:.2f}"]
        table.add_row(name, *cells)
    Console(width=180).print(table)
    for name, row in rows.items():
        times = _ratio(row.publish)
        held = row.extra / row.largest
        print(_bar(times >= TIMES, f"{name}: times as fast as one by one at least {TIMES}", times))
        print(_bar(held < 2, f"{name}: extra memory below 2 buckets", held))


def _ratio(times: tuple[float, float]) -> float:
    return times[1] / times[0]


def _bar(reached: bool, text: str, found: float) -> str:
    return f"{'PASS' if reached else 'FAIL'}  {text}:  {found:.3g}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hf = json.loads((CONFIGS / "tiny" / "config.json").read_text()) | MODEL
        Path(folder, "config.json").write_text(json.dumps(hf))
        keys = (f"model.config={folder}/config.json", *COMMON)
        rate = socket_rate()
        with server_processes(Path(folder), SERVERS, keys) as servers:
            given = folder, [each.address for each in servers], rate
            torch.multiprocessing.spawn(on_rank, given, RANKS)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
