"""A run of ours in Weights & Biases: rows, alerts, and a resumed run, as its offline mode writes
them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.deadline import DEADLINE
from tests.helpers.python_path import python_path
from tests.helpers.tiny import CONFIG, QUICK
from tests.wandb.records import sessions

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
PATIENT = {"WANDB__SERVICE_WAIT": "1800", "WANDB_INIT_TIMEOUT": "1800"}  # on a busy machine


def offline(*arguments: str) -> str:
    """Run a module in a process to itself, in which wandb's threads and settings stay."""
    env = {**os.environ, **PATIENT, "PYTHONPATH": python_path(ROOT), "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_wandb_sink_goes_on_in_the_same_run(tmp_path: Path):
    refused = offline("tests.wandb.records", str(tmp_path))
    first, second = sessions(tmp_path)
    identity = (tmp_path / "wandb" / "id").read_text()
    for session in (first, second):
        assert session["names"] == (identity, "sums", tmp_path.name) and session["finished"]
        assert session["config"]["model"] == {"family": "glm4"}
    assert [row["_step"] for row in first["history"]] == [0, 1, 2]
    assert [row["_step"] for row in second["history"]] == [2, 3]
    zero, *later = (row["reward"] for row in (*first["history"], *second["history"]))
    assert math.isnan(zero) and later == [0.5, 1.0, 1.0, 1.5]
    # one alert while a metric stays outside its band; a number that is none is outside
    assert [title for title, _, _ in first["alerts"]] == ["reward", "mismatch/k3"]
    assert first["alerts"][1][1].startswith("0.5 at step 1. mean(r - 1 - d)")
    assert [title for title, _, _ in second["alerts"]] == ["mismatch/k3"]
    assert "log.wandb: sums, but wandb did not start" in refused and "`wandb login`" in refused


def test_train_logs_its_plan_and_its_steps(tmp_path: Path):
    options = ("log.wandb=sums", "steps=1", "evaluate.every=0", "checkpoint.every=0")
    offline("pyrl_ext.train", str(CONFIG), f"run={tmp_path}", *QUICK, *options)
    (session,) = sessions(tmp_path)
    (row,) = session["history"]
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {name: row[name] for name in json.loads(line) if name != "step"} == {
        name: value for name, value in json.loads(line).items() if name != "step"
    }
    assert session["config"]["batching"]["prompts"] == 4 and session["finished"]
