"""Offloaded memory comes back with its contents, and nothing runs without it."""

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.parallel import offload, topology
from pyrl_ext.parallel.heartbeat import heartbeats
from pyrl_ext.parallel.offload import LEAST, MOST, HostMemory, OffloadedStorage, piece_sizes
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.samples import Prompt, Sampling
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.train.loop import train
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.deadline import DEADLINE
from tests.helpers.pictures import ASKED, write_run
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import MEASURED
from tests.helpers.tiny import CONFIG, random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BF16 = "model.dtype=bfloat16"
DISTRIBUTED = "optimizer.distributed=true"
LAYOUTS = {
    1: {"fp32": (), "bf16": (BF16,)},
    2: {
        "distributed": ("parallel.dp=2", DISTRIBUTED),
        "bf16 distributed ep2": ("parallel.dp=2", "parallel.ep=2", BF16, DISTRIBUTED),
        "pp2 vpp2": ("parallel.pp=2", "parallel.vpp=2"),
    },
}
PARTS = ("optimizer", "gradients", "weights")


def test_onload_restores_views_and_shared_storages():
    base = torch.arange(24.0).view(4, 6)
    views = (base[1], base.T[2:])
    other = torch.tensor([3, 1], dtype=torch.uint8)
    before = [t.clone() for t in (base, *views, other)]
    offloaded = OffloadedStorage()
    assert offloaded.offload([*views, base, other]) == 24 * 4 + 2 and offloaded
    assert [t.untyped_storage().nbytes() for t in (base, *views, other)] == [0] * 4
    assert offloaded.offload([base]) == 0  # offloaded already
    assert offloaded.onload() == 24 * 4 + 2 and not offloaded
    assert all(map(torch.equal, (base, *views, other), before))
    views[0].fill_(7)
    assert (base[1] == 7).all()


def test_piece_sizes_are_powers_of_two_that_torch_does_not_round_up():
    for size in (0, 1, LEAST - 1, LEAST, 3 * LEAST + 5, MOST, 33 * 2**30, 33 * 2**30 + 12_345_678):
        sizes = piece_sizes(size)
        assert sum(sizes) == size and all(0 < each <= MOST for each in sizes)
        assert len(sizes) <= size // MOST + MOST.bit_length() - LEAST.bit_length() + 1
        pinned = sum(1 << (each - 1).bit_length() for each in sizes)  # as torch allocates them
        assert pinned < size + LEAST


def test_onload_restores_storages_that_share_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "MOST", 64)
    monkeypatch.setattr(offload, "LEAST", 8)
    tensors = [torch.randn(n) for n in (3, 0, 100, 1, 15)]
    dropped = torch.ones(5)
    before = [t.clone() for t in tensors]
    away = OffloadedStorage()
    assert away.offload(tensors[:3]) + away.offload(tensors[3:]) == 4 * 119
    assert away.offload([dropped], keep=False) == 20
    assert [t.untyped_storage().nbytes() for t in (*tensors, dropped)] == [0] * 6
    assert away.onload() == 4 * 124 and not away
    assert all(map(torch.equal, tensors, before)) and not dropped.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_offload_on_a_gpu_pins_no_more_than_it_moves():
    tensor = torch.arange(LEAST // 4 * 33 + 3, device="cuda", dtype=torch.int32)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    away = OffloadedStorage()
    assert away.offload([tensor]) == tensor.nbytes
    held = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert held <= tensor.nbytes + LEAST
    away.onload()
    assert torch.equal(tensor.cpu(), torch.arange(len(tensor), dtype=torch.int32))


def piece_of(size: int) -> torch.Tensor:
    """In place of pinned memory, which a CPU alone has not."""
    return torch.empty(size, dtype=torch.uint8)


def test_host_memory_is_pinned_once_in_the_background_and_kept():
    asked = list[int]()
    said = list[str]()

    def allocate(size: int) -> torch.Tensor:
        asked.append(size)
        return piece_of(size)

    memory = HostMemory("optimizer", allocate, said.append)
    memory.start(3 * LEAST + 5, torch.device("cpu"))
    first = memory.pieces(2 * LEAST)
    assert asked == [2 * LEAST, LEAST, 5]
    assert all(one is two for one, two in zip(memory.pieces(3 * LEAST + 5), first, strict=True))
    (line,) = said
    line = re.sub(r"\d+\.\d s", "0.1 s", line)
    end = "for the optimizer in 0.1 s, in the background"
    assert line == f"offload: pinned 0.00 GiB of host memory {end}"
    assert sum(map(len, memory.pieces(4 * LEAST))) == sum(asked) == 4 * LEAST  # what is missing
    assert len(said) == 2


ENDS_WHILE_PINNING = """
import sys, torch
from pyrl_ext.parallel.offload import HostMemory, MOST
kept = torch.empty(1 << 26, dtype=torch.uint8)
memory = HostMemory("weights", lambda size: kept.fill_(1))  # without the GIL, as when it pins
memory.start(10_000 * MOST, torch.device("cpu"))
sys.exit(3)
"""


def test_a_process_ends_with_its_exit_code_while_memory_is_pinned():
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_PINNING], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_offload_says_that_it_waits_for_host_memory():
    goes_on = threading.Event()
    said = list[str]()

    def allocate(size: int) -> torch.Tensor:
        assert goes_on.wait(DEADLINE)
        return piece_of(size)

    def say(line: str) -> None:
        said.append(line)
        goes_on.set()  # the thread may not finish before the wait was said

    memory = HostMemory("weights", allocate, say, patience=0)
    memory.start(LEAST, torch.device("cpu"))
    assert sum(map(len, memory.pieces(LEAST))) == LEAST
    assert said[0] == (
        "offload: waits until host memory for the weights is pinned, 0.0 of 0.0 GiB so far"
    )
    assert len(said) == 2


@pytest.mark.parametrize("background", [True, False])
def test_offload_fails_where_host_memory_cannot_be_pinned(background: bool):
    """With the thread's error, before anything is freed, and in every later call."""

    def allocate(size: int) -> torch.Tensor:
        if size < LEAST:
            raise RuntimeError("CUDA error: out of memory")
        return piece_of(size)

    memory = HostMemory("optimizer", allocate)
    if background:
        memory.start(LEAST + 9, torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"memory for the optimizer: 0.00 of 0.00 GiB .*out"):
            memory.pieces(LEAST + 9)


def test_onload_fills_with_zeros_what_was_not_kept():
    tensor = torch.ones(5)
    offloaded = OffloadedStorage()
    offloaded.offload([tensor], keep=False)
    offloaded.onload()
    assert tensor.tolist() == [0] * 5


def updates(overrides: tuple[str, ...], away: bool) -> tuple[Any, dict[str, int]]:
    """(metrics and weights after three updates, bytes that were offloaded), with everything
    offloaded and onloaded before each."""
    plan = tiny_plan(*overrides)
    batch = random_batch()
    freed = {}
    with passes.built(plan) as policy:
        tokens = plan.batching.tokens_per_microbatch
        schedule = plan_microbatches(batch.seqlens, policy.topo.dp_size, tokens, plan.row_alignment)
        found: list[Any] = []
        for _ in range(3):
            if away:
                freed = {part: policy.offload(part) for part in PARTS}
                refuses(policy, batch, schedule)
                assert policy.onload() == sum(freed.values())
            old = passes.scores(policy, batch, schedule).logprobs
            ready = replace(batch, old_logprobs=old)
            found.append(passes.update(policy, ready, schedule, build_loss(plan.objective)))
        found += [(name, tensor.clone()) for name, tensor in policy.weights()]
        sizes = {"weights": sum(t.nbytes for t in policy.llm.named_parameters().values())}
        numbers = sum(p.numel() for chunk in policy.llm.chunks for p in chunk.parameters())
        return found, {
            "gradients": 4 * numbers,
            **sizes,
            **{f"freed {k}": v for k, v in freed.items()},
        }


def refuses(policy: Policy, batch: Any, schedule: Any) -> None:
    for call in (
        lambda: passes.scores(policy, batch, schedule),
        lambda: list(policy.weights()),
        lambda: passes.accumulate(policy, batch, schedule, build_loss(policy.plan.objective)),
        policy.step_optimizer,
    ):
        with pytest.raises(RuntimeError, match="are offloaded, expected them on the device"):
            call()


def on_ranks(group: Any) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = str(group.size())
    layouts = LAYOUTS[group.size()]
    return {name: [updates(layouts[name], away) for away in (False, True)] for name in layouts}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_policy_trains_the_same_after_offload_and_onload(ranks: int):
    for found in run_ranks(on_ranks, ranks):
        for name, ((whole, _), (again, sizes)) in found.items():
            assert whole[:3] == again[:3], name
            for (key, a), (_, b) in zip(whole[3:], again[3:], strict=True):
                assert torch.equal(a, b), (name, key)
            assert sizes["freed weights"] >= sizes["weights"]  # buffers are padded
            assert sizes["freed gradients"] >= sizes["gradients"]
            bytes_each = 12 if "bf16" in name else 8  # moments, and the weights in fp32
            share = 2 if "distributed" in name else 1
            if "ep2" not in name:
                expected = sizes["gradients"] / 4 * bytes_each / share
                assert sizes["freed optimizer"] == pytest.approx(expected, rel=0.02)


def test_train_is_the_same_with_an_offloaded_trainer(tmp_path: Path):
    short = ("steps=2", "batching.prompts=4", "rollout.max_new_tokens=6", "log.progress=false")
    rows = {}
    for moves in ("none", "all"):
        run = tmp_path / moves
        plan = tiny_plan(*short, f"run={run}", "evaluate.prompts=4")
        # a rule refuses it on a CPU, since it is of use on a GPU only
        rollout = plan.rollout.model_copy(update={"offload_trainer": moves})
        plan: Plan = plan.model_copy(update={"rollout": rollout})
        with topology.start(plan) as topo, heartbeats(topo) as heartbeat:
            assert train(plan, topo, heartbeat)
        rows[moves] = read_rows(run / "metrics.jsonl")
    for stayed, moved in zip(rows["none"], rows["all"], strict=True):
        times = {name for name in moved if name.startswith(MEASURED)}
        assert {n: v for n, v in moved.items() if n not in {*times, "memory/offloaded"}} == {
            n: v for n, v in stayed.items() if n not in times
        }
    weights = 4 * 303_400
    assert rows["all"][0]["memory/offloaded"] > 2 * weights  # no moments yet
    assert rows["all"][1]["memory/offloaded"] > 4 * weights
    assert {"time/offload", "time/onload"} < rows["all"][0].keys()


def run_of(path: Path, moves: str, *overrides: str) -> bool:
    """`train` on pictures; moves: ``rollout.offload_trainer``."""
    plan = compile_plan(path, [*overrides, "modules.vision.ranks=shared", "evaluate.every=0"])
    rollout = plan.rollout.model_copy(update={"offload_trainer": moves})
    plan = plan.model_copy(update={"rollout": rollout})
    with topology.start(plan) as topo, heartbeats(topo) as heartbeat:
        return train(plan, topo, heartbeat)


def test_train_with_a_frozen_encoder_is_the_same_offloaded_and_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An encoder without gradients and optimizer on the rank of the language model."""
    monkeypatch.setenv(ASKED, str(tmp_path / "asked"))
    path = write_run(tmp_path)
    frozen = "modules.vision.train=false"
    assert run_of(path, "none", frozen, f"run={tmp_path}/whole")
    parted = f"run={tmp_path}/parted", "data.reward=tests.helpers.pictures:even_after_ctrl_c"
    assert not run_of(path, "all", frozen, *parted)
    assert [p.name for p in (tmp_path / "parted/checkpoints").iterdir()] == ["step-1"]
    assert run_of(path, "all", frozen, *parted)
    whole, again = (read_rows(tmp_path / run / "metrics.jsonl") for run in ("whole", "parted"))
    assert [row["step"] for row in again] == [0, 1]
    for one, two in zip(whole, again, strict=True):
        assert two["memory/offloaded"] > 0 and one["grad_norm"] > 0
        for name in ("reward", "loss", "grad_norm", "policy/entropy", "policy/ref_kl"):
            assert two[name] == one[name], (name, one["step"])


def test_sleep_leaves_an_engine_that_wants_weights():
    torch.manual_seed(0)
    engine = HFEngine(CONFIG.parent / "tiny")
    named = [(n, 0.1 * torch.randn(v.shape)) for n, (v,) in engine._destinations.parts.items()]
    prompts = [Prompt(0, (5, 6, 7))]
    sampling = Sampling(max_new_tokens=5, samples_per_prompt=3)
    engine.load_weights(named, version=0)
    before = engine.generate(prompts, sampling)
    assert engine.sleep() >= sum(v.nbytes for _, v in named)
    with pytest.raises(RuntimeError, match="sleep freed its weights"):
        engine.generate(prompts, sampling)
    engine.load_weights(named, version=1)
    again = engine.generate(prompts, sampling)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(before, again, strict=True))
