"""Weights from four ranks into the engine of each: ``python -m benchmarks.publish``.

A model of 1,200 small tensors on four gloo ranks, in buckets (`pyrl_ext.weights.gather`) against a
gather of one tensor after the other: an all-gather of what tensor-parallel ranks divide, a
broadcast from the rank that has an expert and one from the stage that has a layer, with shapes
known beforehand. Both end in the embedded engine's `load_weights`, whose share is another row.

For an engine in another process the tensors end in the memory of a channel: written there directly,
or packed one by one.

The last table is of remote engines: two servers of the embedded engine in processes, which get the
same weights over HTTP and TCP from one or two of the ranks (`rollout.senders`), in turns. The floor
is what one sender writes over the rate of one socket, which is measured first. What was predicted
of all of it is in the lab book, next to the results.

``--host`` needs no ranks: the processor time of a tensor, whatever its size, which the plan counts
in a weight sync (`TENSOR_SECONDS`, `LOAD_SECONDS`).

``--changes`` needs no ranks either: how much of bfloat16 weights a step of AdamW changes, and one
sender's sync with one engine, of everything and of what changed (`rollout.delta_sync`).
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import date, timedelta
from importlib.util import find_spec
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.configs import TINY, hf_config, write_config
from benchmarks.measure import extra_bytes, in_turns
from benchmarks.tables import show
from benchmarks.timed_family import device_name
from pyrl_ext.models.shards import whole_of
from pyrl_ext.models.weight_table import tensor_split
from pyrl_ext.ops.digest import DigestLog
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.buckets import buckets_of
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.parameters import loaded_tensors
from pyrl_ext.rollout.build import build_engine
from pyrl_ext.rollout.remote.changes import SentBuckets, apply_changes, changes_between
from pyrl_ext.rollout.remote.weight_protocol import UpdateInfo
from pyrl_ext.rollout.remote.weight_receiver import StagedUpdate
from pyrl_ext.rollout.remote.weight_sender import Transfer
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights.gather import Shards
from tests.helpers.server_processes import server_processes

RANKS = 4
ROUNDS = 1
MODEL = {
    "num_hidden_layers": 6,
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "n_routed_experts": 72,
}
MANY = {
    "num_hidden_layers": 5,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "n_routed_experts": 128,
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
HOST_TURNS = 5
HOST_EXPERTS = (32, 128)  # of a layer, of the two models
RATES = (1e-6, 3e-6, 1e-5)  # learning rates
WEIGHT_STD = 0.02
MATRICES = 32
SIDE = 2048
SYNC = "of the benchmark"  # number of its weight syncs
CHANGED_STEPS = 12
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


class Row(NamedTuple):
    """A layout's cells of the table, and what has a bar."""

    cells: list[str]
    times: float  # one by one over in buckets, to publish
    held: float  # peak memory of a gather in buckets of the largest size


def measure(name: str, overrides: tuple[str, ...], config: str) -> Row:
    """On this rank; every time is the slowest rank's."""
    plan = compile_plan(TINY, (config, *COMMON, *overrides))
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo, trainable=False)
        engine = build_engine(plan, topo.device)
        held = [(name, tensor.clone()) for name, tensor in policy.weights()]
        for (name_, ours), (other, theirs) in zip(held, one_by_one(policy), strict=True):
            if name_ != other or not torch.equal(ours, theirs):
                raise ValueError(f"{name_}: gathered one by one it is another, expected the same")
        buckets = policy.tensors.buckets["llm"]
        size = max(bucket.bucket.bytes for bucket in buckets)
        runs = (
            lambda: _drain(policy.weights()),
            lambda: _drain(one_by_one(policy)),
            lambda: engine.load_weights(held, version=0),
            lambda: engine.load_weights(policy.weights(), version=0),
            lambda: engine.load_weights(one_by_one(policy), version=0),
            lambda: _pack(policy.weights(), size),
            lambda: _pack(iter(policy.weights()), size),
        )
        seconds = torch.tensor(in_turns(runs, ROUNDS, before=dist.barrier))
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        gather, gather_each, load, publish, publish_each, pack, pack_each = seconds.amin(1).tolist()
        extra = torch.tensor(extra_bytes(lambda: _drain(policy.weights()), "cpu"))
        dist.all_reduce(extra, dist.ReduceOp.MAX)
        largest = max(bucket.scratch for bucket in buckets)
        moved = sum(tensor.nbytes for _, tensor in held)
        cells = [name, f"{len(held)}", f"{moved / 1e6:.1f}", f"{len(buckets)}"]
        cells += [*_against(gather, gather_each), f"{1e3 * load:.0f}"]
        cells += [*_against(publish, publish_each), *_against(pack, pack_each)]
        cells += [f"{extra / 1e6:.1f}", f"{extra / largest:.2f}"]
        return Row(cells, publish_each / publish, float(extra / largest))


def _against(ours: float, theirs: float) -> tuple[str, str, str]:
    return f"{1e3 * ours:.0f}", f"{1e3 * theirs:.0f}", f"{theirs / ours:.3g}x"


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


def measure_apart(config: str, addresses: Sequence[str]) -> dict[str, Apart]:
    """By how the bytes go, in turns."""
    keys = (config, *COMMON, *LAYOUTS["tp2 pp2 ep2"])
    keys += (f"rollout.servers=[{', '.join(addresses)}]", f"rollout.publish_timeout={DEADLINE}")
    plans = [compile_plan(TINY, (*keys, *way)) for way in WAYS.values()]
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
    config = f"model.config={folder}/config.json"
    rows = {name: measure(name, overrides, config) for name, overrides in LAYOUTS.items()}
    apart = measure_apart(config, addresses)
    if rank == 0:
        show_layouts(rows)
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
    first = next(iter(rows.values()))
    cells = []
    for (name, way), row in zip(WAYS.items(), rows.values(), strict=True):
        most = row.bytes[0] * (1 if BROADCAST in way else SERVERS)
        turns = [1e3 * seconds for seconds in row.transfer[1:]]
        sizes = f"{row.bytes[1] / 1e6:.1f}", f"{1e3 * most / rate:.0f}"
        shown = f"{statistics.median(turns):.0f}", " ".join(f"{each:.0f}" for each in turns)
        cells.append([name, *sizes, *shown, f"{1e3 * statistics.median(row.publish[1:]):.0f}"])
    show(
        ("bytes go", "MB in all", "floor ms", "transfer ms", "of turns", "publish ms"),
        cells,
        width=180,
        title=f"{SERVERS} servers: {RANKS} ranks, one socket {rate / 1e9:.2f} GB/s, {now()}",
        caption="floor: what the sender that has most writes, over the rate of one socket; "
        "transfer: weights to all servers, verified; publish: with the other calls of the protocol."
        f" Median of {TURNS - 1} turns",
    )
    for name, row in [*rows.items()][1:]:
        times = [a / b for a, b in zip(first.transfer[1:], row.transfer[1:], strict=True)]
        print(f"{name}, turn by turn: {statistics.median(times):.2f} times as fast as the first")


def stepped(rate: float, matrices: int) -> tuple[list[Tensor], list[Tensor]]:
    """bfloat16 weights before and after a step of AdamW at a learning rate, of float32 weights with
    the spread of a language model's and noise as gradients."""
    torch.manual_seed(0)
    held = [torch.nn.Parameter(WEIGHT_STD * torch.randn(SIDE, SIDE)) for _ in range(matrices)]
    optimizer = torch.optim.AdamW(held, rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    versions: list[list[Tensor]] = []
    for step in range(CHANGED_STEPS):
        for weight in held:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        if step >= CHANGED_STEPS - 2:
            versions.append([weight.detach().bfloat16() for weight in held])
    return versions[0], versions[1]


class Sync(NamedTuple):
    """One transfer: seconds, and bytes that were sent."""

    seconds: float
    bytes: int


def synced(engine: StagedUpdate, weights: Sequence[Tensor], sent: SentBuckets | None) -> Sync:
    """Send the weights to the engine, of which only changes if it holds what was ``sent``."""
    named = [(f"layers.{n}.weight", weight) for n, weight in enumerate(weights)]
    delta = sent is not None and bool(sent.sync) and engine.kept == sent.sync
    wanted = {name: tuple(weight.shape) for name, weight in named}
    transfer = Transfer(["http://127.0.0.1:1"], 1, wanted, DEADLINE, sent=sent, delta=delta)
    keep = None if sent is None else SYNC
    base = SYNC if delta else None
    with closing(transfer), ThreadPoolExecutor(1) as pool:
        (way,) = transfer.open()
        info = UpdateInfo(
            senders=[way.sender], engine=0, version=1, silence=DEADLINE, base=base, keep=keep
        )
        engine.start()
        start = time.perf_counter()
        came = pool.submit(engine.update, info.model_dump())
        transfer.send(named)
        came.result()
        seconds = time.perf_counter() - start
    _, tensors = engine.finish()
    if not all(torch.equal(tensors[name], weight) for name, weight in named):
        raise RuntimeError("benchmarks.publish: other weights came, expected those sent")
    if sent is not None:
        sent.sync = SYNC
    return Sync(seconds, transfer.sent_bytes)


def changes_row(rate: float, matrices: int) -> list[str]:
    """The table's row for one learning rate."""
    versions = stepped(rate, matrices)
    old, new = (torch.cat([w.view(-1) for w in weights]) for weights in versions)
    differ = int((old != new).sum())
    old_bytes, new_bytes = old.view(torch.uint8), new.view(torch.uint8)
    start = time.perf_counter()
    changes = changes_between(old_bytes, new_bytes)
    compared = time.perf_counter() - start
    assert changes is not None
    start = time.perf_counter()
    apply_changes(old_bytes, changes)
    applied = time.perf_counter() - start

    engine = StagedUpdate({f"layers.{n}.weight": w.shape for n, w in enumerate(versions[0])})
    of_all = [synced(engine, versions[turn % 2], None) for turn in range(TURNS)]
    sent = SentBuckets()
    synced(engine, versions[1], sent)
    of_changes = [synced(engine, versions[turn % 2], sent) for turn in range(TURNS)]
    return [
        f"{rate:g}",
        f"{differ / len(new):.2%}",
        f"{of_changes[-1].bytes / of_all[-1].bytes:.1%}",
        f"{new.nbytes / compared / 1e9:.1f}",
        f"{new.nbytes / applied / 1e9:.1f}",
        f"{1e3 * statistics.median(each.seconds for each in of_all[1:]):.0f}",
        f"{1e3 * statistics.median(each.seconds for each in of_changes[1:]):.0f}",
    ]


def show_changes(matrices: int) -> None:
    show(
        ("lr", "changed", "bytes", "compare GB/s", "apply GB/s", "all ms", "changes ms"),
        [changes_row(rate, matrices) for rate in RATES],
        width=180,
        title=f"{matrices * SIDE**2 * 2 / 1e6:.0f} MB of bfloat16 from one sender to one engine: "
        f"{device_name('cpu')}, {now()}",
        caption="changed: share of the weights; bytes: of those that a sync of everything sends; "
        f"the last two: transfers over loopback, with digests, median of {TURNS - 1}",
    )


class HostTime(NamedTuple):
    """Processor time of one process for a weight sync of small tensors [s]."""

    tensors: int
    loaded: int
    """Tensors that the engine's loader gets: vLLM's, of each kind of expert one for a layer."""
    gather: float
    digests: float
    load: float


def measure_host(engine: str, experts: int) -> HostTime:
    """A model with so many experts in each of its layers."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(folder, hf_config("tiny") | MANY | {"n_routed_experts": experts})
        plan = compile_plan(TINY, (config, *COMMON, f"rollout.engine={engine}"))
        with topology.start(plan) as topo, closing(build_engine(plan, topo.device)) as built:
            policy = Policy.build(plan, topo, trainable=False)
            held = [(name, tensor.clone()) for name, tensor in policy.weights()]
            runs = {
                "gather": lambda: _drain(policy.weights()),
                "digests": lambda: _digest(held),
                "load": lambda: built.load_weights(held, version=0),
            }
            seconds = {
                name: min(_used(run) for _ in range(HOST_TURNS)) for name, run in runs.items()
            }
    return HostTime(len(held), loaded_tensors(plan), **seconds)


def host_row(engine: str) -> list[str]:
    """Costs of a tensor that is sent, and of one that vLLM loads. The two models differ in the
    tensors that are sent alone."""
    # vLLM cannot start again in a process whose process groups have ended
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as process:
        few, many = process.map(measure_host, [engine] * 2, HOST_EXPERTS)
    more = many.tensors - few.tensors
    digests = (many.digests - few.digests) / more
    gather = (many.gather - few.gather) / more
    sent = (many.load - few.load) / more
    if engine == "vllm":  # its load takes digests, the embedded engine's none
        sent -= digests
    shown = [f"{1e6 * us:.0f}" for us in (gather, digests, sent, gather + sent)]
    if engine == "hf":
        return [engine, f"{many.tensors}", *shown, ""]
    left = few.load - few.tensors * (sent + digests)
    return [engine, f"{many.tensors}", *shown, f"{1e6 * left / few.loaded:.0f} ({few.loaded})"]


def _digest(named: Iterable[tuple[str, Tensor]]) -> None:
    log = DigestLog(finite=True)
    for name, tensor in named:
        log.add(name, tensor)
    log.not_finite()


def _used(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def show_host() -> None:
    engines = ["vllm"] if find_spec("vllm") else []
    columns = ("gather us", "digests us", "pass on us", "gather and pass on us")
    show(
        ("engine", "tensors", *columns, "load us (tensors)"),
        [host_row(engine) for engine in ("hf", *engines)],
        width=130,
        title=f"publish: processor time of a tensor, one core of {device_name('cpu')}, {now()}",
        caption="Of one more tensor in a sync, without its digest, of which a GPU computes many in "
        "one launch; the embedded engine copies it. Last: of one that vLLM's loader gets, the "
        f"experts of a layer being three. Least of {HOST_TURNS} turns, small tensors",
    )


def now() -> str:
    return f"load {os.getloadavg()[0]:.1f}, {date.today()}"


def show_layouts(rows: dict[str, Row]) -> None:
    pairs = ("gather ms", "one by one", "times", "load ms", "publish ms", "one by one", "times")
    packed = ("pack ms", "by tensor", "times")
    show(
        ("layout", "tensors", "MB", "buckets", *pairs, *packed, "extra MB", "buckets"),
        [row.cells for row in rows.values()],
        width=180,
        title=f"publish: torch {torch.__version__}, {RANKS} ranks, {device_name('cpu')} each, "
        f"{now()}",
        caption="gather: every tensor whole on every rank; load: into the engine, from tensors "
        "that are there; publish: both; pack: gather into a channel's memory. Fastest of "
        f"{ROUNDS} rounds, slowest rank. extra: peak memory of a gather, in MB and in buckets of "
        "the largest size",
    )
    for name, row in rows.items():
        fast = f"{name}: times as fast as one by one at least {TIMES}"
        print(f"{'PASS' if row.times >= TIMES else 'FAIL'}  {fast}:  {row.times:.3g}")
        lean = f"{name}: extra memory below 2 buckets"
        print(f"{'PASS' if row.held < 2 else 'FAIL'}  {lean}:  {row.held:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a weight sync.")
    parser.add_argument("--host", action="store_true", help="only the processor time of a tensor")
    parser.add_argument("--changes", action="store_true", help="only syncs of what changed")
    parser.add_argument("--matrices", type=int, default=MATRICES, help="with --changes")
    asked = parser.parse_args()
    if asked.host or asked.changes:
        torch.set_num_threads(1)
        if asked.host:
            show_host()
        if asked.changes:
            show_changes(asked.matrices)
        return
    with tempfile.TemporaryDirectory() as folder:
        keys = (write_config(folder, hf_config("tiny") | MODEL), *COMMON)
        rate = socket_rate()
        with server_processes(Path(folder), SERVERS, keys) as servers:
            given = folder, [each.address for each in servers], rate
            torch.multiprocessing.spawn(on_rank, given, RANKS)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
