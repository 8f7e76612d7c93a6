"""Metrics: definitions against plain Python loops, files that survive crashes, the report."""

import io
import json
import math
import random

import numpy as np
import pytest
import torch
from rich.console import Console

from pyrl_ext.loss.advantages import grpo
from pyrl_ext.loss.grpo import grpo_loss
from pyrl_ext.metrics import report
from pyrl_ext.metrics.glossary import GLOSSARY, check_names, lookup
from pyrl_ext.metrics.mismatch import mismatch
from pyrl_ext.metrics.plot import _running_mean
from pyrl_ext.metrics.routes import agreement, agreement_sums, shared_experts
from pyrl_ext.metrics.sinks import JsonlSink, ProgressSink, TensorBoardSink, read_rows
from pyrl_ext.pack.batch import Batch
from tests.loss.test_objective import FULL, make_case
from tests.pack.test_batch import make_samples

# ------------------------------------------------------------------------------ the glossary


def test_every_metric_is_defined_once_with_formula_and_unit():
    for name, metric in GLOSSARY.items():
        assert metric.name == name and metric.unit
        assert metric.definition.endswith(".") and metric.definition.count(". ") == 0
        assert metric.band is None or metric.band[0] != metric.band[1]


def test_what_our_functions_report_is_defined():
    logprobs, entropy, fields = make_case()
    check_names(grpo_loss(logprobs, entropy, fields, FULL)[2])
    check_names(mismatch(fields.old_logprobs, fields.rollout_logprobs, fields.loss_mask))
    routes = torch.arange(24).reshape(2, 3, 4)
    check_names(agreement_sums(routes, routes, (1, 2, 45)))
    check_names(Batch.of(make_samples(), grpo).stats())
    check_names(report.PHASES)
    check_names(report.MEANS)


def test_unknown_names_are_listed_together():
    with pytest.raises(ValueError, match=r"\['mismatch/k4', 'route/agree_topk/layer_x'\]"):
        check_names(["reward", "mismatch/k4", "route/agree_topk/layer_x", "mismatch/k3"])
    metric = lookup("route/agree_topk/layer_7")
    assert metric is not None and metric.name == "route/agree_topk/layer_<id>"


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("mismatch/f2", 1e-5, "ok"),
        ("mismatch/f2", 0.05, "warn"),
        ("mismatch/f2", 0.2, "alarm"),
        ("mismatch/ess", 0.99, "ok"),
        ("mismatch/ess", 0.8, "warn"),
        ("mismatch/ess", 0.1, "alarm"),
        ("mismatch/nonfinite", 0, "ok"),
        ("mismatch/nonfinite", 1, "alarm"),
        ("reward", -1e9, "ok"),
        ("reward", math.nan, "alarm"),
    ],
)
def test_bands(name, value, level):
    assert GLOSSARY[name].level(value) == level


# ------------------------------------------------------------------------- rollout vs trainer


def mismatch_loop(old: list[float], rollout: list[float]) -> dict[str, float]:
    d = [a - b for a, b in zip(old, rollout, strict=True)]
    r, n = [math.exp(x) for x in d], len(d)
    size = sorted(abs(x) for x in d)
    gaps = [abs(math.exp(a) - math.exp(b)) for a, b in zip(old, rollout, strict=True)]
    return {
        "mismatch/k3": sum(x - 1 - y for x, y in zip(r, d, strict=True)) / n,
        "mismatch/abs_mean": sum(size) / n,
        "mismatch/p99": next(x for k, x in enumerate(size, 1) if k >= 0.99 * n),
        "mismatch/max": size[-1],
        "mismatch/prob_abs_mean": sum(gaps) / n,
        "mismatch/f2": sum(max(x, 1 / x) > 2 for x in r) / n,
        "mismatch/f5": sum(max(x, 1 / x) > 5 for x in r) / n,
        "mismatch/ess": sum(r) ** 2 / (n * sum(x * x for x in r)),
        "mismatch/chi2": sum(x * x for x in r) / n - 1,
        "mismatch/ppl_ratio": math.exp(-sum(old) / n) / math.exp(-sum(rollout) / n),
        "mismatch/nonfinite": 0,
    }


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 1000])
@pytest.mark.parametrize("scale", [0.01, 1.5])
def test_mismatch_equals_the_loop(n, scale):
    rng = random.Random(n)
    rollout = [-rng.expovariate(1.0) for _ in range(n)]
    old = [x + rng.gauss(0, scale) for x in rollout]
    mask = torch.tensor([True, False] * n)
    junk = torch.full((n,), math.nan).double()
    got = mismatch(
        torch.stack([torch.tensor(old).double(), junk], 1).flatten(),
        torch.stack([torch.tensor(rollout).double(), junk], 1).flatten(),
        mask,
    )
    doubles = [torch.tensor(x).double().tolist() for x in (old, rollout)]
    wanted = mismatch_loop(*doubles)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name


def test_equal_logprobs_have_no_mismatch():
    logprobs = -torch.rand(50)
    got = mismatch(logprobs, logprobs.clone(), torch.ones(50) > 0)
    ones = {"mismatch/ess", "mismatch/ppl_ratio"}
    assert got == {name: pytest.approx(float(name in ones), abs=1e-15) for name in got}


def test_nan_reaches_every_distance_and_is_counted():
    old, rollout = -torch.rand(50), -torch.rand(50)
    old[7] = rollout[9] = math.nan
    got = mismatch(old, rollout, torch.ones(50) > 0)
    assert got.pop("mismatch/nonfinite") == 2
    assert all(math.isnan(value) for value in got.values())


def test_a_token_the_trainer_finds_impossible_is_counted():
    old, rollout = torch.full((4,), -1.0), torch.full((4,), -1.0)
    old[0] = -math.inf
    got = mismatch(old, rollout, torch.ones(4) > 0)
    assert got["mismatch/nonfinite"] == 1 and got["mismatch/f5"] == 0.25
    assert got["mismatch/k3"] == got["mismatch/max"] == math.inf


def test_collapse_shows_in_the_sample_size_without_overflow():
    old = torch.zeros(100)
    rollout = torch.zeros(100)
    rollout[0] = -800.0  # r = exp(800) is beyond float64
    got = mismatch(old, rollout, torch.ones(100) > 0)
    assert got["mismatch/ess"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="0 tokens under the mask"):
        mismatch(old, rollout, torch.zeros(100) > 0)


# ------------------------------------------------------------------------------------ routes


def draw_routes(rng: np.random.Generator, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.random((tokens, 3, 9)).argsort(-1)[..., :4]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_agreement_equals_the_loop(dtype):
    rng = np.random.default_rng(0)
    a, b = draw_routes(rng, 40, dtype), draw_routes(rng, 40, dtype)
    b[:10] = a[:10][..., [3, 1, 0, 2]]  # same sets in another order
    b[10:20, :2] = a[10:20, :2]
    mask = torch.from_numpy(rng.random(40) > 0.2)
    shared, differs = {layer: [] for layer in (1, 4, 7)}, 0
    for t in range(40):
        sets = [(set(a[t, i].tolist()), set(b[t, i].tolist())) for i in range(3)]
        if mask[t]:
            differs += any(x != y for x, y in sets)
            for layer, (x, y) in zip(shared, sets, strict=True):
                shared[layer].append(len(x & y) / 4)
    every = [x for values in shared.values() for x in values]
    got = agreement(agreement_sums(a, b, (1, 4, 7), mask))
    wanted = {
        "route/agree_topk": np.mean(every),
        "route/exact_set": np.mean([x == 1 for x in every]),
        "route/tokens_any_layer_diff": differs / len(shared[1]),
        **{f"route/agree_topk/layer_{i}": np.mean(x) for i, x in shared.items()},
    }
    assert got == {name: pytest.approx(value, rel=1e-12) for name, value in wanted.items()}


def test_agreement_sums_add_over_tokens_and_layers():
    rng = np.random.default_rng(1)
    a, b = draw_routes(rng, 30, torch.uint8), draw_routes(rng, 30, torch.uint8)
    whole = agreement_sums(a, b, (1, 2, 3))

    def added(parts):
        names = dict.fromkeys(name for part in parts for name in part)
        pairs = {name: [p[name] for p in parts if name in p] for name in names}
        return {name: (sum(t for t, _ in x), sum(c for _, c in x)) for name, x in pairs.items()}

    assert agreement(
        added([agreement_sums(a[s], b[s], (1, 2, 3)) for s in (slice(11), slice(11, 30))])
    ) == (agreement(whole))
    stages = added(
        [agreement_sums(a[:, :1], b[:, :1], (1,)), agreement_sums(a[:, 1:], b[:, 1:], (2, 3))]
    )
    del stages["route/tokens_any_layer_diff"], whole["route/tokens_any_layer_diff"]
    assert agreement(stages) == pytest.approx(agreement(whole))


def test_route_messages_and_nothing_to_compare():
    a = torch.arange(24).reshape(2, 3, 4)
    with pytest.raises(ValueError, match=r"\[2, 3, 4\] and \[2, 3, 2\]"):
        shared_experts(a, a[..., :2])
    with pytest.raises(ValueError, match="2 layer ids for 3 layers"):
        agreement_sums(a, a, (1, 2))
    nothing = agreement(agreement_sums(a, a, (1, 2, 3), torch.zeros(2) > 0))
    assert all(math.isnan(value) for value in nothing.values())


# ------------------------------------------------------------------------------------- sinks


def strict(line: str) -> dict:
    def refuse(token: str):
        raise ValueError(token)

    return json.loads(line, parse_constant=refuse)


def test_rows_come_back_and_lines_are_strict_json(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [
        {"step": 0, "reward": 0.1, "loss": math.nan},
        {"step": 1, "reward": 1 / 3, "loss": math.inf, "lr": -math.inf},
        {"step": 5, "reward": np.float64(2.5)},
    ]
    sink = JsonlSink(path)
    for count, row in enumerate(rows, 1):
        sink.write(row)
        assert len(read_rows(path)) == count  # readable while the run goes on
    sink.close()
    lines = [strict(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"step": 0, "reward": 0.1, "loss": None, "nonfinite": {"loss": "nan"}}
    assert lines[1]["nonfinite"] == {"loss": "inf", "lr": "-inf"}
    assert str(read_rows(path)) == str([dict(row) for row in rows]).replace(
        "np.float64(2.5)", "2.5"
    )


def test_only_numbers_and_rising_steps(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"step": 3})
    with pytest.raises(ValueError, match=r"step 3 after 3, expected a later one"):
        sink.write({"step": 3})
    with pytest.raises(ValueError, match="step None"):
        sink.write({"reward": 1.0})
    for value in (torch.tensor(1.0), True, "x", None):
        with pytest.raises(TypeError, match=r"reward is .* expected a Python int or float"):
            sink.write({"step": 4, "reward": value})  # pyright: ignore[reportArgumentType]
    sink.close()
    assert read_rows(sink.path) == [{"step": 3}]


def test_rewind_forgets_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(6):
        sink.write({"step": step, "loss": math.nan})
    sink.close()
    sink = JsonlSink(path)
    sink.rewind(4)
    sink.write({"step": 4, "loss": 4.5})
    sink.close()
    rows = read_rows(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert math.isnan(rows[3]["loss"]) and rows[4]["loss"] == 4.5
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    sink = JsonlSink(path)
    sink.rewind(0)
    sink.write({"step": 0})
    sink.close()
    assert read_rows(path) == [{"step": 0}]


@pytest.mark.parametrize("cut", [1, 5, 14])
def test_a_torn_last_line_is_removed_with_a_warning(tmp_path, caplog, cut):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 0, "reward": 0.5}\n'
    path.write_text(whole + '{"step": 1, "reward": 0.75}\n'[:-cut])
    assert read_rows(path) == [{"step": 0, "reward": 0.5}]
    sink = JsonlSink(path)
    assert "removed line 2" in caplog.text and str(path) in caplog.text
    assert path.read_text() == whole
    sink.write({"step": 1})
    sink.close()
    assert [row["step"] for row in read_rows(path)] == [0, 1]


def test_damage_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: .*expected a JSON object with a step"):
        JsonlSink(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: no object with a step"):
        read_rows(path)


def test_tensorboard_gets_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in range(3):
        sink.write({"step": step, "reward": step / 2, "mismatch/k3": 1e-3})
    sink.close()
    sink = TensorBoardSink(tmp_path, first_step=2)
    sink.write({"step": 2, "reward": 7.0})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["mismatch/k3", "reward"]
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(0, 0.0), (1, 0.5), (2, 7.0)]


def test_plain_progress_lines_are_few():
    out = io.StringIO()
    sink = ProgressSink(100, first_step=40, every=60.0, file=out)
    for step in range(40, 100):
        sink.note("not in plain lines")
        sink.write({"step": step, "reward": step / 100, "tokens_per_s": 1234.5})
    sink.write({"step": 100, "eval_reward": 0.5})  # of the final weights
    sink.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("step 100/100  eval 0.500")
    assert lines[0].startswith("step 41/100  reward 0.400  1,234 tokens/s  left 0:00:")
    assert lines[1].startswith("step 100/100  reward 0.990") and lines[1].endswith("left 0:00:00")


def test_progress_bar_in_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    sink = ProgressSink(10, file=out)
    sink.note("rollout: 3 samples")
    sink.close()
    assert "0/10" in out.getvalue() and "rollout: 3 samples" in out.getvalue()
    sink = ProgressSink(10, file=out)
    for step in range(10):
        sink.note("rollout: 4 samples")
        sink.write({"step": step, "reward": 0.5, "eval_reward": 0.25})
    sink.close()
    assert "10/10" in out.getvalue() and "reward 0.500  eval 0.250" in out.getvalue()


# ------------------------------------------------------------------------------------ report


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


def test_summary_of_a_run(tmp_path):
    write_run(tmp_path / "a", 10)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "eval_reward": 0.45, "mismatch/abs_mean": 0.09}\n')
    run = report.load_run(tmp_path / "a")
    figures = report.summary(run)
    assert figures["steps"] == 10
    assert [figures[f"reward {k}"] for k in ("first", "last", "best")] == [0.0, 0.9, 0.9]
    assert (figures["eval reward start"], figures["eval reward end"]) == (0.0, 0.45)
    assert figures["mismatch/k3"] == pytest.approx(1e-3)
    assert figures[report.WORST_LAYER] == pytest.approx(0.8)
    assert figures[report.WORST_STEP] == pytest.approx(0.09)
    seconds = report.phase_seconds(run)
    wanted = {"time/rollout": 5.0, "time/update": 2.5, "time/publish": 1.0, "other": 1.5}
    assert seconds == {name: pytest.approx(value) for name, value in wanted.items()}


def test_checkpoints_are_counted_beside_the_steps(tmp_path):
    write_run(tmp_path / "a", 10, **{"time/checkpoint": 0.5})
    seconds = report.phase_seconds(report.load_run(tmp_path / "a"))
    assert seconds["time/checkpoint"] == pytest.approx(5.0)
    assert seconds["other"] == pytest.approx(1.5)


def shown(folders, tmp_path, capsys) -> list[str]:
    report.main([*map(str, folders), "--png", str(tmp_path / "out.png")])
    return capsys.readouterr().out.splitlines()


def row_of(lines: list[str], name: str) -> str:
    return " ".join(next(x for x in lines if f" {name} " in x).replace("│", " ").split())


def test_report_of_one_run(tmp_path, capsys):
    write_run(tmp_path / "a", 10)
    lines = shown([tmp_path / "a"], tmp_path, capsys)
    assert row_of(lines, "mismatch/k3") == "mismatch/k3 0.001 nat"
    assert row_of(lines, "time/rollout") == "time/rollout model 5.00 s 50.0%"
    assert row_of(lines, "ours together") == "ours together ours 2.50 s 25.0%"
    assert row_of(lines, "all") == "all 10.00 s 100.0%"


def test_report_compares_runs_by_ratio(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    write_run(tmp_path / "on", 10)
    write_run(tmp_path / "off", 10, factor=8.0)
    lines = shown([tmp_path / "on", tmp_path / "off"], tmp_path, capsys)
    assert row_of(lines, "mismatch/k3") == "mismatch/k3 0.001 nat 0.008 nat 8x"
    assert row_of(lines, "mismatch/abs_mean") == "mismatch/abs_mean 0.02 nat 0.16 nat ! 8x"
    assert row_of(lines, "time/update") == "time/update model 2.50 s 25.0% 2.50 s 25.0% 1x"


def test_not_finite_numbers_stay_visible(tmp_path, capsys):
    write_run(tmp_path / "a", 10, factor=math.nan)
    lines = shown([tmp_path / "a"], tmp_path, capsys)
    assert row_of(lines, "mismatch/k3") == "mismatch/k3 nan nat !"
    assert row_of(lines, "steps with NaN or infinity") == "steps with NaN or infinity 10"


@pytest.mark.parametrize("case", ["one", "three", "not finite", "one step", "no mismatch"])
def test_the_picture_is_drawn(tmp_path, case):
    from matplotlib.image import imread

    steps = 1 if case == "one step" else 200
    factors = [1.0, 3.0, 9.0] if case == "three" else [math.nan if case == "not finite" else 1.0]
    for place, factor in enumerate(factors):
        write_run(tmp_path / str(place), steps, factor)
    runs = [report.load_run(tmp_path / str(place)) for place in range(len(factors))]
    if case == "no mismatch":
        runs = [report.Run("a", [{"step": 0, "reward": 1.0}, {"step": 1, "reward": 2.0}])]
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


def test_folders_without_a_run_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        report.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "metrics.jsonl, expected a run folder" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="has 0 steps, expected at least 1"):
        report.load_run(tmp_path)
