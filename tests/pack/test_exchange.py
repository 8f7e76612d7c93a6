"""shard_batch: every rank gets the rows that it computes, from whichever rank owns them, and only
those; compared with a plain loop over rows. Ranks that disagree or die end the others."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.delivery import KINDS, TransferStats
from pyrl_ext.pack.exchange import RowExchange, shard_batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.rank_rows import RankRole
from pyrl_ext.pack.shard import BatchShard, joined
from pyrl_ext.parallel import heartbeat
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.ranks import ranks
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.samples import Sample
from pyrl_ext.schedule import Group, Schedule, plan_microbatches
from pyrl_ext.trainer.policy import Scores
from pyrl_ext.trainer.step import Phase, Step
from tests.helpers.deadline import DEADLINE
from tests.helpers.probe import local_rows
from tests.helpers.ranks import fork_ranks, run_ranks
from tests.helpers.samples import make_sample, with_kept
from tests.helpers.tiny import one_rank, tiny_plan

pytestmark = pytest.mark.multiprocess

LAYERS = (1, 2, 3)
DEPTHS = 1
LAYOUTS = ("dp=4", "tp=2 pp=2", "cp=2 dp=2", "pp=4", "cp=4", "dp=2 pp=2")
HOSTS = ([0, 0, 0, 0], [0, 1, 2, 3], [5, 7, 5, 7])
OWNERS = ([0, 1, 2, 3], [2, 2, 2, 2], [3, 3, 1, 1])


def sample(prompt: int, index: int) -> Sample:
    drawn = make_sample(prompt, index, 1 + prompt % 3, 2 + (prompt * 5 + index * 3) % 17, 8)
    assert drawn.routes is not None
    g = torch.Generator().manual_seed(prompt)
    mask = drawn.route_mask & (torch.rand(len(drawn.tokens), generator=g) > 0.2)
    return replace(drawn, routes=drawn.routes[..., :2], layer_ids=LAYERS, route_mask=mask)


SAMPLES = [sample(prompt, index) for prompt in range(6) for index in range(2)]


KEPT = [with_kept(each, 128) for each in SAMPLES]  # 128 tokens are in the tiny vocabulary


def plan_of(layout: str, *more: str) -> Plan:
    return tiny_plan(
        *(f"parallel.{word}" for word in layout.split()), "model.recompute=none", *more
    )


def schedules_of(plan: Plan, index: BatchIndex) -> list[Schedule]:
    """Two minibatches; where four ranks share no rows, one with context-parallel groups of 2, 1, 1
    and a microbatch that leaves two ranks empty."""
    parallel = plan.parallel
    found = []
    for ids in index.split(2):
        lengths = index.seqlens[ids].tolist()
        sizes = parallel.dp, 64, plan.row_alignment, parallel.cp
        found.append(plan_microbatches(lengths, *sizes).renumbered(ids))
    if parallel.dp == 4:
        first, *rest = index.split(2)[0]
        mixed = Group(0, 2, (first,)), Group(2, 1, tuple(rest[:2])), Group(3, 1, (rest[2],))
        few = Group(0, 2, ()), Group(2, 2, tuple(rest[3:]))
        found[0] = Schedule(4, (mixed, few))
    return found


def moved_to_ranks(group: dist.ProcessGroup) -> list[Any]:
    rank = group.rank()
    found = []
    for layout in LAYOUTS:
        plan = plan_of(layout, "rollout.top_k=6")
        assert plan.trains_on_sampling_mask and plan.sizes.vocab_size == 128
        for hosts in HOSTS:
            for owners in OWNERS:
                topo = replace(
                    one_rank(plan), rank=rank, world_size=group.size(), hosts=tuple(hosts)
                )
                mine = [s for s in KEPT if owners[s.prompt_id % 4] == rank]
                parts = gather_objects(BatchIndex.of(mine, rank, DEPTHS), group)
                index = BatchIndex.joined(parts, range(6))
                values = torch.arange(float(len(index)))[index.owned_by(rank)]
                batch = Batch.of(mine, values, kept_of=128) if mine else None
                schedules = schedules_of(plan, index)
                shard, moved = shard_batch(batch, index, schedules, plan, topo)
                check_rows(shard, schedules, plan, rank)
                check_kept(shard, plan, rank)
                found.append(
                    (
                        layout,
                        hosts,
                        owners,
                        counted(moved),
                        wanted(shard, plan, rank, hosts, owners),
                    )
                )
    waits_for_a_part_alone(group)
    refuses_other_numbers(group)
    return found


def rank_of_four(rank: int, hosts: Sequence[int]) -> tuple[Plan, Topology, Batch, BatchIndex]:
    """A rank that owns every fourth sample, its plan and what all ranks know."""
    plan = plan_of("dp=4")
    topo = replace(one_rank(plan), rank=rank, world_size=4, hosts=tuple(hosts))
    parts = [BatchIndex.of(SAMPLES[owner::4], owner, DEPTHS) for owner in range(4)]
    index = BatchIndex.joined(parts, range(6))
    values = torch.arange(float(len(index)))[index.owned_by(rank)]
    return plan, topo, Batch.of(SAMPLES[rank::4], values), index


def waits_for_a_part_alone(group: dist.ProcessGroup) -> None:
    """Ranks send nothing but first parts until every rank has the rows of its first microbatch."""
    plan, topo, batch, index = rank_of_four(group.rank(), range(4))
    schedules = schedules_of(plan, index)
    # what is to be sent, and what was waited for
    held = list[Any]()
    taken = list[int]()
    isend = dist.isend

    def hold(*arguments: Any, **named: Any) -> Any:
        held.append((arguments, named))
        return SimpleNamespace(wait=partial(taken.append, len(held)))

    with patch.object(dist, "isend", hold):
        shard, _ = shard_batch(batch, index, schedules, plan, topo)
    assert {b["tag"] for _, b in held} <= {0, 1, 2}
    firsts = [isend(*a, **b) for a, b in held if not b["tag"]]
    shard.wait(0)
    end = shard.rows.first_token[1]
    assert shard.stored["tokens"][:end].max() < 99 < 1 << 30 < shard.stored["tokens"].max()
    dist.barrier()
    others = [isend(*a, **b) for a, b in held if b["tag"]]
    assert not taken
    shard.minibatch(1).wait(0)
    assert len(taken) == len({*taken}) == len(held)
    for work in (*firsts, *others):
        assert work is not None  # as for a rank of no group
        work.wait()
    assert shard.stored["tokens"].max() < 99


class BatchesAlone(Step):
    """A step without a model."""

    def take(self, number: int, phase: Phase) -> Any: ...

    def evaluate(self, phase: Phase) -> Any: ...

    def metrics(self, index: BatchIndex, shard: BatchShard, old: Scores | None) -> Any: ...


def refuses_other_numbers(group: dist.ProcessGroup) -> None:
    """Rank 2 takes a sample for longer, which does not change its schedule: with routes and without
    them, and where it owns no sample itself."""
    rank = group.rank()
    for case in ("routes", "no routes", "no samples"):
        plan, topo, _, index = rank_of_four(rank, range(4))
        samples = {(s.prompt_id, s.index): s for s in SAMPLES}
        if case == "no routes":
            plan = plan_of("dp=4", "replay=off")
            index = replace(index, layer_ids=(), topk=0)
            none = {at: torch.zeros(len(s.tokens)) > 0 for at, s in samples.items()}
            samples = {
                at: replace(s, routes=None, layer_ids=(), route_mask=none[at])
                for at, s in samples.items()
            }
        if case == "no samples":
            index = replace(index, owners=np.where(index.owners == 2, 0, index.owners))
        names = zip(index.groups.tolist(), index.places.tolist(), strict=True)
        mine = [samples[at] for at, o in zip(names, index.owners, strict=True) if o == rank]
        longer = (index.seqlens + (np.arange(len(index)) == 5)).astype(np.int32)
        other = replace(index, seqlens=longer if rank == 2 else index.seqlens)
        step: Any = BatchesAlone(plan, topo, *[None] * 4)  # pyright: ignore[reportArgumentType]
        step.advantage = lambda rewards, *_: rewards
        same, changed = (joined(step.scheduler.minibatches(i)) for i in (index, other))
        assert same.microbatches == changed.microbatches
        with pytest.raises(RuntimeError, match=r"ranks \[2\] got other samples or schedules"):
            step.batch_of(RolloutSamples(other, mine), lambda name: nullcontext())
    plan, topo, batch, index = rank_of_four(rank, range(4))
    other = replace(index, rewards=index.rewards + (rank == 2))
    shard, _ = shard_batch(batch, other, schedules_of(plan, index), plan, topo)
    errors = gather_objects(error_of(lambda: shard.columns), group)
    expected = r"an error from rank 2, expected part . of 3 of its rows: it sent rows of exchange"
    assert any(re.search(expected, error) for error in errors), errors
    assert "error from rank" in errors[2]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def check_rows(shard: BatchShard, schedules: list[Schedule], plan: Plan, rank: int) -> None:
    """Every column against the samples, row by row."""
    where = ranks(plan.parallel)[rank]
    grid = where.dp * plan.parallel.cp + where.cp
    last = where.pp == plan.parallel.pp - 1
    layers = [i for chunk in plan.stages[where.pp] for i in chunk.layers if i in LAYERS]
    whole = Batch.of(SAMPLES, torch.arange(float(len(SAMPLES))))
    sample_of = [s for s, n in enumerate(whole.seqlens) for _ in range(n)]
    rows = []
    routed = []
    for schedule in schedules:
        for number in range(len(schedule)):
            group = schedule.group_of(number, grid)
            place = replace_place(group, grid, plan, where.tp)
            local = local_rows(whole, group.samples, place)
            part = len(local) // plan.parallel.tp
            rows += [row for row in local if row >= 0]
            routed += [row for row in local[where.tp * part : (where.tp + 1) * part] if row >= 0]
    assert shard.rows.tokens.tolist() == rows
    assert shard.rows.routers.tolist() == routed
    columns = {name: column.tolist() for name, column in shard.columns.items()}
    assert columns["tokens"] == whole.tokens[rows].tolist()
    for depth in range(1 + DEPTHS):
        ahead = [r + depth for r in rows]
        inside = [
            a < len(sample_of) and sample_of[a] == sample_of[r]
            for a, r in zip(ahead, rows, strict=True)
        ]
        pairs = list(zip(ahead, inside, strict=True))
        targets = [int(whole.targets[a]) if ok else 0 for a, ok in pairs]
        masks = [bool(whole.loss_mask[a]) if ok else False for a, ok in pairs]
        assert columns[f"targets_{depth}"] == targets
        assert columns[f"loss_mask_{depth}"] == masks
    assert ("rollout_logprobs" in columns) == ("advantages" in columns) == last
    if last:
        assert columns["rollout_logprobs"] == whole.rollout_logprobs[rows].tolist()
        assert columns["advantages"] == [float(sample_of[row]) for row in rows]
    assert shard.role.layers == tuple(layers)
    assert ("routes" in columns) == bool(layers)
    if layers:
        slots = [LAYERS.index(layer) for layer in layers]
        assert whole.routes is not None
        assert columns["routes"] == whole.routes[routed][:, slots].tolist()
        assert columns["route_mask"] == whole.route_mask[routed].tolist()
    for number, schedule in enumerate(schedules):
        part = shard.minibatch(number)
        assert part.schedule.microbatches == schedule.microbatches
        for depth in range(1 + DEPTHS):
            want = sum(int(s.loss_mask[1 + depth :].sum()) for s in of_ids(schedule.samples))
            assert part.loss_tokens[0][depth] == want
    parts = [shard.minibatch(i) for i in range(len(schedules))]
    for name, column in shard.columns.items():
        assert torch.equal(torch.cat([part.columns[name] for part in parts]), column)


def in_shard(row: int, plan: Plan, tp_rank: int) -> list[int] | None:
    """The ids in the shard of a rank of the set that a row's target was drawn from."""
    sample, at = [(s, t) for s in KEPT for t in range(1, len(s.tokens))][row]
    assert sample.kept_counts is not None and sample.kept_ids is not None
    if at < sample.prompt_len:
        return None
    begin = int(sample.kept_counts[sample.prompt_len : at].sum())
    ids = sample.kept_ids[begin : begin + int(sample.kept_counts[at])].tolist()
    columns = 128 // plan.parallel.tp
    return [i for i in ids if i // columns == tp_rank]


def check_kept(shard: BatchShard, plan: Plan, rank: int) -> None:
    """The kept sets of every row of every microbatch, on the last stage alone."""
    if not shard.role.last_stage:
        assert shard.kept(0) is None
        return
    tp_rank = ranks(plan.parallel)[rank].tp
    number = 0
    for part in map(shard.minibatch, range(len(shard.minibatches))):
        for microbatch in range(len(part.schedule)):
            first, end = shard.rows.first_token[number : number + 2]
            wanted = [in_shard(row, plan, tp_rank) for row in shard.rows.tokens[first:end]]
            sets = part.kept(microbatch)
            assert sets is not None
            assert sets.counts.tolist() == [-1 if w is None else len(w) for w in wanted]
            assert sets.ids.tolist() == [i for w in wanted for i in w or ()]
            number += 1


def of_ids(ids: list[int]) -> list[Sample]:
    return [SAMPLES[i] for i in ids]


def replace_place(group: Group, grid: int, plan: Plan, tp_rank: int) -> Any:
    from pyrl_ext.parallel.topology import RankCoords

    return RankCoords(group.cp_size, grid - group.first, None, plan.parallel.tp, tp_rank)


def counted(moved: TransferStats) -> tuple[int, int]:
    return sum(moved.network.values()), sum(moved.shared.values())


def wanted(
    shard: BatchShard, plan: Plan, rank: int, hosts: list[int], owners: list[int]
) -> tuple[int, int]:
    """Bytes that the rows of other ranks hold: over the network, in shared memory. A kept set takes
    the ids in the rank's shard, and their number, where losses are computed."""
    per_token = 4 + (1 + DEPTHS) * 5 + (8 if shard.role.last_stage else 0)
    per_router = len(shard.role.layers) * 2 + 1 if shard.role.layers else 0
    whole = Batch.of(SAMPLES, torch.zeros(len(SAMPLES)))
    prompts = np.repeat([s.prompt_id for s in SAMPLES], whole.seqlens)
    network = shared = 0
    tp_rank = ranks(plan.parallel)[rank].tp

    def kept(row: int) -> int:
        return 4 + 4 * len(in_shard(row, plan, tp_rank) or ()) if shard.role.last_stage else 0

    for rows, size in ((shard.rows.tokens, per_token), (shard.rows.routers, per_router)):
        for row in rows:
            owner = owners[prompts[row] % 4]
            each = size
            each += kept(row) if rows is shard.rows.tokens else 0
            network += each * (hosts[owner] != hosts[rank])
            shared += each * (hosts[owner] == hosts[rank] and owner != rank)
    return network, shared


def dies(rank: int, world_size: int, port: int, folder: Path, hosts: list[int]) -> None:
    """Rank 2 is killed when it has sent a part and the others wait for rows, or when they read its
    rows."""
    os.dup2(os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
    heartbeat.INTERVAL = 0.25
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    plan, topo, batch, index = rank_of_four(rank, hosts)
    schedules = schedules_of(plan, index)
    isend = dist.isend
    sent = []

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def send(*arguments: Any, **named: Any) -> Any:
        sent.append(named["tag"])
        if max(sent):
            store.wait([f"waits/{other}" for other in (0, 1, 3)])
            kill()
        return isend(*arguments, **named)

    def waiting() -> Any:
        store.set(f"waits/{rank}", "")
        return clock("time/exchange")

    with heartbeat.heartbeats(topo) as beats:
        clock = Clock(on_phase=beats.enter)
        beats.step = 5
        dist.barrier()
        if rank == 2:
            dist.isend = send
            dist.barrier = kill
        with clock("time/exchange"):
            shard, _ = shard_batch(batch, index, schedules, plan, topo, waiting)
        with clock("time/old_logprobs"):
            _ = shard.columns
            dist.barrier()


@pytest.mark.parametrize("hosts", [[0, 1, 2, 3], [0, 0, 0, 0]])
def test_shard_batch_ends_all_ranks_when_an_owner_dies(tmp_path, hosts):
    """The heartbeats name it and where it was; the exchange, what it owed."""
    with fork_ranks(dies, 4, tmp_path, hosts) as processes:
        for process in processes:
            process.join(DEADLINE)
        assert [process.exitcode for process in processes] == [1, 1, -signal.SIGKILL, 1]
    texts = {rank: (tmp_path / f"{rank}.txt").read_text() for rank in (0, 1, 3)}
    for text in texts.values():
        assert "rank 2 (" in text and "last heard in exchange of step 5\n" in text, text
    owed = r"ended in exchange of step 5: RuntimeError: shard_batch: rank (\d) has an error from "
    owed += "rank 2, expected part . of 3 of its rows" if hosts[1] else "(rank 2|some rank)"
    assert any(re.search(owed, text) for text in texts.values()), texts


@pytest.fixture(scope="module")
def exchanged():
    return run_ranks(moved_to_ranks, 4, timeout=300)


def test_shard_batch_moves_exactly_the_rows_that_a_rank_computes_and_does_not_have(exchanged):
    """The rows themselves are compared on the ranks."""
    totals = {"network": 0, "shared": 0}
    for found in exchanged:
        for layout, hosts, owners, got, want in found:
            assert got == want, (layout, hosts, owners)
            totals["network"] += got[0]
            totals["shared"] += got[1]
    assert min(totals.values()) > 0
    assert len(exchanged[0]) == len(LAYOUTS) * len(HOSTS) * len(OWNERS)


def test_part_of_cuts_microbatches_into_runs():
    index = BatchIndex.of(SAMPLES, depths=DEPTHS)
    for number, parts in ((1, [0]), (2, [0, 1]), (9, [0, 0, 1, 1, 2, 2, 3, 3, 3])):
        schedule = Schedule(1, ((Group(0, 1, ()),),) * number)
        exchange = RowExchange(index, schedule, [RankRole()], 8)
        assert [exchange.part_of(each) for each in range(number)] == parts
        assert len(exchange.of(0)[1]["tokens"].cuts) == 1 + len({*parts})


def test_moved_counts_every_kind():
    assert set(TransferStats().network) == set(TransferStats().shared) == set(KINDS)
    network = {kind: 10**i for i, kind in enumerate(KINDS)}
    moved = TransferStats(network, dict.fromkeys(KINDS, 5))
    assert moved.metrics(one_rank(tiny_plan())) == {
        "batch/moved_bytes": sum(network.values()),
        **{f"batch/moved_bytes/{kind}": bytes_ for kind, bytes_ in network.items()},
        "batch/shared_bytes": 5 * len(KINDS),
    }
