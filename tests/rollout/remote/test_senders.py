"""Weights from several ranks to several servers: the same on every server, whoever sends what."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrl_ext.parallel import topology
from pyrl_ext.rollout.build import build_engine, build_in_this_process
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.engine import ServersEngine
from pyrl_ext.rollout.remote.identity import identity_of
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
BESIDE = "rollout.ahead=1"
BROADCAST = "rollout.transport=broadcast"
CHANGES = "rollout.delta_sync=true"
PUBLISHED: list[tuple[int, tuple[str, ...]]] = [  # number of senders, further keys
    (1, ()),
    (1, (BROADCAST,)),
    (1, (BROADCAST, BESIDE)),
    (2, ()),
    (4, (BESIDE,)),
    (1, (BROADCAST, CHANGES)),
    (2, (BESIDE, CHANGES)),
]


def on_ranks(group: dist.ProcessGroup, folder: Path) -> list[dict[str, Any]]:
    """The servers' digests after each publish, on the first rank, and what each rank sent."""
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
                client.server.identity = identity_of(plan)
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


def published(plan: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo, trainable=False)
        weights = [p.detach() for p in policy.llm.named_parameters().values()]
        background = plan.rollout.syncs_weights_in_background
        thread_group = topo.make_group("publish", range(4)) if background else None
        engine = build_engine(plan, topo.device, topo.rank, topo.world, thread_group)
        assert isinstance(engine, ServersEngine)
        stream = policy.tensors.published(policy.live())
        names = policy.tensors.engine_names
        if plan.rollout.delta_sync:  # of other weights in a few places; then of what is asked for
            for weight in weights:
                weight.view(-1)[::50].neg_()
            sync_weights(engine, stream, names, 0, dtype=torch.float32)
            engine.samples_stale()
            for weight in weights:
                weight.view(-1)[::50].neg_()
        sync_weights(engine, stream, names, 1, dtype=torch.float32)
        asked = engine.checksums()  # also of what is published next to
        engine.samples_stale()
        metrics = engine.metrics()
        came = [name for name, _ in stream]
        engine.close()
    assert metrics["servers/used"] == 2
    assert sorted(came) == sorted(stream.names or ())
    sent = set(stream.names or ())
    bytes_sent = metrics["publish/bytes"]
    saved = metrics["publish/saved_bytes"]
    return {"sent": sent, "bytes": bytes_sent, "asked": asked, "saved": saved}


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
        assert sum(map(bool, sent)) == first["senders"]
        assert sum(map(len, sent)) == len(set().union(*sent)) >= len(expected)
        size = size or first["bytes"]
        sends = size / 2 if BROADCAST in first["how"] else size  # to both at once, or to each
        whole = [row["bytes"] + row["saved"] for row in case]
        assert all(abs(sent - sends) < size / 20 for sent in whole)  # heads of frames
        assert (first["saved"] > 0.8 * sends) == (CHANGES in first["how"])
