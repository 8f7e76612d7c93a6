"""`pyrl trace`: ranks whose clocks differ are on one, and nothing is merged of a part of them."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext.parallel.timers import Clock
from pyrl_ext.tools.trace import main
from pyrl_ext.train.profile import profiled
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_plan

SECOND = 10**9


def write(run: Path, rank: int, clock: int, spans: dict[str, tuple[float, float]]) -> None:
    """A trace of step 3 by a rank of two whose time of day is ``clock`` [ns] ahead.

    Args:
        spans: name -> (begin, seconds) after the barrier, which was at second 100
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "python"}},
        {"name": "ac2g", "ph": "s", "id": 5, "pid": 7, "ts": 0.0},
    ]
    for name, (begin, took) in spans.items():
        place = {"pid": 7, "tid": 7, "ts": (90 + begin) * 1e6, "dur": took * 1e6}
        events.append({"ph": "X", "name": name} | place)
    known = {"step": 3, "rank": rank, "ranks": 2, "barrier": 100 * SECOND + clock}
    trace = {"pyrl": known, "baseTimeNanoseconds": 10 * SECOND + clock, "traceEvents": events}
    (run / "trace").mkdir(exist_ok=True)
    with gzip.open(run / "trace" / f"step-000003-rank-{rank:05d}.json.gz", "wt") as file:
        json.dump(trace, file)


def merged(run: Path, step: int) -> list[dict[str, Any]]:
    with gzip.open(run / "trace" / f"step-{step:06d}.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def test_trace_puts_hosts_on_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path, 0, 0, {"pyrl: update": (1.0, 2.0), "aten::mm": (1.5, 0.1)})
    write(tmp_path, 1, 3600 * SECOND, {"pyrl: update": (1.25, 0.5)})
    assert main([str(tmp_path)]) == 0
    events = merged(tmp_path, 3)
    updates = [event for event in events if event["name"] == "pyrl: update"]
    assert [event["ts"] for event in updates] == pytest.approx([1.0e6, 1.25e6])
    assert len({event["pid"] for event in events}) == 2
    assert {event["id"] for event in events if "id" in event} == {"0-5", "1-5"}
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == ["rank 0: python", "rank 1: python"]
    (row,) = [line for line in capsys.readouterr().out.splitlines() if " update " in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["update", "0.500", "1", "2.000", "0"]


def test_trace_refuses_what_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def problem(*arguments: str) -> str:
        assert main([str(tmp_path), *arguments]) == 1
        return capsys.readouterr().err

    assert "no trace of a step, expected those of every rank" in problem()
    write(tmp_path, 1, 0, {})
    assert "lacks ranks [0]" in problem()
    assert "no trace of step 2" in problem("--step", "2")
    for rank in (0, 2):
        write(tmp_path, rank, 0, {})
    assert "has files of ranks [0, 1, 2] for a step, expected those of 2 ranks" in problem()
    (tmp_path / "trace/step-000003-rank-00002.json.gz").unlink()
    file = tmp_path / "trace/step-000003-rank-00000.json.gz"
    whole = file.read_bytes()
    known = b'"pyrl": {"rank": 0, "ranks": 2, "barrier": 0}'
    texts = [
        *(b"{", b"[]", b"null", b'{"traceEvents": []}', b'{"pyrl": null}', b"{%s}" % known),
        *(b'{%s, "traceEvents": %s}' % (known, held) for held in (b"1", b"[1]", b'[{"ph": "X"}]')),
    ]
    noise = whole[:20] + bytes(range(256)) + whole[20:]
    for content in (b"no gzip", whole[:-9], noise, *map(gzip.compress, texts)):
        file.write_bytes(content)
        said = problem().strip()
        assert re.fullmatch(rf"{file}: .+, expected a trace of this package\. Remove .*", said)
    assert not (tmp_path / "trace/step-000003.json.gz").exists()


def test_trace_leaves_out_files_of_other_names(tmp_path: Path):
    for rank in (0, 1):
        write(tmp_path, rank, 0, {})
    for name in ("step-000003-rank-00000 (1).json.gz", "step-3-rank-a.json.gz"):
        (tmp_path / "trace" / name).write_bytes(b"a browser's copy")
    assert main([str(tmp_path)]) == 0
    assert len(merged(tmp_path, 3)) == 4


def on_rank(group: Any, folder: Path) -> None:
    plan, clock = tiny_plan("steps=3", "log.profile=[1]", f"run={folder}"), Clock()
    for step in range(plan.steps):
        with profiled(plan, torch.device("cpu"), step), clock("time/step"), clock("time/update"):
            torch.ones(8).sum()
            time.sleep(0.2 * group.rank())  # most often rank 1 is the longest


def test_profiled_traces_the_steps_of_the_plan_on_every_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_ranks(on_rank, 2, tmp_path)
    names = sorted(file.name for file in (tmp_path / "trace").iterdir())
    assert names == [f"step-000001-rank-0000{rank}.json.gz" for rank in (0, 1)]
    assert main([str(tmp_path), "--step", "1"]) == 0
    spans = [event for event in merged(tmp_path, 1) if event.get("ph") == "X"]
    updates = [event for event in spans if event["name"] == "pyrl: update"]
    ranks = [event["pid"] // 1000 for event in sorted(updates, key=lambda event: event["dur"])]
    assert sorted(ranks) == [0, 1]
    assert any(event["name"] == "aten::sum" for event in spans)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if " update " in line]
    assert row.split("│")[-2].strip() == str(ranks[-1])
