"""``make gpu``: it stops at nothing, keeps what it found, and goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import FAMILIES, cases_of, with_gpu_bars
from benchmarks.gpu import eight, parts, rates
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.jobs import ROOT, Folder, Job, Result, Running
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.rows import read
from pyrl_ext.plan.forecast.compute_time import REACHED
from tests.helpers.deadline import DEADLINE

pytestmark = pytest.mark.multiprocess

NOTE = "from benchmarks.gpu.rows import note; "
PROGRAMS = {
    "good": NOTE + "note('a', ms=1.5); note('b', ms=2.0, more=3)",
    "misses": NOTE + "note('a', 'missed', 'bar of 3', ms=4.0)",
    "says so": NOTE + "note('a', 'failed', 'wrong bits')",
    "raises": NOTE + "note('before', ms=1.0); print('deep | inside'); raise ValueError('no')",
    "dies": "import os, signal; print('last words', flush=True); os.kill(os.getpid(), 9)",
    "hangs": NOTE + "note('a', ms=1.0); import time; time.sleep(600)",
}
STATES = {
    **{"good": "ok", "misses": "missed", "says so": "failed", "raises": "failed"},
    **{"dies": "failed", "hangs": "timed out", "absent": "not run"},
}


def job(name: str, limit: float = 60, **more: Any) -> Job:
    return Job("p", name, ("-c", PROGRAMS.get(name, "")), limit, **more)


def jobs() -> Iterator[Job]:
    for name in PROGRAMS:
        yield job(name, 3 if name == "hangs" else 60)
    yield job("absent", absent="no such tool")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of all jobs."""
    folder = tmp_path_factory.mktemp("gpu")
    assert main(["--into", str(folder)], {"p": Part("a part", jobs, jobs, lanes=3)}) == 1
    return folder


def test_main_stops_at_nothing(ran: Path):
    found = json.loads((ran / "report.json").read_text())
    assert {each["name"]: each["state"] for each in found["results"]} == STATES
    by_name = {each["name"]: each for each in found["results"]}
    assert by_name["good"]["rows"][1]["numbers"] == {"ms": 2.0, "more": 3}
    assert by_name["hangs"]["rows"][0]["numbers"] == {"ms": 1.0}
    assert by_name["raises"]["rows"][0]["name"] == "before"
    assert by_name["raises"]["log"][-1] == "ValueError: no"
    assert by_name["dies"]["why"] == "exit status -9" and by_name["dies"]["log"] == ["last words"]
    assert by_name["absent"]["why"] == "no such tool"
    assert found["facts"]["torch"] == torch.__version__ and found["waiting"] == []


def test_report_shows_every_job_its_numbers_and_its_log(ran: Path):
    text = (ran / "report.md").read_text()
    for name, state in STATES.items():
        assert f"| p | {name} | {state} |" in text
    assert "| good | result | ms | more |" in text and "| b | ok | 2 | 3 |" in text
    assert "| good | result | ms |\n" in text and "| a | ok | 1.5 |\n" in text
    assert "bar of 3" in text and "more than 3 s" in text and "wrong bits" in text
    logs = text.partition("## Logs of what went wrong")[2]
    assert "ValueError: no" in logs and "last words" in logs and "p, good" not in logs


def test_rates_are_of_kinds_that_the_forecast_assumes():
    at = rates.Size(torch.device("cpu"), torch.bfloat16, 64, 16)
    kinds = {work.kind for family in rates.FAMILIES for work in family(at)}
    assert kinds - {"product"} <= REACHED.keys()


def test_resume_runs_what_has_no_result(ran: Path, capsys: pytest.CaptureFixture[str]):
    known = Folder(ran)
    before = known.of("results", job("good")).stat().st_mtime_ns
    known.of("results", job("misses")).unlink()
    part = {"p": Part("a part", jobs, jobs)}
    assert main(["--into", str(ran), "--resume"], part) == 1
    shown = capsys.readouterr().out
    assert "p, misses" in shown and "p, good" not in shown
    assert known.of("results", job("good")).stat().st_mtime_ns == before


def test_minutes_start_no_job_that_may_take_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def some() -> Iterator[Job]:
        yield job("good", limit=600)

    part = {"p": Part("a part", some, some)}
    assert main(["--into", str(tmp_path), "--minutes", "1"], part) == 1
    assert "waits    p, good: may take 600 s" in capsys.readouterr().out
    assert "| p | 1 job | waits |" in (tmp_path / "report.md").read_text()
    assert main(["--into", str(tmp_path), "--resume"], part) == 0
    assert "| p | good | ok |" in (tmp_path / "report.md").read_text()


def test_match_chooses_jobs_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    part = {"p": Part("a part", jobs, jobs)}
    assert main(["--into", str(tmp_path), "--list", "--match", "oo"], part) == 0
    assert capsys.readouterr().out == "p good  (at most 60 s)\n"
    Folder(tmp_path).keep(job("misses"), Result("p", "misses", "missed"))
    done = Folder(tmp_path).keep(job("good"), Result("p", "good", "ok"))
    assert not done.bad and main(["--into", str(tmp_path), "--resume", "--match", "oo"], part) == 0
    assert main(["--into", str(tmp_path), "--resume", "--match", "misses"], part) == 1


def test_only_refuses_parts_that_are_not_there(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--only", "tests,speed"])
    assert "--only: speed, expected some of changed, step" in capsys.readouterr().err


def test_Running_ends_the_processes_that_a_job_started(tmp_path: Path):
    code = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)"
    )
    started = Job("p", "parent", ("-c", f"{code}; p.wait()"), 60)
    running = Running(started, Folder(tmp_path))
    log = Folder(tmp_path).of("logs", started)
    while not log.read_text().endswith("\n"):
        assert running.poll() is None
    running.end()
    status = Path(f"/proc/{log.read_text().strip()}/status")
    last = time.monotonic() + DEADLINE
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < last, "a process that the job started still runs"


def test_read_leaves_out_a_line_that_was_cut_off(tmp_path: Path):
    (tmp_path / "rows").write_text('{"name": "a"}\n{"name": "b", "st')
    assert read(tmp_path / "rows") == [{"name": "a"}]
    assert read(tmp_path / "none") == []


def test_parts_ask_every_test_for_a_gpu_and_every_family():
    files = {each.name for each in PARTS["tests"].jobs()}
    assert {"tests/ops/test_gather_rows.py", "tests/trainer/test_prefetch.py"} <= files
    changed = {each.name for each in PARTS["changed"].jobs()}
    assert not files & changed and {*parts.CHANGED} <= changed
    assert files | {*parts.CHANGED} == {*parts.gpu_test_files()}
    assert not any(name.startswith("tests/rollout/vllm/") for name in files)
    assert {each.name for each in PARTS["bench"].jobs()} == FAMILIES.keys() - {"layout"}
    tools = [each.name.split()[0] for each in PARTS["sanitizer"].jobs()]
    assert {*tools} == {"memcheck", "racecheck", "synccheck"}


def test_bench_has_a_bar_for_every_family():
    """A bar names a baseline of its case, or what is measured of all."""
    for family in (each.name for each in PARTS["bench"].jobs()):
        found = [with_gpu_bars(family, case) for case in cases_of(family)("meta", 256)]
        for case in found:
            assert case.at_least.keys() <= {*case.baselines, "% of floor", "2 threads"}
            assert case.at_most.keys() <= {"ms", "x written", "MB beyond the result"}
        assert any({*case.at_least} - {"2 threads"} or case.at_most for case in found), family


def test_sanitizer_checks_the_kernels_of_csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Newer and older tools name the option differently; each is asked."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '  --kernel-name arg   Filter: ...'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    parts.sanitizer.cache_clear()
    program, chosen = parts.sanitizer()
    parts.sanitizer.cache_clear()
    assert program == str(tool)
    assert chosen[0] == "--kernel-name"
    assert {"kns=gather_routes", "kns=sum_rows", "kns=expert_rows"} <= set(chosen)


def test_parts_that_missed_a_bar_come_first():
    first, second, *_ = PARTS["bench"].jobs()
    assert {first.name, second.name} == {*parts.MISSED_BARS}


@pytest.mark.parametrize("there", [0, 2, 8])
def test_eight_runs_what_fits_the_gpus_that_are_there(there: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eight, "gpus", lambda: there)
    jobs = {(job.part, job.name): job for part in eight.PARTS.values() for job in part.jobs()}
    needs = {("groups", "2 ranks"): 2, ("groups", "8 ranks"): 8, ("parity", "4 ranks"): 4}
    needs |= {("modules", "tower on two ranks, pp 2"): 4, ("steps", "glm47, 47 layers"): 8}
    for key, ranks in needs.items():
        expected = "" if there >= ranks else f"it needs {ranks} GPUs, torch sees {there}"
        assert jobs[key].absent == expected


def test_eight_compares_layouts_that_exist():
    from tests.parity import LAYOUTS, with_titles

    for job in eight.parity():
        ranks = int(job.command[job.command.index("--ranks") + 1])
        titles = job.command[job.command.index("--titles") + 1 :]
        (found,) = with_titles({ranks: LAYOUTS[ranks]}, titles).values()
        assert sorted(layout.title for layout in found) == sorted(titles)


def test_eight_plans_fit_the_ranks_of_their_runs(tmp_path: Path):
    rows = tmp_path / "rows"
    env = os.environ | {"PYRL_GPU_ROWS": str(rows)}
    jobs = [job for name in ("modules", "vllm", "steps", "te") for job in eight.PARTS[name].jobs()]
    planned = list(eight.plans(iter(jobs)))
    assert len(planned) == len(jobs) > 8
    for job in planned:
        run = subprocess.run(
            [sys.executable, *job.command], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert run.returncode == 0, (job.name, run.stderr[-500:])
        assert "planned_GiB" in rows.read_text()
        rows.unlink()


def test_short_run_needs_all_of_its_steps(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.gpu.short_run", "--ranks", "1"]
    config = "configs/tiny_qwen3.yaml"
    more = ["steps=2", "rollout.max_new_tokens=2", "evaluate.every=0"]
    for overrides, state in ((more, "ok"), ([*more, "rollout.max_mismatch=1e-30"], "failed")):
        rows = tmp_path / state
        subprocess.run(
            [*command, config, *overrides],
            cwd=ROOT,
            env=os.environ | {"PYRL_GPU_ROWS": str(rows)},
            capture_output=True,
        )
        found = {row["name"]: row for row in read(rows)}
        assert found["run"]["state"] == state
        assert ("time/update" in found) == (state == "ok")


GPU_TESTS = """
import pytest
gpu = pytest.mark.skipif({there}, reason="no GPU")

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_both(device):
    assert device == "cuda"

@gpu
def test_wrong():
    assert 1 == 2, "bits differ"

@pytest.mark.skipif(False, reason="torch sees a GPU")
def test_without():
    raise AssertionError

def test_plain():
    raise AssertionError
"""


@pytest.mark.parametrize("there", [True, False])
def test_only_gpu_runs_the_tests_that_a_gpu_is_needed_for(tmp_path: Path, there: bool):
    (tmp_path / "test_it.py").write_text(GPU_TESTS.format(there=not there))
    rows = tmp_path / "rows"
    run = subprocess.run(
        [sys.executable, *parts.pytest(), str(tmp_path / "test_it.py")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYRL_GPU_ROWS": str(rows), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    found = {row["name"].split("::")[-1]: row for row in read(rows)}
    if not there:
        assert run.returncode == 0, run.stdout
        assert found["tests"]["numbers"] == {"skipped": 2}
        return
    assert run.returncode == 1, run.stdout
    assert found["tests"]["numbers"] == {"passed": 1, "failed": 1}
    assert "bits differ" in found["test_wrong"]["why"]
