"""The report of one run, and of several side by side."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from pyrl_ext.metrics import report
from pyrl_ext.metrics.history import RunHistory, load_run
from pyrl_ext.metrics.plot import _running_mean
from pyrl_ext.metrics.sinks import JsonlSink
from pyrl_ext.tools.report.__main__ import main


def write_run(folder, steps: int, factor: float = 1.0, **more: float):
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(steps):
        row = {"step": step, "reward": step / steps, "mismatch/k3": 1e-3 * factor}
        row |= {"mismatch/abs_mean": 0.02 * factor, "time/rollout": 0.5, "time/update": 0.25}
        row |= {"time/publish": 0.1, "time/step": 1.0, "route/agree_topk/layer_1": 0.9}
        row |= {"route/agree_topk/layer_5": 0.8, "route/agree_topk": 0.85}
        if step % 4 == 0:
            row["eval_reward"] = step / steps / 2
        sink.write(row | more)
    sink.close()


def test_summary_takes_means_and_extremes(tmp_path):
    write_run(tmp_path / "a", 10)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "eval_reward": 0.45, "mismatch/abs_mean": 0.09}\n')
    run = load_run(tmp_path / "a")
    figures = report.summary(run)
    assert figures["steps"] == 10
    assert [figures[f"reward {k}"] for k in ("first", "last", "best")] == [0.0, 0.9, 0.9]
    assert (figures["eval reward start"], figures["eval reward end"]) == (0.0, 0.45)
    assert figures["mismatch/abs_mean"] == pytest.approx((10 * 0.02 + 0.09) / 11)
    assert figures[report.WORST_LAYER] == pytest.approx(0.8)
    assert figures[report.WORST_STEP] == pytest.approx(0.09)
    seconds = report.phase_seconds(run)
    wanted = {"time/rollout": 5.0, "time/update": 2.5, "time/publish": 1.0, "other": 1.5}
    assert seconds == {name: pytest.approx(value) for name, value in wanted.items()}


def test_summary_of_a_run_without_rollouts_is_about_the_loss(tmp_path):
    rows = [{"step": n, "loss": 4.0 - n % 3, "grad_norm": 1.0, "time/data": 0.5} for n in range(9)]
    rows[4]["eval_loss"] = 3.5
    rows.append({"step": 9, "eval_loss": 2.5})
    run = RunHistory("a", rows)
    figures = report.summary(run)
    assert figures["steps"] == 9 and "reward first" not in figures
    assert [figures[f"loss {k}"] for k in ("first", "last", "best")] == [4.0, 2.0, 2.0]
    assert (figures["eval loss start"], figures["eval loss end"]) == (3.5, 2.5)
    assert report.phase_seconds(run)["time/data"] == 4.5


def test_phase_seconds_counts_checkpoints_beside_the_steps(tmp_path):
    write_run(tmp_path / "a", 10, **{"time/checkpoint": 0.5})
    seconds = report.phase_seconds(load_run(tmp_path / "a"))
    assert seconds["time/checkpoint"] == pytest.approx(5.0)
    assert seconds["other"] == pytest.approx(1.5)


def shown(folders, tmp_path, capsys) -> list[str]:
    assert main([*map(str, folders), "--png", str(tmp_path / "out.png")]) == 0
    return capsys.readouterr().out.splitlines()


def row_of(lines: list[str], name: str) -> str:
    return " ".join(next(x for x in lines if f" {name} " in x).replace("│", " ").split())


def test_report_shows_one_run(tmp_path, capsys):
    write_run(tmp_path / "a", 10)
    lines = shown([tmp_path / "a"], tmp_path, capsys)
    assert row_of(lines, "mismatch/abs_mean") == "mismatch/abs_mean 0.02 nat"
    assert not any("mismatch/k3" in line for line in lines)
    assert row_of(lines, "time/rollout") == "time/rollout model 5.00 s 50.0%"
    assert row_of(lines, "ours together") == "ours together ours 2.50 s 25.0%"
    assert row_of(lines, "all") == "all 10.00 s 100.0%"


def test_report_lists_the_worst_problems_with_their_counts_under_the_last_table(tmp_path, capsys):
    sink = JsonlSink(tmp_path / "a/metrics.jsonl")
    for step in range(10):
        row = {"step": step, "reward": 0.5, "time/step": 1.0, "rollout/truncated": 0.5}
        row |= {"rollout/flat_groups": 1.0 if step < 8 else 0.5, "route/coverage": 1.0}
        row |= {"mismatch/k3": 0.05 if step in (3, 5) else 0.0, "mismatch/f2": 0.2 * (step == 3)}
        sink.write(row)
    sink.close()
    lines = shown([tmp_path / "a"], tmp_path, capsys)
    place = lines.index("Alarms")
    assert lines[place - 1].startswith("└")
    assert lines[place + 1 : -1] == [
        "! 100 % flat groups: rollout/flat_groups 1 (alarm above 0.99) at step 0; outside in 8 of "
        "10 steps, 0 to 7",
        "! trainer and engine disagree: mismatch/k3 0.05 (alarm above 0.02) at step 3; outside in "
        "2 of 10 steps, 3 to 5",
        "~ 50 % truncated: rollout/truncated 0.5 (warn above 0.3) at step 0; outside in 10 of 10 "
        "steps, 0 to 9",
    ]


def test_report_says_how_many_problems_it_leaves_out_and_where_there_are_none():
    kinds = ("rollout/truncated", "rollout/flat_groups", "policy/clip_fraction")
    kinds += ("policy/guarded_fraction", "policy/skipped_updates", "mismatch/chi2")
    rows = [{"step": 0, "reward": 1.0} | dict.fromkeys(kinds, 1.5)]
    lines = str(report.alarm_lines(RunHistory("a", rows))).splitlines()
    assert len(lines) == 6 and all(line.startswith("! ") for line in lines[:5])
    assert lines[5] == "and 1 more: pyrl report RUN --html shows all"
    healthy = RunHistory("a", [{"step": 0, "reward": 1.0}])
    assert str(report.alarm_lines(healthy)).startswith("none: every metric was finite and inside")


def test_report_compares_runs_by_ratio(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    write_run(tmp_path / "on", 10)
    write_run(tmp_path / "off", 10, factor=8.0)
    lines = shown([tmp_path / "on", tmp_path / "off"], tmp_path, capsys)
    assert row_of(lines, "mismatch/abs_mean") == "mismatch/abs_mean 0.02 nat 0.16 nat ! 8x"
    assert row_of(lines, "time/update") == "time/update model 2.50 s 25.0% 2.50 s 25.0% 1x"


def test_report_shows_names_as_they_are_and_tells_equal_ones_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    names = ("A/tiny", "B/x/tiny", "C/x/tiny", "exp[seed=1]", "[bold]:x: $\\frac$")
    for name in names:
        write_run(tmp_path / name, 2)
    lines = shown([tmp_path / name for name in names], tmp_path, capsys)
    heads = [cell.strip() for cell in next(x for x in lines if "figure" in x).split("┃")]
    assert [head for head in heads if head not in ("", "figure", "ratio")] == list(names)
    (tmp_path / "[/x]").mkdir(parents=True)
    picture = tmp_path / "[/x]/[red].png"
    assert main([str(tmp_path / names[0]), "--png", str(picture)]) == 0
    assert capsys.readouterr().out.endswith(f"Curves: {picture}\n") and picture.exists()


def test_report_refuses_a_picture_before_it_prints(tmp_path, capsys):
    write_run(tmp_path / "a", 2)
    for name in ("a", "pic", "pic.pdf", "none/pic.png", "d.png"):
        (tmp_path / "d.png").mkdir(exist_ok=True)
        assert main([str(tmp_path / "a"), "--png", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and f"--png {tmp_path / name}: not the name of a picture, expected" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d.png"]


@pytest.mark.parametrize("option", ["--html", "--csv"])
def test_report_says_that_runs_go_before_an_option(tmp_path, capsys, option):
    write_run(tmp_path / "a", 2)
    with pytest.raises(SystemExit, match="2"):
        main([option, str(tmp_path / "a")])
    assert "no RUN, expected a run folder before --html or" in capsys.readouterr().err
    assert main([option, str(tmp_path / "a"), str(tmp_path / "a")]) == 2
    assert f"name the runs before {option}" in capsys.readouterr().err


def test_report_shows_numbers_that_are_not_finite(tmp_path, capsys):
    write_run(tmp_path / "a", 10, factor=math.nan)
    lines = shown([tmp_path / "a"], tmp_path, capsys)
    assert row_of(lines, "mismatch/abs_mean") == "mismatch/abs_mean nan nat !"
    place = lines.index("Alarms")
    assert lines[place + 1].startswith("! not finite: mismatch/abs_mean nan at step 0; outside in")
    assert lines[place + 2].startswith("~ routers agree on 85 % of experts: route/agree_topk 0.85 ")
    assert lines[place + 3].startswith("Curves: ")
    assert row_of(lines, "steps with NaN or infinity") == "steps with NaN or infinity 10"


@pytest.mark.parametrize("case", ["one", "three", "not finite", "one step", "no mismatch", "loss"])
def test_plot_draws_the_picture(tmp_path, case):
    from matplotlib.image import imread

    steps = 1 if case == "one step" else 200
    factors = [1.0, 3.0, 9.0] if case == "three" else [math.nan if case == "not finite" else 1.0]
    for place, factor in enumerate(factors):
        write_run(tmp_path / str(place), steps, factor)
    runs = [load_run(tmp_path / str(place)) for place in range(len(factors))]
    if case == "no mismatch":
        runs = [RunHistory("a", [{"step": 0, "reward": 1.0}, {"step": 1, "reward": 2.0}])]
    if case == "loss":
        runs = [
            RunHistory(
                "a", [{"step": n, "loss": 2 - n, "grad_norm": 1, "eval_loss": 2} for n in (0, 1)]
            )
        ]
    report.print_report(runs, tmp_path / "out.png", Console(file=io.StringIO()))
    pixels = imread(tmp_path / "out.png")
    assert pixels.shape[:2] == (960, 1280)
    assert pixels[0, 0, :3].min() == 1.0 and pixels.min() < 0.3  # ink on white


def test_running_mean_equals_the_loop():
    values = np.random.default_rng(0).random(12)
    for window in (1, 3, 5):
        half = window // 2
        wanted = [values[max(0, k - half) : k + half + 1].mean() for k in range(12)]
        assert _running_mean(values, window) == pytest.approx(wanted)


def test_load_run_refuses_folders_without_a_run(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl, expected a run folder" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": "one"}\n')
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl:2: step is 'one', not a number" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has 0 steps, expected at least 1"):
        load_run(tmp_path)


def test_load_run_reads_the_names_of_earlier_versions(tmp_path):
    row = {"step": 0, "time/make_room": 0.5, "time/take_back": 1.0, "memory/put_aside": 7}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (read,) = load_run(tmp_path).rows
    assert read == {"step": 0, "time/offload": 0.5, "time/onload": 1.0, "memory/offloaded": 7}
