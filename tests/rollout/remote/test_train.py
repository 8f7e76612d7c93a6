"""Runs over servers of the embedded engine: equal to the colocated engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext import train
from pyrl_ext.rollout.build import build_in_this_process
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.identity import identity_of
from tests.helpers.certificates import Authority, Pair
from tests.helpers.guarded import key_folder
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import rows_of
from tests.helpers.server_processes import ServerProcess, server_processes
from tests.helpers.server_runs import COMMON, assert_same, over, run
from tests.helpers.servers import free_port, running
from tests.helpers.tiny import CONFIG, QUICK, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.multiprocess]

RANK = "lora.rank=8"
ALPHA = "lora.alpha=16"
STATES = "model.family=qwen3_next", "model.config=tiny_qwen3_next/config.json"


def on_rank(_group: Any, folder: Path, *overrides: str) -> None:
    assert run(folder, *overrides)[0] == 0


def test_train_over_servers_equals_the_engine_beside_the_trainer(tmp_path: Path):
    assert run(tmp_path / "beside")[0] == 0
    with server_processes(tmp_path, 2, COMMON) as servers:
        assert run(tmp_path / "apart", over(servers))[0] == 0
        two = "parallel.dp=2", "rollout.senders=2", over(servers)
        run_ranks(on_rank, 2, tmp_path / "two", *two)
        assert run(tmp_path / "merged", RANK, ALPHA, "lora.publish=merge", over(servers))[0] == 0
    assert_same(tmp_path / "apart", tmp_path / "beside")
    assert_same(tmp_path / "two", tmp_path / "beside")
    for name in ("apart", "two", "merged"):
        assert_proved(tmp_path / name, 2)


def test_train_over_a_server_that_applies_adapters_and_refuses_another_scale(tmp_path: Path):
    with server_processes(tmp_path, 1, [*COMMON, RANK, ALPHA]) as servers:
        code, said = run(tmp_path / "other", RANK, "lora.alpha=32", over(servers))
        assert code == 1 and "its alpha is '16.0', expected '32.0', the trainer's" in said
        assert run(tmp_path / "adapter", RANK, ALPHA, over(servers))[0] == 0
    assert_proved(tmp_path / "adapter", 1)
    first, *_, last, _ = rows_of(tmp_path / "adapter")  # the last row is of an evaluation
    assert last["publish/tensor_bytes"] == first["publish/tensor_bytes"]  # it may be a new server


def test_train_over_a_server_with_states_equals_the_engine_beside_the_trainer(tmp_path: Path):
    """It keeps no states of finished requests, so the canary does not come through a cache."""
    assert run(tmp_path / "beside", *STATES)[0] == 0
    plan = tiny_plan(*COMMON, *STATES)
    engine = build_in_this_process(plan, torch.device("cpu"))
    assert isinstance(engine, HFEngine)
    with running(engine, plan.longest + 50) as one:
        one.server.identity = identity_of(plan)
        code, said = run(tmp_path / "apart", *STATES, f"rollout.servers={[one.url]}")
    assert code == 0, said
    assert_same(tmp_path / "apart", tmp_path / "beside")
    assert_proved(tmp_path / "apart", 1)


def test_train_over_tls_equals_the_colocated_engine(tmp_path: Path):
    """With keys, by an engine that knows its address. One with another certificate is refused."""
    assert run(tmp_path / "colocated")[0] == 0
    authority = Authority(tmp_path / "ca")
    (tmp_path / "keys").mkdir()
    keys = f"rollout.keys={key_folder(tmp_path / 'keys')}"

    def options(pair: Pair, address: str) -> list[str]:
        return [f"rollout.servers=[{address}]", keys, *authority.options(pair)]

    right = authority.sign("right", "IP:127.0.0.1")
    wrong = authority.sign("wrong", "IP:127.0.0.2")
    for name, pair in (("remote", right), ("refused", wrong)):
        port = free_port()
        given = options(pair, f"https://127.0.0.1:{port}")
        with ServerProcess(tmp_path / f"{name}.log", [*COMMON, *given], port) as server:
            assert server.address == f"https://127.0.0.1:{port}"
            code, said = run(tmp_path / name, *given, "rollout.publish_timeout=20")
        if name == "remote":
            assert code == 0, said
        else:
            assert code == 1 and "certificate is not valid for '127.0.0.1'" in said
    assert_same(tmp_path / "remote", tmp_path / "colocated")
    assert_proved(tmp_path / "remote", 1)


def assert_proved(folder: Path, servers: int) -> None:
    """All servers generated, every step's weights were theirs and every prompt is accounted for."""
    for row in rows_of(folder)[:-1]:
        assert row["servers/used"] == servers and row["servers/resent"] == 0
        assert row["mismatch/max"] < 1e-5 and row["publish/checked"] > 0
        ends = ("returned", "aborted", "failed", "in_flight")
        assert row["servers/prompts_asked"] == sum(row[f"servers/prompts_{end}"] for end in ends)


SAME = ("reward", "loss", "grad_norm", "policy/", "mismatch/", "age/", "route/coverage")


def test_train_generates_turns_ahead(tmp_path: Path):
    """A run that plays the recorded turns has the same numbers, to the last bit."""

    def turns(name: str, config: str, *more: str) -> list[dict[str, Any]]:
        folder = tmp_path / name
        asked = [*QUICK[:2], "log.progress=false", "evaluate.every=0", "steps=4", "rollout.ahead=2"]
        assert train.main([str(CONFIG.parent / config), f"run={folder}", *asked, *more]) == 0
        return rows_of(folder)

    forms = {
        "whole": ("tiny_turns.yaml",),
        "apart": ("tiny_turns.yaml", "turns.form=stepwise", "turns.merge=false"),
        "agents": ("examples/agent.yaml", "turns.timeout=120"),
        "taskset": ("examples/verifiers.yaml", "turns.timeout=120"),
    }
    with server_processes(tmp_path, 2, COMMON) as servers:
        found = {
            name: turns(name, *form, over(servers), "rollout.record=rollouts")
            for name, form in forms.items()
        }
    for name, live in found.items():
        assert all(row["turns/dropped"] == 0 and row["turns/mean"] > 1 for row in live)
        assert live[0]["age/max"] == 0 and live[0]["mismatch/max"] < 1e-5
        assert 1 <= max(row["age/max"] for row in live) <= 2
        recorded = ("rollout.engine=recorded", f"rollout.path={tmp_path / name}/rollouts")
        for row, other in zip(live, turns(f"{name}-played", *forms[name], *recorded), strict=True):
            names = {name for name in row if name.startswith(SAME)}
            assert {n: row[n] for n in names} == {n: other[n] for n in names}
