"""Weights from several ranks to several servers: the same on every server, whoever sends what."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pyrl_ext.parallel import topology
from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.plan.schema import Parallel
from pyrl_ext.rollout.build import build_engine, build_in_this_process
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import publish
from pyrl_ext.rollout.remote.engine import ServersEngine
from pyrl_ext.rollout.remote.publisher import identity_of
from pyrl_ext.rollout.remote.sender import Transfer
from pyrl_ext.rollout.remote.senders import senders_of
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights.check import sync_weights
from tests.helpers.ranks import run_ranks
from tests.helpers.servers import running
from tests.helpers.tiny import tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.multiprocess]

LAYOUTS = {
    "tp2 pp2": ("parallel.tp=2", "parallel.pp=2"),
    "tp2 dp2 ep4 etp1": ("parallel.tp=2", "parallel.dp=2", "parallel.ep=4", "parallel.etp=1"),
}
SMALL = "rollout.bucket_bytes=20000"
RELAYED = "rollout.relay_bytes=1"
BESIDE = "rollout.ahead=1"
BROADCAST = "rollout.transport=broadcast"
PUBLISHED = (  # number of senders, further keys
    (1, ()),
    (1, (BROADCAST,)),
    (1, (BROADCAST, BESIDE)),
    (2, (RELAYED,)),
    (4, (RELAYED, BESIDE)),
)


@given(
    st.sampled_from([(1, 4), (2, 2), (4, 1), (4, 2), (2, 3)]),
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.data(),
)
def test_senders_of_shares_buckets_evenly_and_within_their_stages(
    layout: tuple[int, int], sizes: list[int], data: st.DataObject
):
    pp, dp = layout
    grid = Grid("llm", 0, Parallel(pp=pp, dp=dp))
    senders = data.draw(st.integers(1, pp * dp))
    stages = sorted(data.draw(st.integers(0, pp - 1)) for _ in sizes)
    to = senders_of(grid, senders, list(zip(stages, sizes, strict=True)))
    ranks = {i * pp * dp // senders for i in range(senders)}
    assert set(to) <= ranks and len(ranks) == senders
    at = {rank: grid.place(rank).pp for rank in ranks}
    assert all(at[rank] == stage for rank, stage in zip(to, stages) if stage in at.values())
    for stage in range(pp):
        near = [rank for rank in ranks if at[rank] == stage]
        load = [
            sum(s for s, r, n in zip(sizes, to, stages) if (r, n) == (rank, stage)) for rank in near
        ]
        assert max(load, default=0) - min(load, default=0) <= max(sizes)
    if not set(range(pp)) & set(stages) & set(at.values()):
        load = [sum(s for s, r in zip(sizes, to) if r == rank) for rank in ranks]
        assert max(load) - min(load) <= max(sizes)


def on_ranks(group: dist.ProcessGroup, folder: Path) -> list[dict[str, Any]]:
    """The servers' digests after each publish, on the first rank, and what each rank sent."""
    os.environ["WORLD_SIZE"] = str(group.size())
    found = list[dict[str, Any]]()
    with ExitStack() as stack:
        held = list[HFEngine]()
        addresses = [list[str]()]
        if group.rank() == 0:
            plan = tiny_plan("rollout.servers=['http://127.0.0.1:1']")
            for _ in range(2):
                engine = build_in_this_process(plan, torch.device("cpu"))
                assert isinstance(engine, HFEngine)
                client = stack.enter_context(running(engine, 500))
                client.server.identity = identity_of(plan).to_json()
                held.append(engine)
                addresses[0].append(client.url)
        dist.broadcast_object_list(addresses)
        for name, layout in LAYOUTS.items():
            for senders, how in PUBLISHED:
                overrides = (*layout, f"rollout.servers={addresses[0]}", SMALL, "replay=off", *how)
                plan = tiny_plan(f"rollout.senders={senders}", f"run={folder}", *overrides)
                for engine in held:  # nothing is left of the publish before
                    engine.load_weights(
                        ((n, torch.zeros(s)) for n, s in engine.shapes().items()), 0
                    )
                row = published(plan, group)
                row["digests"] = [engine.checksums(None) for engine in held]
                found.append(row | {"layout": name, "senders": senders, "how": how})
    return found


class Noted(Transfer):
    """Notes the server at which its bytes begin."""

    first: int | None

    def __init__(self, *given: Any, relay: int | None = None, **more: Any):
        super().__init__(*given, relay=relay, **more)
        Noted.first = relay


def published(plan: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    publish.Transfer = Noted  # in this rank's process
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo, trainable=False)
        beside = topo.make_group("publish", range(4)) if plan.rollout.publishes_beside else None
        engine = build_engine(plan, topo.device, topo.rank, topo.world, beside)
        assert isinstance(engine, ServersEngine)
        stream = policy.tensors.published(policy.live())
        names = policy.tensors.engine_names
        sync_weights(engine, stream, names, 1, dtype=torch.float32)
        asked = engine.checksums()  # also of what is published next to
        engine.disproved()
        metrics = engine.metrics()
        came = [name for name, _ in stream]
        engine.close()
    assert metrics["servers/used"] == 2
    assert sorted(came) == sorted(stream.names or ())
    sent = set(stream.names or ())
    bytes_sent = metrics["publish/bytes"]
    return {"sent": sent, "bytes": bytes_sent, "asked": asked, "first": Noted.first}


def test_publish_from_several_ranks_gives_servers_the_same_weights(tmp_path: Path):
    every = run_ranks(on_ranks, 4, tmp_path)
    expected = None
    size = 0
    for case in zip(*every, strict=True):
        first = case[0]
        sent = [row["sent"] for row in case]
        expected = expected or first["digests"][0]
        assert first["digests"] == [expected, expected], first["layout"]
        assert all(row["asked"] == expected for row in case)
        relayed = RELAYED in first["how"]
        before = [sum(map(bool, sent[:rank])) for rank in range(4)]
        starts = [number % 2 if relayed else None for number in before]
        assert [row["first"] for row in case] == starts  # senders begin at one after the other
        assert sum(map(bool, sent)) == first["senders"]
        assert sum(map(len, sent)) == len(set().union(*sent)) >= len(expected)
        size = size or first["bytes"]
        once = relayed or BROADCAST in first["how"]
        sends = size / 2 if once else size  # to one of both, or to both at once
        assert all(abs(row["bytes"] - sends) < size / 20 for row in case)  # heads of frames
