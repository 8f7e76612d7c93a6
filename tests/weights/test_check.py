"""Weights that do not arrive: every way to break a publish is found, named, and ends the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.end_to_end import shard_at
from pyrl_ext import train
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.loss.registry import build_advantage, build_loss
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.ops.digest import digest
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.rollout import rollouts
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.rollouts import Rollouts
from pyrl_ext.trainer.policy import Policy, Scores
from pyrl_ext.trainer.step import RolloutStep
from pyrl_ext.weights import check
from tests.helpers.engines import DOWN, Disturbed, Named, Stale
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

QUICK = (
    "batching.prompts=4",
    "batching.samples_per_prompt=4",
    "rollout.max_new_tokens=6",
    "evaluate.every=0",
    "log.progress=false",
)
NORM = "model.layers.1.post_attention_layernorm.weight"


def swapped(named: Named) -> Iterator[tuple[str, Tensor]]:
    """Layers 1 and 2 in each other's place."""
    other = {"1": "2", "2": "1"}
    for name, tensor in named:
        parts = name.split(".")
        if len(parts) > 2 and parts[2] in other:
            parts[2] = other[parts[2]]
        yield ".".join(parts), tensor


def corrupted(named: Named) -> Iterator[tuple[str, Tensor]]:
    """One bit of one element."""
    for name, tensor in named:
        if name == DOWN:
            tensor = tensor.clone()
            tensor.view(torch.int32)[5, 7] ^= 1
        yield name, tensor


def lost(named: Named) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in named if name != DOWN)


def cut_off(named: Named) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        if name == DOWN:
            raise OSError("the sender is gone")
        yield name, tensor


class Parts:
    """A policy and an engine, as a run has them."""

    def __init__(self, topo: Any, *overrides: str):
        self.plan = tiny_plan(*QUICK, *overrides)
        self.policy = Policy.build(self.plan, topo)
        self.rollouts = Rollouts(self.plan, topo, build_source(self.plan))
        self.engine: Any = self.rollouts.engine
        self.version = 0

        self.names = check.engine_tensor_names(
            [name for row in self.policy.llm.table for name in row.hf_names],
            self.plan.sizes.num_hidden_layers,
        )
        self.dtype = dtype_of(self.plan.rollout_dtype)

    def sync(
        self, disturb: Callable[[Named], Named] = lambda named: named, only: Any = None
    ) -> dict[str, float]:
        self.version += 1
        return check.sync_weights(
            cast(Engine, Disturbed(self.engine, disturb)),
            self.policy.weights(only),
            self.names,
            self.version,
            dtype=self.dtype,
            check=self.plan.rollout.check_tensors,
            seed=self.plan.seed,
            only=only,
        )

    def full_check(self, engine: Any = None) -> dict[str, str]:
        stream = self.policy.weights
        return check.full_check(
            engine or self.engine, stream, self.names, self.version, dtype=self.dtype
        )

    def check_batch(
        self, shard: BatchShard, old: Scores, engine: Any = None, limit: float = check.FLOAT32_LIMIT
    ) -> None:
        agreement = {layer: share / n for layer, (share, _, n) in old.agreement.items() if n}
        check.check_batch(
            shard,
            old.logprobs,
            limit,
            lambda: self.full_check(engine),
            step=0,
            agreement=agreement,
            topo=self.policy.topo,
        )

    def move(self) -> None:
        with torch.no_grad():
            for tensor in self.policy.llm.named_parameters().values():
                tensor += 0.01 * torch.randn_like(tensor)

    def shard(self) -> tuple[BatchShard, Scores]:
        advantage = build_advantage(self.plan.objective)
        loss = build_loss(self.plan.objective)
        parts = self.policy, None, advantage, loss, self.rollouts
        step = RolloutStep(self.plan, self.policy.topo, *parts)
        shard = step.batch_of(self.rollouts.train(0), Clock())
        return shard, self.policy.scores(shard)


# Whole runs, first: each starts and leaves a topology.


def run(folder: Path, *overrides: str) -> int:
    return train.main([str(CONFIG), f"run={folder}", *QUICK, *overrides])


@pytest.mark.parametrize(
    ("disturb", "overrides", "message", "steps"),
    [
        # 16 tensors a publish: all were visited after 11
        (
            Stale(DOWN),
            "rollout.check_tensors=16",
            f"sync_weights: rank 0, .*\n  {DOWN} has digest",
            11,
        ),
        # none of them: the log-probs of the first batch tell, before any update
        (swapped, "rollout.check_tensors=0", r"rollout.max_mismatch: step 0: .*rank 0: model", 0),
    ],
    ids=["stale", "swapped"],
)
def test_train_ends_when_weights_do_not_arrive(
    disturb: Any,
    overrides: str,
    message: str,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    build = rollouts.build_engine
    monkeypatch.setattr(rollouts, "build_engine", lambda *a: Disturbed(build(*a), disturb))
    assert run(tmp_path, "steps=12", overrides) == 1
    error = capsys.readouterr().err
    assert re.search(message, error, re.DOTALL), error
    lines = tmp_path / "metrics.jsonl"
    assert len(read_rows(lines)) <= steps


# One policy and one engine for all of these.


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    torch.manual_seed(0)
    with topology.start(tiny_plan(*QUICK)) as topo:
        yield Parts(topo, "rollout.check_tensors=all")


def test_sync_weights_compares_every_tensor_of_the_engine(parts: Parts):
    names = parts.names
    sent = sum(tensor.nbytes for name, tensor in parts.policy.weights() if name in names)
    assert parts.sync() == {"publish/checked": len(names), "publish/tensor_bytes": sent}
    assert len(names) == len(set(names)) > 100
    assert set(names) == set(parts.engine.checksums(None))


def test_engine_tensor_names_leaves_mtp_layers_out():
    names = ["model.embed_tokens.weight", "model.layers.3.x", "model.layers.4.x", "lm_head.weight"]
    assert check.engine_tensor_names(names, 4) == [names[0], names[1], names[3]]
    assert check.engine_tensor_names(names, 4, drafts=True) == names


@pytest.mark.parametrize(
    ("disturb", "message"),
    [
        (
            corrupted,
            rf"1 of \d+ tensors differ .*\n  {DOWN} has digest \w{{16}}, expected \w{{16}}$",
        ),
        (
            swapped,
            r"model.layers.1.input_layernorm.* holds what was sent as model.layers.2.inp",
        ),
        (Stale(DOWN), rf"1 of \d+ tensors differ .*\n  {DOWN} has"),
        (Stale(NORM), rf"1 of \d+ tensors differ .*\n  {NORM} has"),
    ],
    ids=["corrupted", "swapped", "stale expert", "stale norm"],
)
def test_sync_weights_names_tensors_that_differ(parts: Parts, disturb: Any, message: str):
    if isinstance(disturb, Stale):
        parts.sync(disturb)  # all is well until the weights move
    parts.move()
    with pytest.raises(RuntimeError, match=message) as caught:
        parts.sync(disturb)
    assert f"rank 0, version {parts.version}" in str(caught.value)
    parts.sync()


def test_sync_weights_that_fails_leaves_an_engine_that_refuses_to_generate(parts: Parts):
    for disturb, problem in ((lost, f"{DOWN}: missing"), (cut_off, "the sender is gone")):
        parts.move()
        with pytest.raises((ValueError, OSError), match=problem):
            parts.sync(disturb)
        for call in (lambda: parts.rollouts.train(0), lambda: parts.engine.checksums(None)):
            with pytest.raises(RuntimeError, match=f"version {parts.version} failed"):
                call()
    parts.sync()
    assert parts.rollouts.train(0)


def test_sync_weights_sends_only_what_changed(parts: Parts):
    parts.sync()
    before = parts.engine.checksums(None)
    parts.move()
    row = parts.sync(only={NORM, DOWN})
    after = parts.engine.checksums(None)
    now = {n: digest(t) for n, t in parts.policy.weights()}
    sent = sum(t.nbytes for n, t in parts.policy.weights() if n in (NORM, DOWN))
    assert row == {"publish/checked": 2, "publish/tensor_bytes": sent}
    assert parts.engine.version == parts.version
    assert after == before | {name: now[name] for name in (NORM, DOWN)} != before
    parts.sync()


def test_rotating_sample_visits_every_name(parts: Parts):
    names = parts.names
    for count in (1, 16, len(names) - 1):
        turns = math.ceil(len(names) / count)
        seen = [check.rotating_sample(names, count, 3, version) for version in range(turns)]
        assert {name for some in seen for name in some} == set(names)
        assert all(len(set(some)) == count for some in seen)
    assert check.rotating_sample(names, 16, 3, 0) != check.rotating_sample(names, 16, 4, 0)
    assert (
        check.rotating_sample(names, 0, 3, 5) == []
        and check.rotating_sample(names, 9999, 3, 5) == names
    )


def test_full_check_names_a_tensor_that_changed_in_the_engine(parts: Parts):
    parts.sync()
    assert parts.full_check() == {}
    parts.engine._destinations.tensor(NORM)[3] += 1e-3
    assert list(parts.full_check()) == [NORM]
    assert parts.full_check() == {}  # it was loaded again


def test_check_batch_names_the_tensor_or_the_layer(parts: Parts):
    """The limit, the token and the tensor; if all tensors are right, the layer that goes astray."""
    parts.sync()
    parts.check_batch(*parts.shard())
    parts.engine._destinations.tensor(NORM).mul_(1.5)
    shard, old = parts.shard()
    with pytest.raises(RuntimeError, match=rf"1 tensors .*:\n  rank 0: {NORM} has") as caught:
        parts.check_batch(shard, old)
    assert "expected at most 0.0001; nothing was trained on this batch" in str(caught.value)
    mask = shard.columns["loss_mask_0"]
    at = int(((old.logprobs - shard.columns["rollout_logprobs"]).abs() * mask).argmax())
    row = int(shard.rows.tokens[at])
    seqlens = torch.from_numpy(shard.lengths.seqlens)
    sample = sum(row >= start for start in seqlens.cumsum(0).tolist())
    token = row - int(seqlens[:sample].sum()) + 1
    target = int(shard.columns["targets_0"][at])
    worst = f"sample {sample}, token {token} (id {target}): {old.logprobs[at]:.4f}"
    assert worst in str(caught.value)

    layer = parts.engine.model.model.layers[1]
    hook = layer.register_forward_hook(lambda module, given, output: output.flip(-1))
    with pytest.raises(RuntimeError, match="suspect the engine's own computation, up to layer 2: "):
        parts.check_batch(*parts.shard())
    hook.remove()
    parts.check_batch(*parts.shard())
    nan = replace(old, logprobs=torch.full_like(old.logprobs, torch.nan))
    with pytest.raises(RuntimeError, match="difference between trainer and engine is nan"):
        parts.check_batch(shard, nan)


def test_check_batch_averages_over_loss_tokens_alone(parts: Parts):
    """Rows of the prompts, which have no log-probs, must not dilute the mean."""
    batch = random_batch(9)
    batch = replace(batch, loss_mask=torch.arange(len(batch.tokens)) % 10 == 0)
    off = batch.rollout_logprobs + torch.where(batch.loss_mask, 0.2, 9.0)

    shard = shard_at(batch, range(9), RankCoords())
    common: dict[str, Any] = {"step": 3, "agreement": {}, "topo": parts.policy.topo}
    check.check_batch(shard, off, 0.21, dict, **common)
    with pytest.raises(RuntimeError, match=r"step 3: .* is 0\.2, expected at most 0\.19"):
        check.check_batch(shard, off, 0.19, dict, **common)


def test_check_batch_compares_tokens_of_this_version_alone(parts: Parts):
    """Tokens of older weights differ rightly; where all are older there is nothing to compare."""
    batch = random_batch(9)
    of_now = torch.arange(len(batch.tokens)) % 2 == 0
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask), versions=2 + of_now.int())
    off = batch.rollout_logprobs + torch.where(of_now, 0.2, 9.0)

    shard = shard_at(batch, range(9), RankCoords())
    common: dict[str, Any] = {"agreement": {}, "topo": parts.policy.topo}
    check.check_batch(shard, off, 0.21, dict, step=3, **common)
    with pytest.raises(RuntimeError, match=r"is 0\.2, expected at most 0\.19"):
        check.check_batch(shard, off, 0.19, dict, step=3, **common)
    with pytest.raises(RuntimeError, match=r"is 9, expected at most 0\.21"):
        check.check_batch(shard, off, 0.21, dict, step=2, **common)
    check.check_batch(shard, off, 0.21, dict, step=4, **common)


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ((), 1e-4),
        (("rollout.dtype=bfloat16",), 0.1),
        (("rollout.dtype=bfloat16", "rollout.engine=vllm", "rollout.quantization=fp8"), 0.2),
        (("model.dtype=bfloat16",), 0.1),
        (("model.dtype=bfloat16", "replay=off"), 0.5),
        (("rollout.top_k=5", "rollout.top_p=0.9"), 1e-4),
        (("rollout.top_k=5", "rollout.accept_truncated_sampling=true"), None),
        (
            (
                "rollout.top_k=5",
                "rollout.accept_truncated_sampling=true",
                "rollout.max_mismatch=2.0",
            ),
            2,
        ),
    ],
)
def test_mismatch_limit_follows_from_the_types(overrides: tuple[str, ...], limit: float | None):
    assert check.mismatch_limit(tiny_plan(*overrides)) == limit


def test_sync_weights_rounds_for_an_engine_of_another_type(parts: Parts):
    other = Parts(parts.policy.topo, "rollout.dtype=bfloat16", "rollout.check_tensors=all")
    assert other.sync()["publish/checked"] > 100
    with pytest.raises(RuntimeError, match="the engine holds what was sent as"):
        other.sync(swapped)


def on_two_ranks(group: Any) -> str:
    plan = tiny_plan(*QUICK, "parallel.dp=2", "rollout.check_tensors=0")
    with topology.start(plan) as topo:
        parts = Parts(topo, "parallel.dp=2", "rollout.check_tensors=0")
        disturb = corrupted if topo.rank else (lambda named: named)
        engine: Any = Disturbed(parts.engine, disturb)
        parts.engine = engine
        parts.sync()
        shard, old = parts.shard()
        parts.check_batch(shard, old)
        wrong = replace(old, logprobs=old.logprobs - 1)
        with pytest.raises(RuntimeError, match=rf"\n  rank 1: {DOWN} has") as caught:
            parts.check_batch(shard, wrong)
        return str(caught.value)


def test_check_batch_gives_every_rank_the_same_message():
    one, other = run_ranks(on_two_ranks, 2)
    assert one == other
