"""Edges: rows and gradients of encoders and readers on different ranks are those of one process,
and exactly the bytes of the rows move."""

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pyrl_ext.pack.encoder_work import EncoderWork, Route
from pyrl_ext.pack.images import Images
from pyrl_ext.pack.rank_rows import Lengths, RankRole, layout_of
from pyrl_ext.parallel.groups import connect
from pyrl_ext.plan.schema.layout import Module as ModuleKeys
from pyrl_ext.plan.schema.layout import ModuleParallel
from pyrl_ext.schedule import Schedule, plan_microbatches
from pyrl_ext.schedule.pipeline import ahead_of
from pyrl_ext.trainer.module_pipe import Edge, build_edges, give
from tests.helpers.nccl_rules import communicators
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import one_rank
from tests.helpers.vision import kimi_plan

pytestmark = pytest.mark.multiprocess

H = 6
PIXELS = 5
WORLD = 4
SEQLENS = [9, 4, 12, 7, 3, 8, 5, 10]
# (sample, first row, rows); samples 1, 4 and 6 have no image
TABLE = np.asarray([(0, 1, 3), (0, 5, 2), (2, 0, 7), (3, 2, 4), (5, 1, 5), (7, 0, 1), (7, 2, 6)])
ROWS = int(TABLE[:, 2].sum())
GRIDS = np.asarray([(1, 2, 2 * n) for n in TABLE[:, 2]])
IMAGES = Images(TABLE[:, 0], TABLE[:, 1], TABLE[:, 2], GRIDS)
LENGTHS = Lengths(np.asarray(SEQLENS, np.int32), np.cumsum([0, *SEQLENS]))


@dataclass(frozen=True)
class Case:
    """Modules on different ranks.

    Args:
        encoders: (dp, tp) of each encoder.
        reader:   (dp, cp, tp) of the module that reads their rows.
    """

    encoders: tuple[tuple[int, int], ...] = ((1, 1),)
    reader: tuple[int, int, int] = (1, 1, 1)
    width: int = H
    trained: bool = True
    dtype: torch.dtype = torch.float64

    @property
    def grids(self) -> dict[str, list[Any]]:
        """Module -> the role of each of its ranks: (replica, tp rank), or the reader's."""
        found: dict[str, list[Any]] = {
            f"encoder{e}": [(r, t) for r in range(dp) for t in range(tp)]
            for e, (dp, tp) in enumerate(self.encoders)
        }
        dp, cp, tp = self.reader
        roles = [RankRole(r, t, tp) for r in range(dp * cp) for t in range(tp)]
        return found | {"reader": roles}

    @property
    def joined(self) -> list[tuple[str, str]]:
        return [(f"encoder{e}", "reader") for e in range(len(self.encoders))]


CASES = {
    "1 -> 1": Case(),
    "dp2 -> cp2": Case(((2, 1),), reader=(1, 2, 1)),
    "dp3 -> 1, wide": Case(((3, 1),), width=3 * H),
    "1 -> dp2, frozen": Case(reader=(2, 1, 1), trained=False),
    "dp2 -> tp2": Case(((2, 1),), reader=(1, 1, 2)),
    "tp2 -> tp2": Case(((1, 2),), reader=(1, 1, 2)),
    "two encoders -> dp2": Case(((1, 1), (1, 1)), reader=(2, 1, 1)),
    "bf16: dp2 -> cp2": Case(((2, 1),), reader=(1, 2, 1), dtype=torch.bfloat16),
}


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def schedule_of(case: Case) -> Schedule:
    dp, cp, _ = case.reader
    return plan_microbatches(SEQLENS, dp, 16 // cp, 4, cp)


def work_of(case: Case, name: str) -> EncoderWork:
    replicas = len({replica for replica, _ in case.grids[name]})
    return EncoderWork(IMAGES, schedule_of(case), LENGTHS, replicas)


def pixels(encoder: int, ids: np.ndarray) -> Tensor:
    """[F, PIXELS], one row of pixels for each row of the output."""
    parts = [numbers(100 * encoder + i, int(IMAGES.counts[i]), PIXELS) for i in ids.tolist()]
    return torch.cat([torch.empty(0, PIXELS, dtype=torch.float64), *parts])


def weights(case: Case) -> dict[str, Tensor]:
    return {
        f"encoder{e}": numbers(e, PIXELS, case.width).requires_grad_()
        for e in range(len(case.encoders))
    }


def loss_of(case: Case, rows: Tensor, values: Tensor) -> Tensor:
    """A loss in which every row of the stream counts for something else."""
    return (values.double() ** 2 * numbers(7, sum(SEQLENS), case.width)[rows]).sum()


def whole(case: Case) -> dict[str, Tensor]:
    """The gradient of every module's weights, in one process."""
    held = weights(case)
    ids = np.arange(len(TABLE))
    rows = torch.cat([torch.arange(n) + LENGTHS.starts[s] + r for s, r, n in TABLE.tolist()])
    total = torch.zeros((), dtype=torch.float64)
    for e in range(len(case.encoders)):
        out = pixels(e, ids) @ held[f"encoder{e}"]
        total = total + loss_of(case, rows, out)
    total.backward()
    return {name: w.grad for name, w in held.items() if w.grad is not None}


class Rank:
    """This process' part of a case."""

    def __init__(self, case: Case):
        self.case = case
        places = [(n, role) for n, roles in case.grids.items() for role in roles]
        self.name, self.role = dict(enumerate(places)).get(dist.get_rank(), ("", None))
        self.edges = {key: self._edge(*key, places) for key in case.joined}
        pairs = [[r for r, (n, s) in enumerate(places) if (n, s[0]) == x] for x in _tp(places)]
        self.tp = [g for g in map(dist.new_group, pairs) if isinstance(g, dist.ProcessGroup)]

    def _edge(self, source: str, reader: str, places: list) -> Edge:
        sources = [r for r, (n, s) in enumerate(places) if n == source and s[1] == 0]
        readers = {r: s for r, (n, s) in enumerate(places) if n == reader}
        ranks = sorted({*sources, *readers})
        case = self.case
        device = torch.device("cpu")
        groups = list[Any]()
        for way in ("there", "back"):
            group = dist.new_group(ranks, group_desc=f"{source} {reader} {way}")
            groups.append(group if dist.get_rank() in ranks else None)
            connect(groups[-1], device)
        there, back = groups
        return Edge(sources, readers, there, back, case.width, case.dtype, device, case.trained)

    def run(self) -> tuple[dict[str, Tensor], dict[str, int], dict[str, int]]:
        """This rank's gradient of its weights, the bytes that it sent, and launches by group."""
        before = communicators()
        held = {n: w.detach().to(self.case.dtype) for n, w in weights(self.case).items()}
        for weight in held.values():
            weight.requires_grad_()
        losses = [self._forward(m, held) for m in range(len(schedule_of(self.case)))]
        for loss in losses if self.name.startswith("reader") or self.case.trained else ():
            if loss is not None and loss.requires_grad:
                loss.backward()
        for edge in self.edges.values():
            works = [work for sending in edge._pending for work in sending.works]
            edge.finish()
            assert all(work.is_completed() for work in works) and not edge._pending
        sent = {way: sum(e.sent[way] for e in self.edges.values()) for way in ("there", "back")}
        launches = communicators() - before
        by_way = Counter[str]()
        for name, count in launches.items():
            by_way[name.partition(" [")[0]] += count
        return {n: w.grad for n, w in held.items() if w.grad is not None}, sent, by_way

    def _forward(self, m: int, held: dict[str, Tensor]) -> Tensor | None:
        case = self.case
        name = self.name
        role = self.role
        if not name:
            return None
        if name == "reader":
            taken = [
                rows
                for (source, _), edge in self.edges.items()
                for rows in edge.take(work_of(case, source), m)
            ]
            return self._read(m, role, taken)
        work = work_of(case, name)
        replica, _ = role
        output = pixels(int(name[-1]), work.ids(m, replica)).to(case.dtype) @ held[name]
        return give(output, [self.edges[name, "reader"]], work, m, replica, self.tp[0])

    def _read(self, m: int, role: RankRole, taken: list) -> Tensor | None:
        group = schedule_of(self.case).group_of(m, role.grid_rank)
        layout = layout_of(group, LENGTHS, role)
        local = layout.shard(layout.rows(role.grid_rank - group.first), role.tp_rank)
        losses = [loss_of(self.case, local[dest], values) for dest, values in taken]
        return torch.stack(losses).sum() if losses else None


def _tp(places: list) -> list[tuple[str, int]]:
    """(module, replica) of everything that feeds."""
    return [*dict.fromkeys((n, s[0]) for n, s in places if not n.startswith("reader"))]


def on_rank(group) -> dict[str, Any]:
    return {name: Rank(case).run() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(on_rank, WORLD, rules=True)


@pytest.mark.parametrize("name", CASES)
def test_give_and_take_make_the_gradients_of_one_process(results, name):
    case = CASES[name]
    want = whole(CASES[name])
    found: dict[str, Tensor] = {}
    places = [(module, role) for module, roles in case.grids.items() for role in roles]
    for rank, (module, role) in enumerate(places):
        grads, *_ = results[rank][name]
        if module.startswith("reader") or not case.trained:
            assert not grads
        elif role[1] == 0:
            found[module] = found.get(module, 0) + grads[module].double()
        else:  # tensor-parallel ranks get the same gradient
            assert torch.equal(grads[module], results[rank - 1][name][0][module])
    assert found.keys() == (want.keys() if case.trained else set())
    bound = 1e-12 if case.dtype == torch.float64 else 1.5e-2
    for module, grad in found.items():
        assert (grad - want[module]).norm() <= bound * want[module].norm(), module


@pytest.mark.parametrize("name", CASES)
def test_edges_move_the_bytes_of_the_rows_and_no_more(results, name):
    case = CASES[name]
    sent = [sum(each[name][1][way] for each in results) for way in ("there", "back")]
    bytes_once = ROWS * case.width * case.dtype.itemsize
    assert sent == [len(case.joined) * bytes_once, len(case.joined) * bytes_once * case.trained]


@pytest.mark.parametrize("name", CASES)
def test_a_microbatch_is_one_launch_a_way(results, name):
    """A rank sends all its messages at once: launches of a group run one after the other."""
    launches = [number for each in results for number in each[name][2].values()]
    assert 0 < max(launches) <= len(schedule_of(CASES[name]))


@pytest.fixture
def world():
    """16 ranks, of which this process is the first; what they communicate goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Handle:
    """A handle as NCCL's: it tells when its launch is complete, which gloo's does not."""

    def __init__(self):
        self.complete = False

    def is_completed(self) -> bool:
        return self.complete

    def wait(self) -> None:
        self.complete = True


def test_sent_rows_are_released_once_they_have_arrived(world, monkeypatch):
    handles = list[Handle]()
    rows = list[Any]()

    def launch(ops: list[Any]) -> list[Handle]:
        handles.append(Handle())
        rows.append(weakref.ref(ops[0].tensor))
        return handles[-1:]

    monkeypatch.setattr(dist, "batch_isend_irecv", launch)
    readers = {1: RankRole(), 2: RankRole(1)}
    edge = Edge([0], readers, world, world, H, torch.float32, torch.device("cpu"))
    every = Route(torch.arange(4), torch.arange(4))
    work: Any = SimpleNamespace(route=lambda *_, **__: every)
    for microbatch in range(3):
        edge.send(work, microbatch, 0, torch.ones(4, H))
        handles[0].complete = microbatch > 0
    assert [each() is None for each in rows] == [True, False, False]
    edge.finish()
    assert [each() is None for each in rows] == [True, True, True]
    assert all(handle.complete for handle in handles)


@pytest.mark.parametrize("train", [True, False])
def test_build_edges_joins_last_stages_to_the_seats_of_the_first(tmp_path, world, train):
    """As a rank with both ends sees it, in bf16 and with padding for fp8."""
    sizes = ("parallel.dp=2", "parallel.cp=2", "parallel.tp=2", "parallel.ep=2", "parallel.etp=1")
    plan = kimi_plan(tmp_path, *sizes, "model.dtype=bfloat16")
    model = plan.model.model_copy(update={"fp8": "blockwise"})
    keys = ModuleKeys(
        train=train, patches_per_microbatch=64, parallel=ModuleParallel(dp=2, pp=2, tp=2)
    )
    plan = plan.model_copy(update={"modules": {"vision": keys}, "model": model})
    asked = list[tuple[str, Any]]()
    made = list[Any]()

    def make_group(role: str, ranks: Any) -> Any:
        asked.append((role, [*ranks]))
        made.append(dist.new_group(ranks))
        return made[-1]

    topo = replace(one_rank(plan), make_group=make_group)
    edge = build_edges(plan, topo, trainable=True)["vision", 0]
    grid = plan.grids["vision"]
    assert [(grid.place(r).dp, grid.place(r).tp, grid.place(r).pp) for r in edge.sources] == [
        (0, 0, 1),
        (1, 0, 1),
    ]
    wanted = [
        (RankRole(2 * d + c, t, 2, tile_rows=8), plan.grids["llm"].rank_of(dp=d, cp=c, tp=t))
        for d in range(2)
        for c in range(2)
        for t in range(2)
    ]
    assert sorted((role, rank) for rank, role in edge.readers.items()) == sorted(wanted)
    ranks = [*range(8), *edge.sources]
    assert asked == [("vision 0 there", ranks), ("vision 0 back", ranks)]
    assert [edge.there, edge.back] == made
    assert (edge.width, edge.dtype, edge.trained) == (
        plan.sizes.hidden_size,
        torch.bfloat16,
        train,
    )
    frozen = build_edges(plan, topo, trainable=False)
    assert not frozen["vision", 0].trained


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("vpp", [None, 2, 3])
def test_ahead_of_counts_what_megatrons_schedule_takes_before_the_first_gradient(pp, vpp):
    if vpp is None or pp == 1:
        assert ahead_of(pp, None) == pp
        return
    table = get_schedule_table(6 * pp, vpp, pp)
    warmups = 2 * (pp - 1) + (vpp - 1) * pp  # on the first rank
    order = convert_schedule_table_to_order(warmups, vpp, table)
    assert ahead_of(pp, vpp) == order[: order.index(-1)].count(1)
