"""The run's page in a browser that clicks, drags and types: what it shows then."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pyrl_ext.data.recordings import load_samples, save_samples
from pyrl_ext.metrics.sinks import JsonlSink
from pyrl_ext.samples import Sample
from pyrl_ext.tools.report.__main__ import main
from pyrl_ext.tools.report.recorded import HEAD
from tests.helpers import browser
from tests.helpers.deadline import DEADLINE
from tests.helpers.live_browser import Page, opened
from tests.helpers.run_pages import write_history, write_recorded
from tests.helpers.samples import make_sample

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        browser.find() is None,
        reason=f"none of {', '.join(browser.BROWSERS)} is installed: make .venv/.browser",
    ),
]
ROWS = "[data-samples] .row"
CHARTS = "main .charts.first .chart"


def written(folder: Path, *paths: Path, options: tuple[str, ...] = ()) -> str:
    """The address of the page that `pyrl report` writes of some runs."""
    page = folder / "page.html"
    assert main([*map(str, paths), "--html", str(page), *options]) == 0
    return page.as_uri()


@contextmanager
def watching(path: Path, *options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the page of a run, and its address; it ends with the context."""
    command = [sys.executable, "-m", "pyrl_ext.tools.report", str(path), "--watch", "--port", "0"]
    command += options
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().split()[0]
        finally:
            server.kill()


def has_ipv6() -> bool:
    """True if this machine has the address ::1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def column(page: Page, number: int) -> list[str]:
    return page.texts(f"{ROWS} td:nth-child({number})")


def contrast(page: Page, selector: str) -> float:
    """Contrast of an element's text with what is behind it, from 1 to 21 (WCAG)."""
    colors = page.run(
        f"""(function (node) {{
          var found = [getComputedStyle(node).color], back;
          do {{
            back = getComputedStyle(node).backgroundColor;
            node = node.parentElement;
          }} while (back === 'rgba(0, 0, 0, 0)');
          return [...found, back].map((color) => color.match(/[0-9.]+/g).map(Number));
        }})(document.querySelector({json.dumps(selector)}))"""
    )
    lights: list[float] = []
    for color in colors:
        parts = np.array(color[:3]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        lights.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 500)])
def test_samples_are_found_sorted_and_opened(tmp_path: Path, dark: bool, width: int):
    path = write_recorded(tmp_path / "a", steps=3)
    samples = load_samples(path / "kept/step-000000.safetensors")
    token = int(samples[4].tokens[0])
    with opened(written(tmp_path, path), dark, (width, 1200)) as page:
        heads = ["step", "set", "prompt", "response", "reward", "right", "short"]
        assert page.texts("[data-sort]") == [*heads, "length", "truncated"]
        assert column(page, 1) == ["2"] * 6 + ["3"] * 4 + ["1"] * 6 + ["0"] * 6
        assert column(page, 2) == ["training"] * 6 + ["sums"] * 4 + ["training"] * 12
        assert column(page, 5)[:6] == ["0", "1", "2", "3", "4", "5"]
        assert column(page, 6)[:6] == ["0", "0.5", "1", "1.5", "2", "2.5"]
        assert column(page, 8)[:6] == [str(len(sample.response)) for sample in samples]
        cut = ["yes" if sample.finish_reason == "length" else "" for sample in samples]
        assert column(page, 9)[:6] == cut
        assert page.texts("[data-found]") == ["22 samples"]

        page.click("[data-sort=reward]")
        assert column(page, 5) == sorted(column(page, 5))
        page.click("[data-sort=reward]")
        assert column(page, 5) == sorted(column(page, 5), reverse=True)
        assert page.run("document.querySelector('[aria-sort=descending]').dataset.sort") == "reward"

        words = f"<SCRIPT>{token}&amp"
        page.type("[data-search]", words)
        found = sum(f"<script>{token}&amp" in text for text in column(page, 3) + column(page, 4))
        assert 3 <= len(column(page, 1)) <= found
        assert page.texts("[data-found]")[0].endswith(" of 22 samples contain it")
        page.type("[data-search]", "nothing like it")
        assert column(page, 1) == []
        page.type("[data-search]", "")
        assert len(column(page, 1)) == 22

        page.click(f"{ROWS} button")
        pieces = page.texts(".unfolded .tokens bdi")
        assert pieces == [f"<script>{t}&amp;</script>⟨U+202E⟩\u0634" for t in samples[5].tokens]
        assert page.texts(".unfolded b") == ["reward 5"]
        title = page.run("document.querySelector('.unfolded .sampled').title")
        assert title.startswith("sampled, log-prob -")
        page.click(f"{ROWS} button")
        assert page.texts(".unfolded") == []
        for selector in ("[data-sort]", f"{ROWS} td", f"{ROWS} button", "[data-search]", "select"):
            assert contrast(page, selector) > 4.5
        assert page.run("document.documentElement.scrollWidth") == width
        assert page.errors == []


def test_a_search_says_that_parts_of_long_samples_are_left_out(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=1)
    file = path / "kept/step-000000.safetensors"
    samples = load_samples(file)
    long = make_sample(99, 0, prompt_len=2, response_len=2 * HEAD, num_experts=8)
    long.tokens.fill_(1)
    long.tokens[HEAD + 1] = 98  # behind the head, before the tail
    assert all(98 not in sample.tokens for sample in samples)
    with opened(written(tmp_path, path)) as page:
        page.type("[data-search]", "script>98")
        assert page.texts("[data-found]") == ["0 of 10 samples contain it"]
    save_samples(file, [*samples, long], 0)
    with opened(written(tmp_path, path)) as page:
        assert page.texts("[data-found]") == ["11 samples"]
        page.type("[data-search]", "script>98")
        words = "0 of 11 samples contain it in the parts shown; parts of 1 are left out"
        assert page.texts("[data-found]") == [words]
        assert page.errors == []


def test_a_page_says_how_many_samples_it_leaves_out(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=3)
    with opened(written(tmp_path, path, options=("--samples", "12"))) as page:
        # 6 of the newest step, 2 of each other batch
        assert column(page, 1) == ["2"] * 6 + ["3"] * 2 + ["1"] * 2 + ["0"] * 2
        words = "12 of 22 recorded samples are on this page"
        assert any(words in text and "--samples 22" in text for text in page.texts("section p"))
    with opened(written(tmp_path, path, options=("--samples", "22"))) as page:
        assert len(column(page, 1)) == 22
        assert not any("recorded samples are on" in text for text in page.texts("section p"))


def test_highlighted_samples_are_distinct(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=1)
    file = path / "kept/step-000000.safetensors"
    samples = load_samples(file)
    twins = [replace(samples[5], index=index) for index in range(2, 5)]
    save_samples(file, [*samples, *twins], 0)
    with opened(written(tmp_path, path)) as page:
        assert page.texts("[data-best] b") == ["reward 5", "reward 4", "reward 1", "reward 0"]
        lengths = [len(samples[n].tokens) for n in (5, 4, 1, 0)]
        counted = (
            "Array.from(document.querySelectorAll('[data-best] .tokens'), e => e.children.length)"
        )
        assert page.run(counted) == lengths
        underlined = "document.querySelector('[data-best] [data-e]').style.borderBottomColor"
        before = page.run(underlined)
        page.run("document.querySelector('[data-route]').selectedIndex = 1")
        page.run("document.querySelector('[data-route]').dispatchEvent(new Event('change'))")
        assert page.run(underlined) != before


def write_scores(path: Path, sample: Sample, logprobs: torch.Tensor) -> None:
    """The trainer's log-probs of the tokens of a sample in step 0, the first one left out."""
    places = torch.arange(1, sample.tokens.numel(), dtype=torch.int32)
    scores = {
        "ids": torch.tensor([[sample.prompt_id, sample.index, sample.turn]]),
        "samples": torch.zeros_like(places),
        "tokens": places,
        "logprobs": logprobs,
    }
    (path / "kept/scores").mkdir()
    save_file(scores, path / "kept/scores/step-000000-rank-0.safetensors")


def test_log_probs_and_rewards_that_are_not_finite_are_shown_as_missing(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=1)
    file = path / "kept/step-000000.safetensors"
    samples = load_samples(file)
    samples[5] = replace(samples[5], components={"right": math.nan, "short": -math.inf})
    samples[0] = replace(samples[0], reward=math.nan)
    save_samples(file, samples, 0)
    trainer = samples[5].rollout_logprobs[1:] + 0.2
    trainer[-1] = math.nan
    trainer[-2] = -math.inf
    write_scores(path, samples[5], trainer)
    with opened(written(tmp_path, path)) as page:
        first = "[data-best] .sample:first-child"
        assert page.texts(f"{first} b") == ["reward 5"]
        count = len(samples[5].response)
        assert count > 2
        assert len(page.texts(f"{first} .sampled.tone-3")) == count - 2
        assert len(page.texts(f"{first} .sampled.tone-missing")) == 2
        title = page.run("document.querySelector('.tone-missing').title")
        assert "; no finite log-prob of the trainer" in title
        assert column(page, 5)[0] == "–" and column(page, 6)[5] == column(page, 7)[5] == "–"
        assert page.errors == []


def test_configs_are_shown_and_compared(tmp_path: Path):
    paths = [
        write_recorded(tmp_path / "a", steps=1, settings=["optimizer.lr=1e-3", "seed=7"]),
        write_recorded(tmp_path / "b", steps=1, settings=["optimizer.lr=2e-3", "seed=7"]),
    ]
    with opened(written(tmp_path, *paths)) as page:
        assert page.texts(".differ thead th") == ["key", "a", "b"]
        rows = page.run(
            "Array.from(document.querySelectorAll('.differ tbody tr'), (row) => "
            "Array.from(row.cells, (cell) => cell.textContent))"
        )
        tokenizers = [json.dumps(str(path)) for path in paths]
        assert rows == [["model.tokenizer", *tokenizers], ["optimizer.lr", "0.001", "0.002"]]
        changed = page.texts(".config.changed th code")
        assert changed.count("optimizer.lr") == changed.count("seed") == 2
        assert "log.tensorboard" not in changed
        shown = "document.querySelector('#config-0 .config').checkVisibility()"
        assert not page.run(shown)
        page.click("#config-0 summary")
        assert page.run(shown)
        assert "log.tensorboard" in page.texts("#config-0 .config th code")


def axis(page: Page) -> list[list[str]]:
    """Texts of the x axis of each chart at the top: ticks, then the label."""
    return page.run(
        f"Array.from(document.querySelectorAll('{CHARTS}'), (chart) => Array.from("
        "chart.querySelectorAll('.plot text[text-anchor=middle]:not([transform])'), "
        "(text) => text.textContent))"
    )


def test_curves_have_axes_with_units_and_zoom_together(tmp_path: Path):
    path = write_history(tmp_path / "a", 200)
    with opened(written(tmp_path, path)) as page:
        charts = page.texts(f"{CHARTS} figcaption b")
        units = page.texts(f"{CHARTS} .plot text[transform]")
        found = dict(zip(charts, units, strict=True))
        assert found["reward"] == "reward" and found["mismatch/abs_mean"] == "nat"
        assert found["tokens_per_s"] == "tokens/s" and found["grad_norm"] == ""
        assert page.texts(f"{CHARTS} figcaption .unit")[0].startswith("warn ")  # no unit twice
        words = dict(zip(charts, page.texts(f"{CHARTS} .words"), strict=True))
        assert "mean(|d|). d = old - rollout is a token's log-prob" in words["mismatch/abs_mean"]
        assert "d = old" not in words["reward"]
        whole = axis(page)
        assert all(texts[-1] == "step" and texts[0] == "0" for texts in whole)

        page.drag(f"{CHARTS} .plot", 0.5, 0.75)
        zoomed = axis(page)
        assert all(texts == zoomed[0] for texts in zoomed)
        ticks = [int(text) for text in zoomed[0][:-1]]
        assert min(ticks) >= 80 and max(ticks) <= 150 and len(ticks) >= 3
        assert page.run("!document.querySelector('[data-whole]').hidden")
        page.click(f"{CHARTS} .plot", number=1, times=2)
        assert axis(page) == whole
        page.drag(f"{CHARTS} .plot", 0.75, 0.5)  # from right to left
        assert axis(page) == zoomed
        page.click("[data-whole]")
        assert axis(page) == whole

        page.run("document.querySelector('[data-axis]').value = 'hours'")
        page.run("document.querySelector('[data-axis]').dispatchEvent(new Event('change'))")
        hours = axis(page)
        assert all(texts[-1] == "hours of the run" for texts in hours)
        assert max(float(text) for text in hours[0][:-1]) <= 200 / 3600  # a step takes 1 s
        page.click(f"{CHARTS} .plot")  # the pointer rests in the middle
        step, _, time = page.texts(f"{CHARTS} output span")[0].partition(", ")
        at = int(step.removeprefix("step "))
        assert 80 <= at <= 120 and time == f"{float(f'{(at + 1) / 3600:.4g}'):g} h"
        page.click(f"{CHARTS} .words")
        assert page.run(f"document.querySelector('{CHARTS} .words.whole') !== null")
        assert page.errors == []


def test_only_a_drag_with_the_left_button_that_begins_in_a_chart_zooms(tmp_path: Path):
    path = write_history(tmp_path / "a", 200)
    with opened(written(tmp_path, path)) as page:
        whole = axis(page)
        plot = f"{CHARTS} .plot"
        page.drag(plot, 0.25, 0.75, above=8)  # from the caption
        assert axis(page) == whole
        page.drag(plot, 0.25, 0.75, button="right")
        assert axis(page) == whole
        page.drag(plot, 0.25, 0.75)
        assert axis(page) != whole
        assert page.errors == []


def test_a_page_without_storage_shows_curves_and_samples(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=3)
    assert main([str(path), "--html"]) == 0
    content = base64.b64encode((path / "report.html").read_bytes()).decode()
    with opened(f"data:text/html;base64,{content}") as page:  # browsers deny it storage
        denied = "try { sessionStorage; 'allowed' } catch (error) { error.name }"
        assert page.run(denied) == "SecurityError"
        assert page.run(f"document.querySelector('{CHARTS} .plot path') !== null")
        assert len(column(page, 1)) == 22
        page.run("dispatchEvent(new Event('pagehide'))")  # as if the reader left it
        assert page.errors == []


def test_a_page_without_differing_routes_has_no_empty_map(tmp_path: Path):
    agreed = {f"route/agree_topk/layer_{n}": 1.0 for n in range(1, 5)}
    path = write_history(tmp_path / "a", 5, 4, **agreed)
    other = write_history(tmp_path / "b", 5)
    with opened(written(tmp_path, path)) as page:
        assert any("They agree everywhere." in text for text in page.texts("section p"))
        assert page.run("document.querySelectorAll('canvas').length") == 0
    with opened(written(tmp_path, other)) as page:
        assert page.run("document.querySelectorAll('canvas').length") == 1


def test_a_page_without_routes_shows_evaluations(tmp_path: Path):
    path = write_history(tmp_path / "a", 5, layers=0)
    estimate = {"mean": 0.5, "error": 0.125}
    result = {"prompts": 4, "samples": 1, "temperature": 0, "reward": estimate, "passes": {}}
    result |= {"truncated": 0.25, "length": 9.5}
    row = {"time": "2026-11-27T21:00:00", "weights": "w/step-5", "sets": {"sums": result}}
    (path / "eval").mkdir()
    (path / "eval/results.jsonl").write_text(json.dumps(row) + "\n")
    with opened(written(tmp_path, path)) as page:
        assert "Evaluations" in page.texts("h2")
        assert "0.500 ± 0.125" in page.texts("td")


def test_watch_builds_the_page_again_and_keeps_what_the_reader_set(tmp_path: Path):
    path = write_recorded(tmp_path / "a", steps=3)
    metrics = path / "metrics.jsonl"
    text = metrics.read_text()
    metrics.unlink()
    with watching(path) as (server, address):
        assert address.startswith("http://127.0.0.1:")
        with opened(address) as page:
            assert "metrics.jsonl, expected a run folder" in page.texts("body")[0]
            metrics.write_text(text)  # the first steps are finished
            page.wait("document.querySelector('[data-search]') !== null")
            assert page.texts(".figures b")[0] == "step 3"
            page.type("[data-search]", "script")
            page.click("[data-sort=length]")
            page.click(f"{ROWS} button")
            page.drag(f"{CHARTS} .plot", 0.2, 0.8)
            page.click("#config-0 summary")
            opened_row = page.texts(".unfolded")
            zoomed = axis(page)
            page.click("[data-search]")
            scrolled = page.run("scrollY")
            assert scrolled > 100
            sink = JsonlSink(metrics)
            sink.write({"step": 3, "reward": 0.5, "loss": 0.1})
            sink.close()
            page.wait("(document.querySelector('.figures b') || {}).textContent === 'step 4'")
            page.wait("document.readyState === 'complete'")
            assert page.run("document.querySelector('[data-search]').value") == "script"
            lengths = [int(each) for each in column(page, 8)]
            assert lengths == sorted(lengths)
            assert page.texts(".unfolded") == opened_row
            assert axis(page) == zoomed
            assert page.run("document.querySelector('#config-0').open")
            assert page.run("scrollY") == scrolled
            assert page.run("document.activeElement.matches('[data-search]')")
            assert page.errors == []
        server.send_signal(signal.SIGINT)
        assert server.wait(DEADLINE) == 0


def answer(address: str, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""
    place = urlsplit(address)
    assert place.hostname is not None
    connection = HTTPConnection(place.hostname, place.port, timeout=DEADLINE)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def test_watch_answers_the_methods_and_hosts_of_its_own_page_alone(tmp_path: Path):
    path = write_history(tmp_path / "a", 3)
    with watching(path) as (_, address):
        status, text = answer(address)
        assert status == 200 and "<h1>" in text
        assert answer(address, path="/?a") == (200, text)
        assert answer(address, "HEAD") == (200, "")
        assert answer(address, path="/a")[0] == answer(address, "HEAD", "/a")[0] == 404
        for own in ("localhost:1", "127.0.0.1", "[::1]:80", "10.1.2.3:8000"):
            assert answer(address, Host=own) == (200, text)
        for other in ("evil.example:8000", "", "[", "127.0.0.1.evil.example"):
            for place in ("/", "/version"):
                status, words = answer(address, path=place, Host=other)
                wanted = f"Host {other}: expected localhost, an IP address or 127.0.0.1; to answer"
                assert status == 403 and words.startswith(wanted)
    with watching(path, "--host", "0.0.0.0") as (_, address):
        assert answer(address, Host="node.example")[0] == 200


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address ::1")
def test_watch_serves_on_an_address_of_ipv6(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_history(tmp_path / "a", 3)
    with watching(path, "--host", "::1") as (_, address):
        assert address.startswith("http://[::1]:")
        assert answer(address)[0] == 200
        port = urlsplit(address).port
        assert main([str(path), "--watch", "--host", "::1", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"--host ::1 --port {port}: port {port} is held by python")


def test_watch_prints_nothing_when_a_browser_leaves(tmp_path: Path):
    path = write_history(tmp_path / "a", 3)
    at_once = struct.pack("ii", 1, 0)  # close resets the connection
    with watching(path) as (server, address):
        place = urlsplit(address)
        for request in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") * 3:
            with socket.create_connection((place.hostname, place.port), DEADLINE) as left:
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                left.sendall(request)
        assert answer(address)[0] == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(DEADLINE) == 0
        assert server.stderr is not None
        assert server.stderr.read() == ""


def test_watch_names_the_process_that_holds_its_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_history(tmp_path / "a", 3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(path), "--watch", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"--host 127.0.0.1 --port {port}: port {port} is held by ")
    assert f"(pid {os.getpid()}), expected an address of this machine and a free port." in error
    assert main([str(tmp_path / "none"), "--watch"]) == 2
    assert "none: no such folder, expected the folder of a run" in capsys.readouterr().err
    for wrong in (
        ["--port", "9"],
        ["--watch", "--host", ""],
        ["--watch", "--port", "70000"],
        ["--samples", "-1"],
    ):
        with pytest.raises(SystemExit):
            main([str(path), *wrong])
    error = capsys.readouterr().err
    assert "--host and --port need --watch" in error and '--host "", expected an address' in error
