"""The plan's page and its tables: the right numbers, in a browser that shows them well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from html import unescape
from html.parser import HTMLParser
from itertools import groupby, pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.memory import Item, StageMemory, stage_memory
from pyrl_ext.plan.forecast.phases import MEMORY_PHASES
from pyrl_ext.plan.forecast.units import size
from pyrl_ext.plan.model import ranks
from pyrl_ext.plan.rules import RULES
from pyrl_ext.plan.show.html.page import plan_page, problems_page
from pyrl_ext.plan.show.html.svg import picture, tag, text, ticks
from pyrl_ext.plan.show.summary import Summary, values
from pyrl_ext.plan.show.terminal import memory_table, print_plan
from tests.helpers import browser

REPOSITORY = Path(__file__).parents[2]
ACCOUNTED = "parallel.account_for_embedding_in_pipeline_split=true"
PLANS = {
    "tiny": ("configs/tiny.yaml",),
    "glm47": ("configs/glm47.yaml",),
    "interleaved": (
        "configs/glm47.yaml", "parallel.pp=4", "parallel.vpp=2", "parallel.tp=4", ACCOUNTED
    ),
    "deep": (
        "configs/glm47.yaml", "parallel.pp=16", "parallel.vpp=3", "parallel.dp=16", ACCOUNTED
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)


@cache
def plan_of(name: str, *overrides: str) -> Plan:
    path, *given = PLANS[name]
    return compile_plan(path, [*given, *overrides])


@cache
def page_of(name: str) -> str:
    return plan_page(plan_of(name))


# Markup ------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Elements that are closed in the order they were opened, and all text."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def pictures(page: str) -> list[ElementTree.Element]:
    """Every SVG with a title, as XML."""
    found = [ElementTree.fromstring(each) for each in re.findall(r"<svg .*?</svg>", page, re.S)]
    return [svg for svg in found if svg.find("title") is not None]


def titled(page: str, start: str) -> ElementTree.Element:
    (found,) = [svg for svg in pictures(page) if (svg.findtext("title") or "").startswith(start)]
    return found


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "a < b", tag("b", "&"), data_x='"<') == (
        '<p data-x="&quot;&lt;">a &lt; b<b>&amp;</b></p>'
    )
    assert tag("rect", x=1 / 3, y=None, hidden=True) == '<rect x="0.33" hidden/>'
    assert "<title>&lt;</title>" in picture(10, "<", text(0, 0, "x"))


@pytest.mark.parametrize(("most", "step"), [(140.4, 20), (7.1, 2), (0.03, 0.005), (1e6, 2e5)])
def test_ticks_are_round_and_within(most: float, step: float):
    found = ticks(most, 8 if most > 100 else 6)
    assert found[0] == 0 and found[-1] <= most < found[-1] + step * 1.0001
    assert [b - a for a, b in pairwise(found)] == pytest.approx([step] * (len(found) - 1))
    assert ticks(0) == [0]


@pytest.mark.parametrize("name", PLANS)
def test_page_stands_alone_and_is_well_formed(name: str):
    page = page_of(name)
    found = checked(page)
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"link", "img", "iframe", "object", "embed", "base"}
    assert not any(
        {"src", "href", "action"} & attributes.keys() for _, attributes in found.elements
    )
    assert not re.search(r"https?:|@import|url\((?!#hatch)", page)
    assert pictures(page) and len(page) < 600_000


def test_texts_of_the_config_are_escaped():
    page = plan_page(plan_of("tiny", "run='</code><script>x&y</script>'"))
    assert "</code><script>x&y</script>" in checked(page).words
    assert page.count("<script>") == 1


# What the page says ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glm47", "interleaved"])
def test_every_rank_has_its_place_and_its_groups(name: str):
    plan = plan_of(name)
    cells = [a for _, a in checked(page_of(name)).elements if "data-rank" in a]
    assert [a["data-rank"] for a in cells] == [str(i) for i in range(plan.world_size)]
    together: dict[str, list[int]] = {}
    for rank, cell in enumerate(cells):
        for group in (cell["data-groups"] or "").split():
            together.setdefault(group, []).append(rank)
    expected = {
        f"{kind}:{i}": list(group)
        for kind, found in ranks.groups(plan.parallel).items()
        for i, group in enumerate(found)
    }
    assert together == expected


def test_coordinates_count_tp_first():
    plan = plan_of("interleaved")
    page = page_of("interleaved")
    found = re.findall(r'<div class="axes">(.*?)</div>', page)
    shown = [" ".join(re.findall(r">(\w+)<", cell)) for cell in found]
    sizes = plan.parallel
    expected = [
        f"tp{tp} dp{dp} pp{pp} ep{dp}"  # etp is tp, so experts are spread over the replicas
        for pp, dp, tp in product(range(sizes.pp), range(sizes.dp), range(sizes.tp))
    ]
    assert shown == expected


@pytest.mark.parametrize("name", PLANS)
def test_every_layer_is_on_one_stage(name: str):
    plan = plan_of(name)
    svg = titled(page_of(name), "Parts of the model")
    titles = [each.text or "" for each in svg.iterfind(".//g/title")]
    routed = set(plan.router_layers)
    expected = [
        f"{'layer with routed experts' if i in routed else 'dense layer'} {i}"
        for i in range(plan.sizes.num_hidden_layers)
    ]
    assert sorted(titles) == sorted([*expected, "embedding", "output projection and loss"])


@pytest.mark.parametrize("name", PLANS)
def test_bars_are_as_long_as_their_bytes(name: str):
    plan = plan_of(name)
    svg = titled(page_of(name), "Bytes of the fullest rank's device")
    found: dict[float, float] = {}  # top of a bar -> its width
    for shape in svg.iterfind("g"):
        rect = shape.find("rect")
        assert rect is not None
        top = float(rect.get("y", ""))
        found[top] = found.get(top, 0) + float(rect.get("width", ""))
    stages = stage_memory(plan)  # neighbours that hold the same are one row
    drawn = [next(alike) for _, alike in groupby(stages, lambda stage: stage.items)]
    held = [stage.held(phase) for stage in drawn for phase in MEMORY_PHASES]
    widths = [found[top] for top in sorted(found)]
    scale = max(widths) / max(held)
    assert widths == pytest.approx([each * scale for each in held], abs=1.0)
    texts = [each.text for each in svg.iterfind("text")]
    assert [size(each) for each in held] == [t for t in texts if t in set(map(size, held))][
        -len(held) :
    ]


def test_the_limit_is_where_it_belongs():
    limit = 2 * max(stage.peak for stage in stage_memory(plan_of("tiny")))
    page = plan_page(plan_of("tiny", f"hardware.memory={limit}"))
    svg = titled(page, "Bytes of the fullest rank's device")
    (line,) = [line for line in svg.iterfind("line") if line.get("class") == "limit"]
    ticks = [
        (float(found[1]) * {"KiB": 2**10, "MiB": 2**20}[found[2]], float(each.get("x", "")))
        for each in svg.iterfind("text")
        if (found := re.fullmatch(r"([\d.]+) (\w+)", each.text or "")) and each.get("y") == "22"
    ]
    (least, left), (most, right) = ticks[0], ticks[-1]
    expected = left + (limit - least) / (most - least) * (right - left)
    assert float(line.get("x1", "")) == pytest.approx(expected, abs=0.05)


def test_page_names_every_rule_note_and_changed_value():
    plan = plan_of("glm47")
    words = " ".join("".join(checked(page_of("glm47")).words).split())
    for key, rule in RULES:
        assert f"holds {rule.__name__.replace('_', ' ')} {key}" in words
    for remark in (*plan.notes, *plan.unsupported):
        assert remark in words
    for value in values(plan):
        assert value.is_default or value.text in words


def test_problems_have_a_page_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "plan.html"
    given = ["configs/glm47.yaml", "parallel.pp=3", "stepss=3", "run=<b>"]
    assert main([*given, "--html", str(path)]) == 2
    with pytest.raises(ConfigError) as caught:
        compile_plan(given[0], given[1:])
    assert capsys.readouterr().err.splitlines() == str(caught.value).splitlines()
    assert path.read_text() == problems_page(caught.value)
    words = checked(path.read_text()).words
    for problem in caught.value.problems:
        assert problem.where in words and problem.message in words


# The command -------------------------------------------------------------------------------------


def test_same_plan_same_bytes(tmp_path: Path):
    pages = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.html"
        command = [sys.executable, "-m", "pyrl_ext.plan", *PLANS["interleaved"], "--html", path]
        run = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True
        )
        assert run.returncode == 0, run.stderr
        pages.append(path.read_bytes())
    assert pages[0] == pages[1]


def test_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "none" / "plan.html"
    assert main(["configs/tiny.yaml", "--html", str(path)]) == 2
    expected = "No such file or directory, expected a file that can be written"
    assert capsys.readouterr().err == f"command line: --html {path}: {expected}\n"


def printed(plan: Plan, width: int, everything: bool = False) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        print_plan(plan, console, everything)
    return capture.get().splitlines()


@pytest.mark.parametrize("name", PLANS)
def test_terminal_answers_first_and_breaks_no_name(name: str):
    plan = plan_of(name)
    lines = printed(plan, 100)
    answers = [line for line in lines[1 : lines.index("follows")] if line[:1].strip()]
    expected = Summary(plan).verdicts
    assert [line[: len(v.answer)] for line, v in zip(answers, expected)] == [
        v.answer for v in expected
    ]
    assert max(map(len, lines[1:])) <= 100
    shown = "\n".join(lines)
    for key, value, _, is_default in values(plan):
        assert is_default or f"{key}={value}" in shown
    everything = printed(plan, 80, everything=True)
    for key, *_ in values(plan):
        assert any(re.match(rf"\s*{key.rpartition('.')[2]}: ", line) for line in everything)
    assert len(everything) > len(lines)


def test_memory_table_by_phase():
    plan = plan_of("interleaved")
    stage = max(stage_memory(plan), key=lambda stage: stage.peak)
    lines = printed(plan, 100)
    (start,) = [i for i, line in enumerate(lines) if line.startswith("memory of a rank")]
    assert f"of stage {stage.stage}, the fullest of 4 [GiB]" in lines[start]

    def numbers(name: str) -> list[float]:
        (line,) = [line for line in lines[start:] if line.startswith(f"{name} ")][:1]
        return [float(each) for each in line.removeprefix(name).split()[: len(MEMORY_PHASES)]]

    held = [stage.held(phase) / 2**30 for phase in MEMORY_PHASES]
    assert numbers("together") == pytest.approx(held, abs=0.006)
    assert numbers("headroom") == pytest.approx([143771 / 1024 - each for each in held], abs=0.006)
    assert numbers("weights")[0] == pytest.approx(stage.bytes_of("weights") / 2**30, abs=0.006)


def test_reasons_take_one_line_and_never_the_names():
    summary = Summary(plan_of("tiny"))
    item = Item("parameters gathered ahead", 2**20, ("update",), "a reason " * 20, exact=False)
    summary.memory = (StageMemory(0, (*stage_memory(summary.plan)[0].items, item)),)

    def lines(in_full: bool) -> list[str]:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(memory_table(summary, in_full)[1])
        return capture.get().splitlines()

    short, full = lines(False), lines(True)
    (line,) = [line for line in short if line.startswith("~ parameters gathered ahead  ")]
    assert len(line) <= 100 and line.rstrip().endswith("…")
    assert len(full) > len(short) and "…" not in "".join(full)


def test_verdicts():
    def answers(name: str, *overrides: str) -> dict[str, str]:
        return {each.answer: each.tone for each in Summary(plan_of(name, *overrides)).verdicts}

    whole = answers("glm47")
    assert [whole[each] for each in ("consistent", "fits", "runs")] == ["good"] * 3
    assert (
        answers("glm47", "parallel.cp=2", "parallel.dp=4", "parallel.dynamic_cp=8")[
            "cannot run yet"
        ]
        == "bad"
    )
    assert answers("glm47", "hardware.gpu=null")["memory"] == "plain"
    assert answers("tiny")["runs"] == "good"
    full = Summary(plan_of("tiny"))
    full.limit = full.fullest.peak - 2048
    (verdict,) = [each for each in full.verdicts if each.tone == "bad"]
    assert verdict.answer == "does not fit" and verdict.detail.endswith(": 2 KiB too much")


# In a browser ------------------------------------------------------------------------------------

# Measures the page as laid out, and leaves what is wrong in its title as JSON.
MEASURE = """<script>
addEventListener("load", function () {
  var root = document.documentElement, wrong = [];
  function note(what, node) { wrong.push(what + ": " + node.textContent.trim().slice(0, 60)); }
  function apart(a, b) {
    return a.right <= b.left + 1 || b.right <= a.left + 1 ||
           a.bottom <= b.top + 4 || b.bottom <= a.top + 4;
  }
  function colour(node) {
    var style = getComputedStyle(node), rgb = style.fill.match(/[\\d.]+/g).map(Number);
    var back = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number);
    var alpha = Number(style.fillOpacity);
    return [0, 1, 2].map(function (i) { return alpha * rgb[i] + (1 - alpha) * back[i]; });
  }
  function light(rgb) {
    var linear = rgb.map(function (v) {
      v /= 255; return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4);
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  }
  document.querySelectorAll("main svg").forEach(function (svg) {
    var frame = svg.getBoundingClientRect(), texts = Array.from(svg.querySelectorAll("text"));
    var boxes = texts.map(function (node) { return node.getBoundingClientRect(); });
    boxes.forEach(function (box, i) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
          box.bottom > frame.bottom + 3) note("outside its picture", texts[i]);
      for (var j = 0; j < i; j++) if (!apart(box, boxes[j])) note("on another text", texts[i]);
    });
    svg.querySelectorAll("g > text").forEach(function (label) {
      var rect = label.parentNode.querySelector("rect");
      var inner = label.getBoundingClientRect(), outer = rect.getBoundingClientRect();
      if (inner.left < outer.left || inner.right > outer.right) note("wider than its box", label);
      var a = light(colour(label)), b = light(colour(rect));
      var contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < 4.5) note("contrast " + contrast.toFixed(1), label);
    });
  });
  document.querySelectorAll(".scroll, td, th, dd, p, h1, h2").forEach(function (node) {
    if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth) note("cut off", node);
  });
  var cell = document.querySelectorAll("[data-rank]")[RANK], shared = null;
  if (cell) {
    cell.dispatchEvent(new MouseEvent("mouseenter"));
    shared = Array.from(document.querySelectorAll(".with"));
    shared = shared.map(function (node) { return node.dataset.rank; });
  }
  document.title = JSON.stringify({
    width: root.scrollWidth, height: root.scrollHeight, wrong: wrong, shared: shared,
    said: (document.getElementById("groups-of") || {}).textContent
  });
});
</script>"""


needs_browser = pytest.mark.skipif(
    browser.find() is None,
    reason=f"none of {', '.join(browser.BROWSERS)} is installed: make browser installs one",
)


def measured(page: str, folder: Path, dark: bool = False, rank: int = 0) -> tuple[dict, Path]:
    """What MEASURE finds in a page at 1280 px, and a picture of it."""
    copy, picture = folder / "page.html", folder / "page.png"
    copy.write_text(page.replace("</body>", MEASURE.replace("RANK", str(rank)) + "</body>"))
    left = browser.look(copy, picture, dark)
    title = re.search(r"<title>(\{.*?\})</title>", left, re.S)
    assert title, left[-2000:]
    return json.loads(unescape(title[1])), picture


@needs_browser
@pytest.mark.parametrize(
    ("name", "dark"),
    [("tiny", False), ("glm47", True), ("interleaved", False), ("interleaved", True),
     ("deep", False)],
)  # fmt: skip
def test_page_in_a_browser(tmp_path: Path, name: str, dark: bool):
    from matplotlib.image import imread

    plan = plan_of(name)
    rank = plan.world_size // 2
    found, shot = measured(page_of(name), tmp_path, dark, rank)
    assert found["wrong"] == []
    assert found["width"] == 1280 and found["height"] > 1280
    groups = [g for kind in ranks.groups(plan.parallel).values() for g in kind if rank in g]
    assert found["shared"] == [str(i) for i in sorted({*sum(groups, ())} - {rank})]
    assert found["said"].startswith(f"rank {rank}: ")
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (1600, 1280)
    brightness = pixels.mean()
    assert brightness < 0.25 if dark else brightness > 0.85
    rows = pixels.reshape(1600, -1)
    assert (rows.max(axis=1) - rows.min(axis=1) > 0.3).mean() > 0.25  # not blank


@needs_browser
def test_problems_in_a_browser(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        compile_plan("configs/glm47.yaml", ["parallel.pp=3", "x" * 300 + "=1", "parallel.ep=3"])
    found, _ = measured(problems_page(caught.value), tmp_path)
    assert found["wrong"] == [] and found["width"] == 1280
