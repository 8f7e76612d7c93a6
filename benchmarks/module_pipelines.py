"""megatron-core's pipeline of several modules next to edges, on ranks, against one process.

    python -m benchmarks.module_pipelines [--only NAME] [--limit SECONDS] [--write FILE]

Small modules of linear layers, so that schedules and communicators show and nothing else. Each
layout runs three ways: ``megatron`` is `MultiModulePipelineCommunicator` over `HyperCommGrid`,
nothing changed but the backend, which it names 'nccl'; ``mended`` has subclasses of it; ``edges``
is what the trainer uses. Loss and every gradient are compared with plain autograd. A case that
takes longer than the limit hangs: its ranks end and show their stacks.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from benchmarks.module_bridges import Pipeline
from benchmarks.module_cases import (
    AXES,
    CASES,
    MICROBATCHES,
    READER_LAYERS,
    SLOTS,
    Case,
    H,
    alone,
    batch,
    build,
    images_of,
    rows_of,
    size_of,
    stream_of,
)
from pyrl_ext.megatron import cpu
from pyrl_ext.pack.encoder_work import Route, meeting
from pyrl_ext.schedule.pipeline import ahead_of
from pyrl_ext.trainer.module_pipe import Edge, RunsAhead, give
from tests.helpers.ranks import run_ranks

WAYS = ("megatron", "mended", "edges")
STEPS = 10
BOUND = 2e-5


# a rank ------------------------------------------------------------------------------------------


class Asking(RunsAhead):
    """Asks for shapes, as megatron does in the other ways."""

    _communicate_shapes = P2PCommunicator._communicate_shapes  # type: ignore[assignment]


class Rank:
    """This process' module of a case, one way."""

    def __init__(self, case: Case, way: str):
        self.case = case
        self.way = way
        first = 0
        rank = dist.get_rank()
        self.grids: dict[str, HyperCommGrid] = {}
        for name, sizes in case.modules.items():
            shape = [sizes.get(axis, 1) for axis in AXES]
            grid = self.grids[name] = HyperCommGrid(shape, list(AXES), rank_offset=first)
            for dims in (*AXES, ["tp", "cp"], ["tp", "cp", "dp"]):
                grid.create_pg(dims)
            if first <= rank < first + size_of(sizes):
                self.name = name
                at = rank - first
                self.at = dict(zip(AXES, np.unravel_index(at, shape, order="F"), strict=True))
            first += size_of(sizes)
        grid = self.grids[self.name]
        self.sizes = case.modules[self.name]
        self.groups = ProcessGroupCollection(
            **{axis: grid.get_pg(axis) for axis in AXES},
            tp_cp=grid.get_pg(["tp", "cp"]),
            dp_cp=grid.get_pg(["tp", "cp", "dp"]),
        )
        self.encodes, self.replica = self.name[0] == "e", int(self.at["dp"])
        self.config = self._config()
        self.chunks = build(case, self.name, int(self.at["pp"]), self.config)
        self.edges = self._edges() if way == "edges" else {}
        if way != "edges":
            self.pipeline: Any = Pipeline(case, self.grids, self.config, way == "mended")

    def _config(self) -> TransformerConfig:
        vpp = self.sizes.get("vpp")
        return TransformerConfig(
            num_layers=READER_LAYERS,
            hidden_size=H,
            num_attention_heads=1,
            pipeline_model_parallel_size=self.sizes.get("pp", 1),
            virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=torch.float32,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            calculate_per_token_loss=True,
            overlap_p2p_comm=vpp is not None,
            batch_p2p_comm=vpp is None,
        )

    def _edges(self) -> dict[tuple[str, str], Edge]:
        found = {}
        for encoder, readers in self.case.feeds.items():
            for reader in readers:
                last = self.grids[encoder]._gen_rank_enum(["pp"])
                sources = [group[-1] for group in last]
                firsts = [group[0] for group in self.grids[reader]._gen_rank_enum(["pp"])]
                shards = len(firsts) // self.case.modules[reader].get("dp", 1)
                seats = {rank: divmod(i, shards) for i, rank in enumerate(firsts)}
                groups: Any = [dist.new_group([*sources, *firsts]) for _ in range(2)]
                found[encoder, reader] = Edge(
                    sources,
                    seats,
                    groups[0],
                    groups[1],
                    H,
                    torch.float32,
                    torch.device("cpu"),
                    trained=not self.case.frozen,
                )
        return found

    def _work(self, encoder: str, reader: str) -> Any:
        def route(micro: int, replica: int, seat: tuple[int, int], depth: int) -> Route:
            images = images_of(self.case, encoder, micro, replica)
            return meeting(stream_of(images), rows_of(self.case, reader, micro, *seat))

        return SimpleNamespace(route=route)

    @property
    def rows(self) -> Any:
        shard = int(self.at["tp"] + self.sizes.get("tp", 1) * self.at["cp"])
        return lambda micro: rows_of(self.case, self.name, micro, self.replica, shard)

    def step(self) -> float:
        """The loss of this rank; gradients are summed over the module's copies afterwards."""
        self.losses: list[float] = []
        for chunk in self.chunks:
            chunk.zero_grad()
        many = len(self.chunks) > 1
        numbers: list[Any] = [iter(range(MICROBATCHES)) for _ in self.chunks]
        common = {
            "data_iterator": numbers if many else numbers[0],
            "model": self.chunks if many else self.chunks[0],
            "num_microbatches": MICROBATCHES,
            "seq_length": 0,
            "micro_batch_size": 1,
        }
        (self._by_edges if self.way == "edges" else self._by_megatron)(common)
        for edge in self.edges.values():
            edge.finish()
        return sum(self.losses)

    def gradients(self) -> dict[str, Tensor]:
        copies = self.grids[self.name].get_pg(["tp", "cp", "dp"])
        found = {}
        for chunk in self.chunks:
            for name, p in chunk.named.items():
                if p.requires_grad:
                    found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    dist.all_reduce(found[name], group=copies)
        return found

    def _by_edges(self, common: dict[str, Any]) -> None:
        fed = [(edge, self._work(*key)) for key, edge in self.edges.items() if key[0] == self.name]

        def encode(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
            micro = next(numbers)
            output = chunk(images_of(self.case, self.name, micro, self.replica))

            def hand_on(output: Tensor) -> tuple:
                zeros = [
                    give(output, [edge], work, micro, self.replica, self.groups.tp)
                    for edge, work in fed
                ]
                return torch.stack(zeros).sum(), NONE, None

            return output, hand_on

        def read(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
            micro = next(numbers)
            taken = []
            for key, edge in self.edges.items():
                if key[1] == self.name and chunk.first:
                    taken += edge.take(self._work(*key), micro)
            return chunk(self.rows(micro), taken), self._loss(chunk, micro)

        if self.encodes:
            readers = [self.case.modules[name] for name in self.case.readers]
            ahead = max(ahead_of(r.get("pp", 1), r.get("vpp")) for r in readers)
            schedules.forward_backward_pipelining_without_interleaving(
                forward_step_func=encode,
                forward_only=self.case.frozen,
                p2p_communicator=Asking(
                    ahead,
                    self.groups.pp,
                    self.config,
                    MICROBATCHES,
                    lambda micro, stage: (0, 1, H),  # unread
                ),
                pg_collection=self.groups,
                **common,
            )
            return
        schedules.get_forward_backward_func(self.sizes.get("pp", 1), self.sizes.get("vpp"))(
            forward_step_func=read,
            forward_only=False,
            p2p_communicator=P2PCommunicator(self.groups.pp, self.config),
            pg_collection=self.groups,
            **common,
        )

    def _loss(self, chunk: Any, micro: int) -> Any:
        def loss(x: Tensor) -> tuple[Tensor, Tensor, None]:
            total = chunk.loss(self.rows(micro), x)
            self.losses.append(float(total.detach()))
            return total, NONE, None

        return loss

    def _by_megatron(self, common: dict[str, Any]) -> None:
        groups: Any = MultiModuleProcessGroupCollection(
            {self.name: self.groups}, None if self.encodes else self.name
        )
        schedules.get_forward_backward_func(schedule_pg_collection=groups)(
            forward_step_func=self._encode if self.encodes else self._read,
            forward_only=False,
            p2p_communicator=self.pipeline,
            pg_collection=groups,
            **common,
        )

    def _encode(self, numbers: Iterator[int], chunk: Any) -> tuple[dict[str, Tensor], None]:
        micro = next(numbers)
        output = chunk(images_of(self.case, self.name, micro, self.replica))
        readers = self.case.modules[self.case.readers[0]].get("dp", 1)
        here = readers // self.sizes.get("dp", 1)
        if chunk.last and here > 1:  # the attribute is megatron's own, and not documented
            kind = self.case.encoders.index(self.name)
            slots = batch(len(self.case.encoders))[1]
            each = np.array_split(np.arange(SLOTS), readers)[self.replica * here :][:here]
            sizes = [sum(i.rows for s in mine for i in slots[micro][s][kind]) for mine in each]
            if self.way == "mended":
                output._mimo_bridge_split_sizes = sizes  # type: ignore[attr-defined]
        return {self.name: output}, None

    def _read(self, numbers: Iterator[int], chunk: Any) -> tuple[Any, Any]:
        micro = next(numbers)
        taken = []
        rows = None
        rows = self.rows(micro)
        for encoder, values in chunk.given.items() if chunk.first else ():
            replicas = self.case.modules[encoder].get("dp", 1)
            readers = self.sizes.get("dp", 1)
            if replicas >= readers:  # of several replicas, one after the other
                each = replicas // readers
                mine = range(self.replica * each, (self.replica + 1) * each)
                whole = [i for r in mine for i in images_of(self.case, encoder, micro, r)]
            else:
                kind = self.case.encoders.index(encoder)
                slots = batch(len(self.case.encoders))[1]
                mine = np.array_split(np.arange(SLOTS), readers)[self.replica]
                whole = [i for s in mine for i in slots[micro][s][kind]]
            if self.way == "mended":
                values = copy_to_tensor_model_parallel_region(values, group=self.groups.tp_cp)
            route = meeting(stream_of(whole), rows)
            taken.append((route.dest, values.index_select(0, route.source)))
        output = chunk(rows, taken)
        if chunk.last:
            return output, self._loss(chunk, micro)
        return {self.name: output}, None


NONE = torch.zeros((), dtype=torch.int)


def on_ranks(group: Any, case: Case, way: str, folder: Path, limit: float) -> Any:
    """(loss, gradients, seconds of the fastest step) of this rank."""
    stacks = (folder / f"{group.rank()}.stack").open("w")
    faulthandler.dump_traceback_later(limit, exit=True, file=stacks)
    cpu.install()
    rank = Rank(case, way)
    best = float("inf")
    loss = 0.0
    for _ in range(STEPS):
        dist.barrier()
        begun = time.perf_counter()
        loss = rank.step()
        dist.barrier()
        best = min(best, time.perf_counter() - begun)
    faulthandler.cancel_dump_traceback_later()
    last_of_replica = int(rank.at["pp"]) == rank.sizes.get("pp", 1) - 1
    return loss if last_of_replica else 0.0, rank.gradients(), best


# the table ---------------------------------------------------------------------------------------


@dataclass
class Row:
    """The result of one way on a case."""

    case: Case
    way: str
    said: str
    seconds: float = float("nan")


def measured(case: Case, way: str, want: tuple[float, dict[str, Tensor]], limit: float) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            found = run_ranks(on_ranks, case.ranks, case, way, folder, limit, timeout=2 * limit)
        except (AssertionError, TimeoutError) as error:
            stacks = {
                p.stem: text for p in sorted(folder.glob("*.stack")) if (text := p.read_text())
            }
            if not stacks:
                last = str(error).strip().splitlines()[-1]
                return Row(case, way, f"error: {textwrap.shorten(last, 75, placeholder=' ...')}")
            for rank, text in stacks.items():
                print(f"  rank {rank} of {case.name}, {way}, hangs:\n{text}", flush=True)
            return Row(case, way, "hang")
    loss, grads = want
    off = {"loss": abs(sum(each[0] for each in found) - loss) / abs(loss), "e": 0.0, "r": 0.0}
    for each in found:
        for name, grad in each[1].items():
            apart = float((grad - grads[name]).norm() / grads[name].norm())
            off[name[0]] = max(off[name[0]], apart)
    words = {"loss": "loss", "e": "encoder", "r": "reader"}
    bad = [f"{words[key]} off by {value:.0%}" for key, value in off.items() if not value < BOUND]
    worst = max(off.values())
    said = f"wrong: {', '.join(bad)}" if bad else f"right, {worst:.1e}"
    return Row(case, way, said, max(each[2] for each in found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name is this")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a case hangs")
    parser.add_argument("--write", type=Path, help="put the table into this file")
    options = parser.parse_args()
    lines = ["| layout | ranks | megatron | mended | edges | edges / mended |"]
    lines.append("| --- | ---: | --- | --- | --- | ---: |")
    missed = 0
    for case in CASES:
        if options.only and options.only != case.name:
            continue
        os.environ["WORLD_SIZE"] = str(case.ranks)
        (want,) = run_ranks(alone, 1, case)
        rows = [measured(case, way, want, options.limit) for way in WAYS]
        missed += not rows[2].said.startswith("right")
        ratio = rows[2].seconds / rows[1].seconds
        cells = [f"{r.said}{f', {1e3 * r.seconds:.0f} ms' if r.seconds > 0 else ''}" for r in rows]
        ratio_cell = f"{ratio:.2f}" if ratio > 0 else ""
        lines.append(f"| {' | '.join([case.name, str(case.ranks), *cells, ratio_cell])} |")
        print(lines[-1], flush=True)
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    return missed


if __name__ == "__main__":
    sys.exit(main())
