"""Runs with several sources of prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext import train
from pyrl_ext.metrics.rollout_metrics import SOURCE_METRICS
from pyrl_ext.metrics.sinks import read_rows
from tests.helpers import teachers
from tests.helpers.prompts import write_lines
from tests.helpers.rows import numbers
from tests.helpers.tiny import CONFIG, QUICK

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def run(folder: Path, *overrides: str) -> int:
    """Exit code of a run with two sources; odd prompts of the file are hopeless."""
    records = [{"prompt": f"{i}+1=", "answer": "never" if i % 2 else ""} for i in range(30)]
    file = write_lines(folder.parent / "lines.jsonl", *records)
    sources = (
        "data.sources={down: {task: countdown, weight: 3, task_options: {length: 3, end: ''}}, "
        f"lines: {{prompts: {file}, reward: '{__name__}:judge', columns: {{answer: answer}}}}}}"
    )
    common = ["data.task=null", "data.task_options={}", "evaluate.every=2"]
    if not any(each.startswith("data.sources=") for each in overrides):
        common.append(sources)
    return train.main([str(CONFIG), f"run={folder}", *QUICK, *common, *overrides])


def judge(prompt: Any, text: str, tokens: list[int]) -> dict[str, float]:
    """1 for an odd first token; 0 for each response to a prompt with the answer never."""
    return {"odd": 0.0 if prompt.answer == "never" else float(tokens[0] % 2)}


def test_a_resumed_run_of_two_sources_with_refills_has_the_numbers_of_a_whole_one(tmp_path: Path):
    common = ("objective.dynamic_sampling=2", "checkpoint.every=1")
    assert run(tmp_path / "whole", "steps=4", *common) == 0
    assert run(tmp_path / "parts", "steps=1", *common) == 0
    assert run(tmp_path / "parts", "steps=4", *common) == 0
    rows = numbers(tmp_path / "whole")
    assert rows == numbers(tmp_path / "parts")
    assert sum(row.get("rollout/refills", 0) for row in rows) > 0
    steps = [row for row in rows if "reward" in row]
    for row in steps:
        assert row["source/down/groups"] >= 3 and row["source/lines/groups"] >= 1
        groups = {name: row[f"source/{name}/groups"] for name in ("down", "lines")}
        rewards = sum(row[f"source/{name}/reward"] * count for name, count in groups.items())
        assert row["rollout/reward_all"] == pytest.approx(rewards / sum(groups.values()))
    evaluated = [row for row in rows if "eval_reward" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4]
    for row in evaluated:  # of eight held-out prompts six are of one source
        mean = (6 * row["eval/down/reward"] + 2 * row["eval/lines/reward"]) / 8
        assert row["eval_reward"] == pytest.approx(mean)


def test_a_resumed_run_with_levels_has_the_numbers_of_a_whole_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """A bound of 0 is reached at every step."""
    options = "levels: [{max_digits: 1}, {max_digits: 2}, {max_digits: 3}], rise_at: 0"
    task = f"task: 'reasoning_gym:chain_sum', task_options: {{max_terms: 2}}, {options}"
    sources = f"data.sources={{sums: {{{task}}}, down: {{task: countdown}}}}"
    common = (sources, "data.max_prompt_tokens=96", "checkpoint.every=1")
    assert run(tmp_path / "whole", "steps=4", *common) == 0
    assert "its level 2 of 3 begins at step 1" in capfd.readouterr().out
    assert run(tmp_path / "parts", "steps=1", *common) == 0
    assert run(tmp_path / "parts", "steps=2", *common) == 0
    capfd.readouterr()
    assert run(tmp_path / "parts", "steps=4", *common) == 0
    assert "begins at step" not in capfd.readouterr().out
    rows = numbers(tmp_path / "whole")
    assert rows == numbers(tmp_path / "parts")
    assert [row["source/sums/level"] for row in rows if "reward" in row] == [1, 2, 3, 3]


def centered(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Fails in the second step of a process that has `FAILS` set."""
    CALLS.append(len(CALLS))
    if os.environ.get(FAILS) and len(CALLS) == 2:
        raise ValueError("as it was told")
    return rewards - rewards.mean()


CALLS: list[int] = []
FAILS = "PYRL_TEST_FAILS"


def test_a_step_that_fails_after_its_rewards_leaves_no_level_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    levels = "levels: [{length: 3}, {length: 4}, {length: 5}], rise_at: 0"
    sources = f"data.sources={{copied: {{task: copy, {levels}}}, down: {{task: countdown}}}}"
    common = (sources, f"objective.advantage={__name__}:centered", "steps=3")
    assert run(tmp_path / "whole", *common) == 0
    CALLS.clear()
    monkeypatch.setenv(FAILS, "1")
    assert run(tmp_path / "failed", *common) == 1
    saved = json.loads((tmp_path / "failed/checkpoints/step-1/counters.json").read_text())
    assert saved["level_starts"] == {"copied": [1]}
    monkeypatch.delenv(FAILS)
    assert run(tmp_path / "failed", *common) == 0
    assert numbers(tmp_path / "failed") == numbers(tmp_path / "whole")


def test_a_run_logs_each_metric_of_its_sources(tmp_path: Path):
    teachers.write_dense(tmp_path / "teacher")
    taught = (f"teacher.model={tmp_path / 'teacher'}", "objective.distill_coef=0.1")
    assert run(tmp_path / "run", "steps=1", *taught) == 0
    row = read_rows(tmp_path / "run/metrics.jsonl")[0]
    for metric in SOURCE_METRICS:
        for name in ("down", "lines") if metric.name != "source/<name>/level" else ():
            assert metric.name.replace("<name>", name) in row
    assert row["reward/odd"] == row["source/lines/reward"]
    whole = 3 * row["source/down/reward"] + row["source/lines/reward"]
    assert row["reward"] == pytest.approx(whole / 4)
