"""The plan's page: the right numbers, in a browser that shows them well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from itertools import groupby, pairwise, product
from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.units import size
from pyrl_ext.plan.rules import RULES, sentence
from pyrl_ext.plan.show.html.charts import ticks
from pyrl_ext.plan.show.html.page import plan_page, problems_page
from pyrl_ext.plan.show.summary import Summary, is_read, values
from tests.helpers import browser
from tests.helpers.plan_pages import (
    GLM47,
    PLANS,
    chart_of,
    checked,
    page_of,
    plan_of,
    words_of,
)

pytestmark = pytest.mark.multiprocess

# The page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_plan_page_loads_nothing_and_is_well_formed(name: str):
    page = page_of(name)
    assert page.startswith("<!DOCTYPE html>") and len(page) < 600_000
    elements = checked(page).elements
    assert not {tag for tag, _ in elements} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in elements)
    assert not re.search(r"https?:|@import|url\((?!#hatch)", page)


def test_plan_page_escapes_texts_of_the_config():
    page = plan_page(plan_of("tiny", "run='</code><script>x&y</script>'"))
    assert "</code><script>x&y</script>" in checked(page).words
    assert page.count("<script>") == 1


def test_plan_page_names_every_rule_note_and_changed_value():
    plan = plan_of("glm47")
    words = words_of(page_of("glm47"))
    read = [(key, rule) for key, rule in RULES if is_read(plan, tuple(key.split(".")))]
    assert all(f"holds {sentence(rule)} {key}" in words for key, rule in read)
    assert len(read) > 60
    assert all(remark in words for remark in (*plan.notes, *plan.unsupported))
    assert all(value.is_default or value.text in words for value in values(plan))


def test_problems_page_has_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "plan.html"
    overrides = ["parallel.pp=3", "stepss=3", "run=<b>"]
    assert main([GLM47, *overrides, "--html", str(path)]) == 2
    with pytest.raises(ConfigError) as caught:
        compile_plan(GLM47, overrides)
    assert capsys.readouterr().err.splitlines() == str(caught.value).splitlines()
    assert path.read_text() == problems_page(caught.value)
    words = checked(path.read_text()).words
    for problem in caught.value.problems:
        assert problem.where in words and problem.message in words


def test_write_page_writes_the_same_bytes_for_the_same_plan(tmp_path: Path):
    pages = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.html"
        command = [sys.executable, "-m", "pyrl_ext.plan", *PLANS["interleaved"], "--html", path]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        run = subprocess.run(command, env=environment, capture_output=True)
        assert run.returncode == 0, run.stderr
        pages.append(path.read_bytes())
    assert pages[0] == pages[1]


def test_main_reports_a_page_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "none" / "plan.html"
    assert main([PLANS["tiny"][0], "--html", str(path)]) == 2
    expected = "No such file or directory, expected a file that can be written"
    assert capsys.readouterr().err == f"command line: --html {path}: {expected}\n"


# Charts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "step"), [(140.4, 20), (7.1, 2), (0.03, 0.005), (1e6, 2e5)])
def test_ticks_are_round_and_within_the_range(most: float, step: float):
    values = ticks(most, 8 if most > 100 else 6)
    assert values[0] == 0 and values[-1] <= most < values[-1] + step * 1.0001
    assert [b - a for a, b in pairwise(values)] == pytest.approx([step] * (len(values) - 1))
    assert ticks(0) == [0]


@pytest.mark.parametrize("name", ["glm47", "interleaved"])
def test_nodes_have_every_rank_with_its_groups(name: str):
    plan = plan_of(name)
    cells = [a for _, a in checked(page_of(name)).elements if "data-rank" in a]
    assert [a["data-rank"] for a in cells] == [str(i) for i in range(plan.world_size)]
    together: dict[str, list[int]] = {}
    for rank, cell in enumerate(cells):
        for group in (cell["data-groups"] or "").split():
            together.setdefault(group, []).append(rank)
    assert together == {
        f"{kind}:{i}": list(group)
        for kind, groups in plan.grids["llm"].groups.items()
        for i, group in enumerate(groups)
    }


def test_nodes_count_tp_first():
    cells = re.findall(r'<div class="axes">(.*?)</div>', page_of("interleaved"))
    sizes = plan_of("interleaved").parallel
    assert [" ".join(re.findall(r">(\w+)<", cell)) for cell in cells] == [
        f"tp{tp} dp{dp} pp{pp} ep{dp}"  # etp is tp, so experts are spread over the replicas
        for pp, dp, tp in product(range(sizes.pp), range(sizes.dp), range(sizes.tp))
    ]


@pytest.mark.parametrize("name", PLANS)
def test_layers_chart_has_every_layer_once(name: str):
    plan = plan_of(name)
    titles = [
        each.text or "" for each in chart_of(page_of(name), "Parts of").iterfind(".//g/title")
    ]
    routed = set(plan.router_layers)
    layers = [
        f"{'layer with routed experts' if i in routed else 'dense layer'} {i}"
        for i in range(plan.sizes.num_hidden_layers)
    ]
    assert sorted(titles) == sorted([*layers, "embedding", "output projection and loss"])


@pytest.mark.parametrize("name", ["tiny", "deep"])
def test_memory_chart_has_bars_as_long_as_their_bytes(name: str):
    chart = chart_of(page_of(name), "Bytes of the fullest rank's device")
    lengths: dict[float, float] = {}  # top of a bar -> its length
    for rect in chart.iterfind("g/rect[1]"):
        top = float(rect.get("y", ""))
        lengths[top] = lengths.get(top, 0) + float(rect.get("width", ""))
    stages = stage_memory(plan_of(name))  # neighbours that hold the same are one row
    drawn = [next(equal) for _, equal in groupby(stages, lambda stage: stage.items)]
    held = [stage.held(phase) for stage in drawn for phase in stage.phases]
    widths = [lengths[top] for top in sorted(lengths)]
    scale = max(widths) / max(held)
    assert widths == pytest.approx([each * scale for each in held], abs=1.0)
    texts = [each.text for each in chart.iterfind("text")]
    totals = [words for words in texts if words in set(map(size, held))]
    assert [size(each) for each in held] == totals[-len(held) :]


def test_memory_chart_draws_the_limit_to_scale():
    limit = 2 * max(stage.peak for stage in stage_memory(plan_of("tiny")))
    page = plan_page(plan_of("tiny", f"hardware.memory={limit}"))
    chart = chart_of(page, "Bytes of the fullest rank's device")
    (line,) = [line for line in chart.iterfind("line") if line.get("class") == "limit"]
    marks = [
        (float(mark[1]) * {"KiB": 2**10, "MiB": 2**20}[mark[2]], float(text.get("x", "")))
        for text in chart.iterfind("text")
        if text.get("y") == "22" and (mark := re.fullmatch(r"([\d.]+) (\w+)", text.text or ""))
    ]
    (least, left), (most, right) = marks[0], marks[-1]
    expected = left + (limit - least) / (most - least) * (right - left)
    assert float(line.get("x1", "")) == pytest.approx(expected, abs=0.05)


def test_pipeline_chart_draws_the_schedule_as_it_runs():
    rects = list(chart_of(page_of("interleaved"), "Pipeline schedule").iterfind("g/rect"))
    by_stage: dict[float, list[tuple[float, float]]] = {}
    for rect in rects:
        left = float(rect.get("x", ""))
        width = float(rect.get("width", ""))
        by_stage.setdefault(float(rect.get("y", "")), []).append((left, left + width))
    assert len(by_stage) == 4
    for slots in by_stage.values():
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(sorted(slots)))
    forward = sum(rect.get("class", "").startswith("forward") for rect in rects)
    assert forward * 2 == len(rects) and forward % (4 * 2) == 0


def test_time_chart_draws_every_second():
    time = Summary(plan_of("glm47")).time
    assert time is not None
    chart = chart_of(page_of("glm47"), "Seconds of a step")
    words = words_of(page_of("glm47"))
    widths = [float(rect.get("width", "")) for rect in chart.iterfind("g/rect")]
    seconds = [cost.seconds for cost in time.costs]
    scale = max(widths) / max(seconds)
    expected = sorted(max(0.1, each * scale) for each in seconds)
    assert sorted(widths) == pytest.approx(expected, abs=0.02)
    assert all(sentence in words for sentence in (*time.assumed, time.error))


# In a browser ------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(
    browser.find() is None,
    reason=f"none of {', '.join(browser.BROWSERS)} is installed: make .venv/.browser installs one",
)


def measured(page: str, folder: Path, dark: bool = False, rank: int = 0) -> tuple[dict, Path]:
    """The faults that measure_page.js finds in a page at 1280 px, and a picture of it."""
    script = Path(browser.__file__).with_name("measure_page.js").read_text(encoding="utf-8")
    copy = folder / "page.html"
    picture = folder / "page.png"
    script = f"<script>{script.replace('RANK', str(rank))}</script></body>"
    copy.write_text(page.replace("</body>", script))
    left = browser.look(copy, picture, dark)
    title = re.search(r"<title>(\{.*?\})</title>", left, re.S)
    assert title, left[-2000:]
    return json.loads(unescape(title[1])), picture


@needs_browser
@pytest.mark.parametrize(
    ("name", "dark"), [("tiny", False), ("interleaved", True), ("deep", False)]
)
def test_plan_page_reads_well_in_a_browser(tmp_path: Path, name: str, dark: bool):
    from matplotlib.image import imread

    plan = plan_of(name)
    rank = plan.world_size // 2
    layout, shot = measured(page_of(name), tmp_path, dark, rank)
    assert layout["wrong"] == []
    assert layout["width"] == 1280 and layout["height"] > 1280
    groups = [g for kind in plan.grids["llm"].groups.values() for g in kind if rank in g]
    assert layout["shared"] == [str(i) for i in sorted({*sum(groups, ())} - {rank})]
    assert layout["said"].startswith(f"rank {rank}: ")
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (1600, 1280)
    brightness = pixels.mean()
    assert brightness < 0.25 if dark else brightness > 0.85
    rows = pixels.reshape(1600, -1)
    assert (rows.max(axis=1) - rows.min(axis=1) > 0.3).mean() > 0.25  # not blank


@needs_browser
def test_problems_page_reads_well_in_a_browser(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        compile_plan(GLM47, ["parallel.pp=3", "x" * 300 + "=1", "parallel.ep=3"])
    layout, _ = measured(problems_page(caught.value), tmp_path)
    assert layout["wrong"] == [] and layout["width"] == 1280
