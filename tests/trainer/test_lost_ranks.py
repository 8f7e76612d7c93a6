"""A rank of either module that is lost in the middle of a step ends all ranks, which name it, its
module and where it was."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.ddp import unwrap
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import heartbeat
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.plan.schema.layout import Module
from tests.helpers import passes, towers
from tests.helpers.deadline import DEADLINE
from tests.helpers.ranks import fork_ranks
from tests.helpers.vision import image_batch, kimi_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# the language model's two stages come first
WORLD = 3
ENCODER = 2
# with SHARED two ranks, each of both modules
OWN = "own"
SHARED = "shared"
KILLED = signal.SIGKILL
STOPPED = signal.SIGSTOP


def on_rank(
    rank: int, world_size: int, port: int, folder: Path, ranks: Any, lost: int, by: int
) -> None:
    """Two passes of an update; in the second ``lost`` gets a signal in its second microbatch, or
    with shared ranks in the first that has images."""
    os.dup2(os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
    os.environ["WORLD_SIZE"] = str(world_size)
    heartbeat.INTERVAL = 0.5
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    sizes = ["parallel.pp=2", "parallel.num_layers_in_first_pipeline_stage=1"]
    sizes = sizes if ranks == OWN else ["parallel.dp=2"]
    plan = kimi_plan(folder, *sizes, "optimizer.overlap_grad_reduce=true")
    keys = {"vision": Module(train=True, ranks=ranks, patches_per_microbatch=1 << 20)}
    plan = plan.model_copy(update={"modules": keys})
    with passes.built(plan) as policy:
        batch = image_batch()
        schedule = Scheduler(plan).schedule(batch.seqlens)
        loss = build_loss(plan.objective)
        assert len(schedule) > 1
        shard = towers.image_shard(plan, policy.topo, batch, schedule)
        policy.accumulate(shard, loss)
        dist.barrier()
        with heartbeat.heartbeats(policy.topo) as beats:
            clock = Clock(on_phase=beats.enter)
            beats.step = 5
            with clock("time/update"):
                dist.barrier()
                if rank == lost:
                    *_, module = policy.modules.values()
                    ends_in_forward(1 if ranks == SHARED else 2, unwrap(module.chunks[0]), by)
                policy.accumulate(shard, loss)
                dist.barrier()


def ends_in_forward(number: int, model: Any, by: int) -> None:
    forward = model.forward
    calls = []

    def lost(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            os.kill(os.getpid(), by)
            threading.Event().wait()  # if it goes on after a stop, it hangs
        return forward(*args, **kwargs)

    model.forward = lost


def place(rank: int, ranks: str = OWN) -> str:
    modules = "llm and vision" if ranks == SHARED else "vision" if rank == ENCODER else "llm"
    return f"{modules}'s update of step 5"


@pytest.mark.parametrize(("ranks", "lost"), [(OWN, 0), (OWN, ENCODER), (SHARED, 1)])
def test_a_rank_of_either_module_or_of_both_that_is_killed_ends_all(tmp_path, ranks, lost):
    """The one of both modules is killed while it encodes, the other waits for its rows."""
    world = WORLD if ranks == OWN else 2
    with fork_ranks(on_rank, world, tmp_path, ranks, lost, KILLED) as processes:
        for process in processes:
            process.join(DEADLINE)
        codes = [process.exitcode for process in processes]
        assert codes == [-KILLED if rank == lost else 1 for rank in range(world)]
        for rank in {*range(world)} - {lost}:
            text = (tmp_path / f"{rank}.txt").read_text()
            assert f"rank {lost} (" in text, text
            at = place(lost, ranks)
            here = place(rank, ranks)
            assert f"pid {processes[lost].pid}), last heard in {at}\n" in text, text
            assert f"\n  rank {rank} ended in {here}" in text, text


def test_an_encoder_that_hangs_ends_all_with_the_stacks_of_those_that_wait(tmp_path):
    """Stopped, it is named for its silence; when it goes on, it learns why all have ended."""
    with fork_ranks(on_rank, WORLD, tmp_path, OWN, ENCODER, STOPPED) as processes:
        for process in processes[:ENCODER]:
            process.join(DEADLINE)
        os.kill(processes[ENCODER].pid, signal.SIGCONT)
        processes[ENCODER].join(DEADLINE)
        assert [process.exitcode for process in processes] == [1] * WORLD
        texts = [(tmp_path / f"{rank}.txt").read_text() for rank in range(WORLD)]
    for rank, text in enumerate(texts):
        assert f"no heartbeat for 10 s from rank {ENCODER} (" in text, text
        assert f"pid {processes[ENCODER].pid}), last heard in {place(ENCODER)}\n" in text, text
        assert f"\n  rank {rank} ended in {place(rank)}" in text, text
    # rank 1 waits for rank 0: the error of its connection may come before its own exit
    for rank in (0, ENCODER):
        assert f"\n  rank {rank} ended in {place(rank)}; its stack:\n" in texts[rank], texts[rank]
    assert "module_pipe.py" in texts[0], texts[0]
    assert "in take\n" in texts[0], texts[0]
    assert "in lost\n" in texts[ENCODER], texts[ENCODER]
