"""Histories of runs for the report's page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pyrl_ext.data.recordings import save_samples
from pyrl_ext.metrics.sinks import JsonlSink
from pyrl_ext.tools.report.page import report_page
from pyrl_ext.tools.report.state import folders
from tests.helpers import browser
from tests.helpers.samples import make_samples
from tests.helpers.tiny import QUICK, tiny_plan


def write_history(folder: Path, steps: int, layers: int = 4, **more: float) -> Path:
    """A run folder with metrics alone, through the sink that runs write with."""
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(steps):
        wave = math.sin(step / 7)
        row = {"step": step, "reward": step / steps, "loss": 0.1 * wave, "grad_norm": 1 + wave / 2}
        row |= {"mismatch/abs_mean": 1e-3 * 10 ** (step / steps), "mismatch/k3": 1e-5}
        row |= {"route/agree_topk": 0.95, "age/share_0": 0.5, "age/share_10": 0.5}
        row |= {f"route/agree_topk/layer_{n}": 0.95 - n / 100 for n in range(1, layers + 1)}
        row |= {"time/rollout": 0.5, "time/update": 0.25, "time/publish": 0.1, "time/step": 1.0}
        if step % 10 == 0:
            row["eval_reward"] = step / steps / 2
        sink.write(row | {"tokens_per_s": 2000 + 10 * wave} | more)
    sink.close()
    return folder


def write_recorded(folder: Path, steps: int, settings: Sequence[str] = ()) -> Path:
    """A run folder with metrics, and 6 recorded samples of each step, whose rewards are 0 to 5 and
    have two parts, and of the set "sums" after the last step; a token is a piece of hostile HTML.

    Args:
        folder: to make
        steps: number of steps
        settings: overrides of the plan
    """
    write_history(folder, steps)
    words = {f"<script>{n}&amp;</script>\u202e\u0634": n for n in range(99)}
    Tokenizer(WordLevel(words)).save(str(folder / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (folder / "tokenizer_config.json").write_text(config)
    plan = tiny_plan(*QUICK, "rollout.record=kept", *settings)
    text = json.loads(plan.to_json())
    text["model"]["tokenizer"] = str(folder)
    (folder / "plan.json").write_text(json.dumps(text))
    samples = make_samples(3, 2, num_experts=plan.sizes.num_experts)
    for n, sample in enumerate(samples):
        parts = {"right": n / 2, "short": n / 2}
        samples[n] = replace(sample, reward=float(n), components=parts)
    for step in range(steps):
        save_samples(folder / f"kept/step-{step:06d}.safetensors", samples, step)
    save_samples(folder / f"kept/eval/sums/step-{steps:06d}.safetensors", samples[:4], steps)
    return folder


def page_of(*paths: Path) -> str:
    return report_page(folders([str(path) for path in paths]))


def data_of(page: str) -> dict:
    """The numbers that the page's script draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def opened(folder: Path, *paths: Path, dark: bool = False, width: int = 1280) -> dict:
    """The findings of measure_run_page.js in the page of some runs; its picture is page.png of
    ``folder``."""
    copy = folder / "page.html"
    picture = folder / "page.png"
    script = Path(browser.__file__).with_name("measure_run_page.js").read_text(encoding="utf-8")
    page = re.sub(r"<meta http-equiv.*?>", "", page_of(*paths), count=1)  # lets the script in
    copy.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    left = browser.look(copy, picture, dark, (width, 1600))
    title = re.search(r"<title>(\{.*?\})</title>", left, re.S)
    assert title, left[-2000:]
    return json.loads(unescape(title[1]))
