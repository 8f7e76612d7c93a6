"""Heartbeats between ranks; ranks that are killed under torchrun are in test_faults."""

import threading
import time
from types import SimpleNamespace

import torch.distributed as dist

from pyrl_ext.dist import heartbeat
from pyrl_ext.dist.clock import Clock
from tests.helpers.ranks import run_ranks

ALONE = SimpleNamespace(rank=0, world_size=1)


def slow_rank(group):
    """Rank 1 spends twice the patience in one phase; rank 0 waits for it."""
    heartbeat.INTERVAL = 0.2
    topo = SimpleNamespace(rank=group.rank(), world_size=group.size())
    with heartbeat.heartbeats(topo) as beats:  # pyright: ignore[reportArgumentType]
        clock, beats.step = Clock(on_phase=beats.enter), 0
        with clock("time/rollout"):
            time.sleep(2 * heartbeat.SILENT * heartbeat.INTERVAL * group.rank())
        dist.barrier(group)
    return beats.cause, threading.active_count()


def test_heartbeats_take_a_long_phase_for_no_fault():
    assert run_ranks(slow_rank, 2) == [(None, 1)] * 2


def test_heartbeats_of_one_rank_need_no_thread():
    with heartbeat.heartbeats(ALONE):  # pyright: ignore[reportArgumentType]
        assert not [t.name for t in threading.enumerate() if t.name.startswith("heartbeat")]


def test_place_names_the_phase_and_the_step():
    beats = heartbeat.Heartbeat(ALONE)  # pyright: ignore[reportArgumentType]
    assert beats.place == "start-up"
    clock, beats.step = Clock(on_phase=beats.enter), 7
    with clock("time/step"):
        assert beats.place == "step 7"
        with clock("time/update"):
            assert beats.place == "update of step 7"
        assert beats.place == "step 7"
