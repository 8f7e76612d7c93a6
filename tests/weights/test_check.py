"""Weights that do not arrive: every way to break a publish is found, named, and ends the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext import train
from pyrl_ext.data.source import build_source
from pyrl_ext.dist import topology
from pyrl_ext.loss.registry import build_advantage
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.ops.digest import digest
from pyrl_ext.pack.batch import Batch
from pyrl_ext.train import Rollouts, schedule
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights import check
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, tiny_plan

QUICK = (
    *("batching.prompts=4", "batching.samples_per_prompt=4", "rollout.max_new_tokens=6"),
    *("evaluate.every=0", "log.progress=false"),
)
Named = Iterable[tuple[str, Tensor]]
DOWN = "model.layers.2.mlp.experts.3.down_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"


class Disturbed:
    """An engine that is handed other tensors than were sent."""

    def __init__(self, engine: Any, disturb: Callable[[Named], Named]):
        self.engine, self.disturb = engine, disturb

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def load_weights(self, named: Named, version: int, only: Any = None) -> None:
        self.engine.load_weights(self.disturb(named), version, only)


def swapped(named: Named) -> Iterator[tuple[str, Tensor]]:
    """Layers 1 and 2 in each other's place."""
    other = {"1": "2", "2": "1"}
    for name, tensor in named:
        parts = name.split(".")
        if len(parts) > 2 and parts[2] in other:
            parts[2] = other[parts[2]]
        yield ".".join(parts), tensor


class Stale:
    """One tensor stays what it was at first."""

    def __init__(self, name: str):
        self.name, self.first = name, None

    def __call__(self, named: Named) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            if name == self.name:
                if self.first is None:
                    self.first = tensor.clone()
                tensor = self.first
            yield name, tensor


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

    def publish(self, disturb: Callable[[Named], Named] = lambda named: named) -> float:
        self.version += 1
        engine: Any = Disturbed(self.engine, disturb)
        return check.publish(engine, self.policy, self.version)["publish/checked"]

    def move(self) -> None:
        with torch.no_grad():
            for tensor in self.policy._live().values():
                tensor += 0.01 * torch.randn_like(tensor)

    def batch(self) -> tuple[Batch, Any]:
        batch = Batch.of(self.rollouts.train(0), build_advantage(self.plan.objective))
        return batch, self.policy.scores(batch, schedule(self.plan, batch))


# Whole runs, first: they start and leave a topology of their own.


def run(folder: Path, *overrides: str) -> int:
    return train.main([str(CONFIG), f"run={folder}", *QUICK, *overrides])


@pytest.mark.parametrize(
    ("disturb", "overrides", "message", "steps"),
    [
        # 16 tensors a publish: all were visited after 11
        (Stale(DOWN), "rollout.check_tensors=16", f"publish: rank 0, .*\n  {DOWN} has digest", 11),
        # none of them: the log-probs of the first batch tell, before any update
        (swapped, "rollout.check_tensors=0", r"rollout.max_mismatch: step 0: .*rank 0: model", 0),
    ],
    ids=["stale", "swapped"],
)
def test_a_broken_publish_ends_the_run(
    disturb: Any,
    overrides: str,
    message: str,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    build = train.build_engine
    monkeypatch.setattr(train, "build_engine", lambda *a: Disturbed(build(*a), disturb))
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


def test_a_publish_that_arrives_is_checked_whole(parts: Parts):
    names = check.tensors(parts.policy)
    assert parts.publish() == len(names) == len(set(names)) > 100
    assert set(names) == set(parts.engine.checksums(None))


@pytest.mark.parametrize(
    ("disturb", "message"),
    [
        (
            corrupted,
            rf"1 of \d+ tensors differ .*\n  {DOWN} has digest \w{{16}}, expected \w{{16}}$",
        ),
        (swapped, r"model.layers.1.input_layernorm.* it holds what was sent as model.layers.2.inp"),
        (Stale(DOWN), rf"1 of \d+ tensors differ .*\n  {DOWN} has"),
        (Stale(NORM), rf"1 of \d+ tensors differ .*\n  {NORM} has"),
    ],
    ids=["corrupted", "swapped", "stale expert", "stale norm"],
)
def test_what_is_not_as_it_was_sent_is_named(parts: Parts, disturb: Any, message: str):
    if isinstance(disturb, Stale):
        parts.publish(disturb)  # all is well until the weights move
    parts.move()
    with pytest.raises(RuntimeError, match=message) as caught:
        parts.publish(disturb)
    assert f"rank 0, version {parts.version}" in str(caught.value)
    parts.publish()


def test_an_engine_with_half_of_an_update_refuses_to_generate(parts: Parts):
    for disturb, problem in ((lost, f"{DOWN}: missing"), (cut_off, "the sender is gone")):
        parts.move()
        with pytest.raises((ValueError, OSError), match=problem):
            parts.publish(disturb)
        for call in (lambda: parts.rollouts.train(0), lambda: parts.engine.checksums(None)):
            with pytest.raises(RuntimeError, match=f"version {parts.version} failed"):
                call()
    parts.publish()
    assert parts.rollouts.train(0)


def test_only_what_changed_is_sent(parts: Parts):
    parts.publish()
    before = parts.engine.checksums(None)
    parts.move()
    parts.version += 1
    row = check.publish(parts.engine, parts.policy, parts.version, only={NORM, DOWN})
    after, now = parts.engine.checksums(None), {n: digest(t) for n, t in parts.policy.weights()}
    assert row == {"publish/checked": 2} and parts.engine.version == parts.version
    assert after == before | {name: now[name] for name in (NORM, DOWN)} != before
    parts.publish()


def test_all_tensors_are_visited_in_turn(parts: Parts):
    names = check.tensors(parts.policy)
    for count in (1, 16, len(names) - 1):
        turns = math.ceil(len(names) / count)
        seen = [check.chosen(names, count, 3, version) for version in range(turns)]
        assert {name for some in seen for name in some} == set(names)
        assert all(len(set(some)) == count for some in seen)
    assert check.chosen(names, 16, 3, 0) != check.chosen(names, 16, 4, 0)
    assert check.chosen(names, 0, 3, 5) == [] and check.chosen(names, 9999, 3, 5) == names


def test_weights_that_change_in_the_engine_are_named_by_the_complete_check(parts: Parts):
    parts.publish()
    assert check.faults(parts.engine, parts.policy) == {}
    parts.engine._destinations.views[NORM][3] += 1e-3
    assert list(check.faults(parts.engine, parts.policy)) == [NORM]
    assert check.faults(parts.engine, parts.policy) == {}  # it was loaded again


def test_the_first_batch_shows_what_is_wrong(parts: Parts):
    """The bound, the token, and the tensor; with the right weights, the layer that goes astray."""
    group = parts.rollouts.group
    parts.publish()
    check.check_batch(parts.engine, parts.policy, *parts.batch(), group)
    parts.engine._destinations.views[NORM].mul_(1.5)
    batch, old = parts.batch()
    with pytest.raises(RuntimeError, match=rf"1 tensors .*:\n  rank 0: {NORM} has") as caught:
        check.check_batch(parts.engine, parts.policy, batch, old, group)
    assert "expected at most 0.0001; nothing was trained on them" in str(caught.value)
    gap = (old.logprobs - batch.rollout_logprobs).abs() * batch.loss_mask
    row = int(gap.argmax())
    sample = sum(row >= start for start in torch.tensor(batch.seqlens).cumsum(0).tolist())
    token = row - sum(batch.seqlens[:sample]) + 1
    worst = (
        f"sample {sample}, token {token} (id {int(batch.targets[row])}): {old.logprobs[row]:.4f}"
    )
    assert worst in str(caught.value)

    layer = parts.engine.model.model.layers[1]
    hook = layer.register_forward_hook(lambda module, given, output: output.flip(-1))
    with pytest.raises(RuntimeError, match="suspect the engine's own processing, up to layer 2: "):
        check.check_batch(parts.engine, parts.policy, *parts.batch(), group)
    hook.remove()
    check.check_batch(parts.engine, parts.policy, *parts.batch(), group)
    nan = replace(old, logprobs=torch.full_like(old.logprobs, torch.nan))
    with pytest.raises(RuntimeError, match="differ by nan"):
        check.check_batch(parts.engine, parts.policy, batch, nan, group)


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ((), 1e-4),
        (("rollout.dtype=bfloat16",), 0.1),
        (("model.dtype=bfloat16",), 0.1),
        (("model.dtype=bfloat16", "replay=off"), 0.5),
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
def test_the_bound_follows_from_the_types(overrides: tuple[str, ...], bound: float | None):
    assert check.bound(tiny_plan(*overrides)) == bound


def test_an_engine_in_another_type_is_compared_with_rounded_tensors(parts: Parts):
    other = Parts(parts.policy.topo, "rollout.dtype=bfloat16", "rollout.check_tensors=all")
    assert other.publish() > 100
    with pytest.raises(RuntimeError, match="it holds what was sent as"):
        other.publish(swapped)


def on_two_ranks(group: Any) -> str:
    plan = tiny_plan(*QUICK, "parallel.dp=2", "rollout.check_tensors=0")
    with topology.start(plan) as topo:
        parts = Parts(topo, "parallel.dp=2", "rollout.check_tensors=0")
        disturb = corrupted if topo.rank else (lambda named: named)
        engine: Any = Disturbed(parts.engine, disturb)
        check.publish(engine, parts.policy, 0)
        batch, old = parts.batch()
        check.check_batch(engine, parts.policy, batch, old, parts.rollouts.group)
        wrong = replace(old, logprobs=old.logprobs - 1)
        with pytest.raises(RuntimeError, match=rf"\n  rank 1: {DOWN} has") as caught:
            check.check_batch(engine, parts.policy, batch, wrong, parts.rollouts.group)
        return str(caught.value)


def test_ranks_say_together_whose_engine_is_wrong():
    one, other = run_ranks(on_two_ranks, 2)
    assert one == other
