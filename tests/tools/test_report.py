"""The page of a run: the right numbers, bounded, escaped, and shown well in a browser."""

from __future__ import annotations

import csv
import json
import math
import re
import socket
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from markupsafe import escape
from safetensors.torch import save, save_file

from pyrl_ext.data.recordings import load_samples, save_samples
from pyrl_ext.metrics.history import columns
from pyrl_ext.metrics.sinks import JsonlSink
from pyrl_ext.tools.report.__main__ import main
from pyrl_ext.tools.report.curves import POINTS, charts, grouped, thinned
from pyrl_ext.tools.report.events import events
from pyrl_ext.tools.report.page import differences, memory_bars, report_page, time_bars
from pyrl_ext.tools.report.recorded import HEAD, TAIL, recorded, shares, visible
from pyrl_ext.tools.report.state import Folder, folders
from tests.helpers import browser
from tests.helpers.plan_pages import checked, words_of
from tests.helpers.run_pages import data_of, opened, page_of, write_history, write_recorded
from tests.helpers.samples import make_sample
from tests.helpers.tiny import QUICK, tiny_plan

pytestmark = pytest.mark.multiprocess

# Numbers -----------------------------------------------------------------------------------------


def test_thinned_keeps_short_curves_as_they_are():
    steps = np.arange(0, 3 * POINTS, 3)
    values = np.random.default_rng(0).normal(size=POINTS)
    curve = thinned(steps, values)
    assert curve["steps"] == steps.tolist() and not {"low", "high"} & curve.keys()
    assert curve["y"] == pytest.approx(values.tolist(), rel=1e-4)


def test_thinned_has_means_and_extremes_of_equal_stretches():
    steps = np.arange(1003)
    values = np.random.default_rng(1).normal(size=1003)
    values[500] = math.nan
    curve = thinned(steps, values, points=10)
    ends = [*curve["steps"][1:], 1003]
    assert [e - s for s, e in zip(curve["steps"], ends, strict=True)].count(100) >= 7
    for place, (start, end) in enumerate(zip(curve["steps"], ends, strict=True)):
        part = values[start:end][np.isfinite(values[start:end])]
        wanted = (part.mean(), part.min(), part.max())
        found = [curve[name][place] for name in ("y", "low", "high")]
        assert found == pytest.approx(wanted, rel=1e-4)
    (bad,) = curve["bad"]
    assert curve["steps"][bad] <= 500 < ends[bad]


def test_thinned_has_no_number_where_nothing_is_finite():
    curve = thinned(np.arange(2), np.array([math.nan, math.inf]))
    assert curve["y"] == [None, None] and curve["bad"] == [0, 1]


def test_page_of_a_long_run_is_no_larger_than_that_of_a_shorter_one(tmp_path: Path):
    sizes = []
    for steps in (2 * POINTS, 6 * POINTS):
        page = page_of(write_history(tmp_path / str(steps), steps, layers=20))
        data = data_of(page)
        names = ("steps", "y", "low", "high")
        found = [
            c[n] for x in data["charts"].values() for c in x["curves"] for n in names if n in c
        ]
        assert max(map(len, found)) == POINTS
        sizes.append(len(page))
    assert sizes[1] < 1.05 * sizes[0] < 1_000_000


def test_curves_are_grouped_and_families_share_a_chart(tmp_path: Path):
    paths = [write_history(tmp_path / name, 20) for name in ("a", "b")]
    found = charts([folder.columns for folder in folders([str(path) for path in paths])])
    groups = grouped([*found])
    assert sorted(n for names in groups.values() for n in names) == sorted(found)
    assert groups["age"] == ["age/share_<id>"] and groups["run"][0] == "reward"
    ages = found["age/share_<id>"]["curves"]
    assert [(c["run"], c["label"]) for c in ages] == [(0, "0"), (0, "10"), (1, "0"), (1, "10")]
    reward = found["reward"]["curves"]
    assert [(c["run"], c["held"]) for c in reward] == [(0, False), (0, True), (1, False), (1, True)]
    assert reward[1]["steps"] == [0, 10]


def test_sources_of_prompts_share_a_chart():
    steps = np.arange(3)
    names = ("source/sums/reward", "source/words/reward", "source/sums/level")
    found = charts([{name: (steps, steps * 0.1) for name in names}])
    assert grouped([*found]) == {"source": ["source/<name>/reward", "source/<name>/level"]}
    reward = found["source/<name>/reward"]
    assert [curve["label"] for curve in reward["curves"]] == ["sums", "words"]
    assert reward["family"] and reward["words"].startswith("Mean reward of the samples of a source")


def test_curves_over_decades_have_a_logarithmic_axis_but_rewards_do_not(tmp_path: Path):
    folder = Folder(write_history(tmp_path, 8))
    for step, row in enumerate(folder.run.rows):
        row["reward"] = row["loss"] = 10.0 ** (step - 7)
        row.pop("eval_reward", None)
    found = charts([columns(folder.run)])
    assert [found[name]["log"] for name in ("loss", "reward", "tokens_per_s")] == [1, 0, 0]


def test_page_shows_finite_numbers_of_metrics_that_are_not_always(tmp_path: Path):
    path = write_history(tmp_path, 4, **{"memory/peak": 2**20, "servers/used": 2})
    sink = JsonlSink(path / "metrics.jsonl")
    for step, value in enumerate((math.inf, math.nan), 4):
        names = ("memory/peak", "time/step", "time/update", "servers/used", "reward")
        row = {"step": step, "grad_norm": 1.7976931348623157e308}  # five digits of it are inf
        sink.write(row | dict.fromkeys(names, value))
    sink.close()
    folder = Folder(path)
    (held,) = memory_bars([folder])
    assert [bar.text for bar in held.bars] == ["1 MiB"]
    assert (folder.seconds, folder.last("reward")) == (4.0, 0.75)
    assert not [event for event in events(0, folder) if event.name.startswith("engine")]
    words = words_of(page_of(path))
    assert "reward 0.75" in words and "memory/peak inf" in words


# The page ----------------------------------------------------------------------------------------


def test_page_loads_nothing_and_is_well_formed(tmp_path: Path):
    page = page_of(write_history(tmp_path / "a", 30))
    elements = checked(page).elements
    assert not {tag for tag, _ in elements} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in elements)
    assert not re.search(r"https?:|@import|url\((?!#clip-)", page)


HOSTILE = "</script><script>x&y</script>\u202e<b>\u2028"


def test_page_escapes_the_name_of_a_run(tmp_path: Path):
    path = write_history(tmp_path / HOSTILE.replace("/", ":"), 3)
    page = page_of(path)
    assert page.count("<script>") == 1 and "<b>\u2028" not in page
    assert path.name in "".join(checked(page).words)


def test_page_names_runs_by_distinct_paths_and_says_what_is_missing(tmp_path: Path):
    paths = [write_history(tmp_path / name / "run", 3) for name in ("a", "b")]
    (paths[1] / "plan.json").write_text("{}")
    (paths[1] / "error.txt").write_text("Traceback\nValueError: <no> room\n")
    page = page_of(*paths)
    words = words_of(page)
    assert "a/run" in words and "b/run" in words
    assert "plan.json: No such file or directory" in words and "not a plan of this" in words
    assert "failed" in words and "ValueError: <no> room" in words


def test_differences_are_those_of_the_runs_with_a_plan(tmp_path: Path):
    paths = [write_history(tmp_path / name, 3) for name in ("a", "b", "c")]
    (paths[0] / "plan.json").write_text(tiny_plan(*QUICK, "optimizer.lr=1e-3").to_json())
    assert differences([Folder(path) for path in paths]) == []
    (paths[2] / "plan.json").write_text(tiny_plan(*QUICK, "optimizer.lr=2e-3").to_json())
    rows = differences([Folder(path) for path in paths])
    assert rows == [("optimizer.lr", ["0.001", "-", "0.002"])]


def test_main_writes_the_page_and_refuses_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_history(tmp_path / "a", 3)
    assert main([str(path), "--html"]) == 0
    assert capsys.readouterr().out == f"Written: {path / 'report.html'}\n"
    assert "<h1>" in (path / "report.html").read_text()
    assert main([str(path), "--html", str(tmp_path / "none/x.html")]) == 2
    assert "x.html: No such file or directory, expected a file" in capsys.readouterr().err
    for way in ("--html", "--csv"):
        assert main([str(tmp_path), way]) == 2
        assert "metrics.jsonl, expected a run folder" in capsys.readouterr().err


def test_main_writes_all_metrics_as_csv(tmp_path: Path):
    """Every number of every step comes back; what a step lacks is empty."""
    paths = [write_history(tmp_path / name, 12) for name in ("a", 'b, "c"')]
    rows = [json.loads(x) for x in (paths[0] / "metrics.jsonl").read_text().splitlines()]
    JsonlSink(paths[1] / "metrics.jsonl").write({"step": 12, "lr": 1e-6, "loss": math.nan})
    assert main([str(paths[0]), "--csv"]) == 0
    with (paths[0] / "report.csv").open(newline="") as file:
        one = list(csv.DictReader(file))
    assert [{n: float(v) for n, v in row.items() if v} for row in one] == rows
    assert one[1]["eval_reward"] == "" and list(one[0])[:3] == ["step", "reward", "eval_reward"]
    assert main([*map(str, paths), "--csv", str(tmp_path / "both.csv")]) == 0
    with (tmp_path / "both.csv").open(newline="") as file:
        both = list(csv.DictReader(file))
    assert [row.pop("run") for row in both] == ["a"] * 12 + ['b, "c"'] * 13
    last = both[-1]
    assert (last["step"], last["lr"], last["loss"], last["reward"]) == ("12", "1e-06", "nan", "")


def test_state_says_that_a_run_was_killed(tmp_path: Path):
    path = write_history(tmp_path / "a", 3)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (path / "lock").write_text(f"pid {process.pid} on {socket.gethostname()}\n")
        assert f"pid {process.pid}" in Folder(path).state.detail
        process.kill()
    assert Folder(path).state.word == "killed"


@pytest.mark.parametrize(
    ("checkpoint", "resume", "words"),
    [
        ("step-2/counters.json", "auto", "the same command resumes it"),
        ("step-2/common.pt", "auto", "the same command is refused, since no checkpoint is whole"),
        ("step-2/counters.json", "never", "the same command starts over (resume=never)"),
    ],
)
def test_state_says_what_the_same_command_does(
    tmp_path: Path, checkpoint: str, resume: str, words: str
):
    path = write_history(tmp_path / "a", 3)
    (path / "plan.json").write_text(tiny_plan(*QUICK, "steps=5", f"resume={resume}").to_json())
    file = path / "checkpoints" / checkpoint
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    state = Folder(path).state
    assert state.word == "stopped" and words in state.detail


# In a browser ------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(
    browser.find() is None,
    reason=f"none of {', '.join(browser.BROWSERS)} is installed: make .venv/.browser installs one",
)


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A short run, and one of 10,000 steps."""
    folder = tmp_path_factory.mktemp("histories")
    return [write_history(folder / name, steps) for name, steps in (("a", 60), ("b", 10_000))]


@needs_browser
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 500)])
def test_page_draws_its_curves_in_a_browser(
    tmp_path: Path, histories: list[Path], dark: bool, width: int
):
    from matplotlib.image import imread

    found = opened(tmp_path, *histories, dark=dark, width=width)
    assert found["wrong"] == [] and found["width"] == width
    charts = len(data_of((tmp_path / "page.html").read_text())["charts"])
    assert found["drawn"] == found["charts"] == charts + found["first"]
    # of a: a raw line and a mean; of b: extremes and a mean; held out: a line, and extremes of b's
    assert found["paths"]["reward"] == 2 * 2 + 3
    assert found["said"].startswith("step 30") and "held out" in found["said"]
    pixels = imread(tmp_path / "page.png")[..., :3]
    assert pixels.mean() < 0.25 if dark else pixels.mean() > 0.85


@needs_browser
def test_page_lets_no_other_script_run(tmp_path: Path):
    copy = tmp_path / "page.html"
    page = report_page([Folder(write_history(tmp_path / "a", 3))])
    copy.write_text(page.replace("</body>", "<script>document.title='hurt'</script></body>"))
    left = browser.look(copy, tmp_path / "page.png")
    assert "<title>a</title>" in left and "<path" in left


@needs_browser
def test_page_escapes_the_name_of_a_metric(tmp_path: Path):
    name = "it's' onclick='<b>"
    page = report_page([Folder(write_history(tmp_path / "a", 3, 4, **{name: 1.0}))])
    copy = tmp_path / "page.html"
    copy.write_text(page.replace("<details ", "<details open "))
    left = browser.look(copy, tmp_path / "page.png")
    (label,) = re.findall(r'aria-label="(it.*?) by step"', left)
    assert unescape(label) == name


# Sections ----------------------------------------------------------------------------------------


def test_phases_and_events_are_those_of_the_metrics(tmp_path: Path):
    path = write_history(tmp_path / "a", 10, **{"turns/dropped": 2.0, "servers/used": 3})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 1, "servers/used": 2, "time/update": 0.25}\n')
    for step, whole in ((5, True), (10, False)):
        checkpoint = path / f"checkpoints/step-{step}"
        checkpoint.mkdir(parents=True)
        if whole:
            (checkpoint / "counters.json").write_text("{}")
    folder = Folder(path)
    rows, _ = time_bars([folder])
    update = next(row for row in rows if row.name == "time/update")
    assert [bar.text for bar in update.bars] == ["250 ms"]
    found = [(e.step, e.name, e.detail) for e in events(0, folder)]
    assert found[:2] == [
        (10, "checkpoint", "without counters: not finished"),
        (10, "engine lost", "3 servers before, 2 now"),
    ]
    assert found[2][:2] == (9, "turns/dropped")
    assert found[2][2].startswith("20 trajectories in 10 of 10 steps.")
    assert found[3] == (5, "checkpoint", "whole")


def test_recorded_counts_routes_and_compares_log_probs(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=1)
    folder = Folder(path)
    assert folder.plan is not None
    experts = folder.plan.sizes.num_experts
    file = path / "kept/step-000000.safetensors"
    samples = load_samples(file)
    found = recorded(folder)
    assert [found.samples[row].reward for row in found.best] == [5, 4, 1, 0]
    wanted = np.zeros((len(found.layers), experts))
    for sample in samples:
        assert sample.routes is not None
        for token in sample.routes[sample.route_mask].tolist():
            for layer, chosen in enumerate(token):
                wanted[layer, chosen] += 1
    wanted *= experts / wanted[0].sum()
    assert np.array(found.load) == pytest.approx(wanted, abs=1e-3)
    page = page_of(path)
    assert page.count("<script>") == 1 and "\u202e" not in page
    best = samples[5]
    (row,) = [each for each in found.samples if each.name == "prompt 12, sample 1"]
    assert row.texts[0] == f"<script>{best.tokens[0]}&amp;</script>⟨U+202E⟩\u0634"
    places = torch.arange(1, best.tokens.numel(), dtype=torch.int32)
    scores = {
        "ids": torch.tensor([[best.prompt_id, best.index, best.turn]]),
        "samples": torch.zeros_like(places),
        "tokens": places,
        "logprobs": best.rollout_logprobs[1:] + 0.5,  # the trainer's
    }
    (path / "kept/scores").mkdir()
    scores_file = path / "kept/scores/step-000000-rank-0.safetensors"
    save_file(scores, scores_file)
    compared = recorded(folder)
    assert compared.compared and not found.compared
    first, second, *_ = [compared.samples[row] for row in compared.best]
    gaps = [gap for gap, kind in zip(first.gaps, first.kinds, strict=True) if kind == "s"]
    assert gaps == [0.5] * len(best.response) and second.gaps == []
    broken = {
        "SafetensorError": scores_file.read_bytes()[:-9],
        "IndexError": save(scores | {"samples": torch.zeros(1, dtype=torch.int32)}),
        "KeyError": save({"ids": scores["ids"]}),
        f"expected 0 to {len(places)}": save(scores | {"tokens": places + 1}),
    }
    for why, content in broken.items():
        scores_file.write_bytes(content)
        left = recorded(folder)
        assert not left.compared and left.samples == found.samples
        assert why in left.note and (str(scores_file) in left.note or why.startswith("expected"))
        assert escape(left.note.strip()) in page_of(path)


def test_recorded_leaves_out_a_file_that_cannot_be_read(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=2)
    (path / "kept/step-000001.safetensors").write_bytes(b"no")
    left = recorded(Folder(path))
    assert "step-000001.safetensors" in left.note
    assert "expected a whole file of save_samples" in left.note
    assert {(each.set, each.step) for each in left.samples} == {("training", 0), ("sums", 2)}
    for file in path.glob("kept/**/*.safetensors"):
        file.write_bytes(b"no")
    assert "expected a whole file of save_samples" in recorded(Folder(path)).missing


def test_recorded_skips_files_that_are_not_of_a_step(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=1)
    whole = recorded(Folder(path))
    file = path / "kept/step-000000.safetensors"
    for name in ("step-bad", "step-", "step-000000-copy"):
        (path / f"kept/{name}.safetensors").write_bytes(file.read_bytes())
    assert recorded(Folder(path)) == whole
    late = path / "kept/step-1234567.safetensors"
    file.rename(late)
    assert recorded(Folder(path)).step == 1234567


def test_shares_fill_the_page_with_the_newest_step_and_equal_parts_of_others():
    assert shares([6, 6, 4], 16) == [6, 6, 4]
    assert shares([6, 6, 4], 15) == [6, 4, 4]
    assert shares([600, 600, 600, 600], 1000) == [500, 166, 166, 166]
    assert shares([600, 6, 6, 6], 4) == [2, 1, 1, 0]
    assert shares([600], 10) == [5] and shares([6, 6], 0) == [0, 0]


def test_recorded_cuts_the_middle_of_a_long_sample(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=1)
    long = make_sample(7, 0, prompt_len=2 * TAIL, response_len=3 * HEAD, num_experts=8)
    save_samples(path / "kept/step-000000.safetensors", [replace(long, reward=1.0)], 0)
    shown = recorded(Folder(path)).samples[0]
    size = 2 * TAIL + 3 * HEAD
    assert shown.length == 3 * HEAD and shown.truncated == (long.finish_reason == "length")
    assert shown.kinds == "x" + "p" * TAIL + "s" * (HEAD - TAIL) + "x" + "s" * TAIL
    remarks = [text for text, kind in zip(shown.texts, shown.kinds, strict=True) if kind == "x"]
    assert remarks == [f"[{n} tokens left out]" for n in (TAIL, size - TAIL - HEAD - TAIL)]


def test_visible_shows_what_would_hide_or_turn_the_text():
    assert visible("a\n\u202e<b>é") == "a↵\n⟨U+202E⟩<b>é"


def test_page_says_how_fast_rewards_were(tmp_path: Path):
    scoring = {
        "calls_per_second": 227.0,
        "call_seconds": 0.213,
        "wait_seconds": 0.683,
        "retries": 29.0,
        "dropped": 3.0,
    }
    named = {f"scoring/{name}": value for name, value in scoring.items()}
    words = words_of(page_of(write_history(tmp_path / "a", 2, 4, **named)))
    assert (
        "the reward function took 213 ms a call, at 227 calls/s; a step waited 683 ms for "
        "rewards; 58 calls were made again, 6 responses dropped."
    ) in words
    assert "the reward function took" not in words_of(page_of(write_history(tmp_path / "b", 2)))
