"""The demo of a model that sees, in short: in one process, and with its tower on two ranks."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pyrl_ext import train
from pyrl_ext.metrics.glossary import check_names
from pyrl_ext.metrics.sinks import read_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

VL = CONFIG.with_name("tiny_vl.yaml")
SHORT = ("batching.prompts=4", "batching.samples_per_prompt=4", "batching.minibatches=2")
SHORT += ("evaluate.every=2", "evaluate.prompts=8", "checkpoint.every=1", "log.progress=false")
OWN = ("modules.vision.ranks=own", "modules.vision.parallel.dp=2")
STEPS = 3


def run(folder: Path, *overrides: str) -> int:
    named = {each.split("=")[0] for each in overrides}
    short = [each for each in SHORT if each.split("=")[0] not in named]
    return train.main([str(VL), f"run={folder}", *short, *overrides])


def on_three_ranks(_group: Any, folder: Path) -> list[int]:
    """A whole run, the rest of one that one process began, and the begin of another."""
    os.environ["WORLD_SIZE"] = "3"
    whole = run(folder / "own", f"steps={STEPS}", *OWN)
    rest = run(folder / "shared-own", f"steps={STEPS}", *OWN)
    return [whole, rest, run(folder / "own-shared", "steps=1", *OWN)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Run -> its rows: in one process, on three ranks, and changed in between."""
    folder = tmp_path_factory.mktemp("vl")
    assert run(folder / "shared", f"steps={STEPS}") == 0
    assert run(folder / "shared-own", "steps=1") == 0
    assert run_ranks(on_three_ranks, 3, folder) == [[0, 0, 0]] * 3
    assert run(folder / "own-shared", f"steps={STEPS}") == 0
    return {each.name: rows_of(each) for each in folder.iterdir()}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / "metrics.jsonl")
    check_names(set().union(*rows))  # every metric of a run has a definition
    return rows


@pytest.mark.parametrize("name", ["own", "shared-own", "own-shared"])
def test_the_demo_has_the_same_numbers_wherever_its_tower_is(runs: dict[str, Any], name: str):
    assert len(runs["shared"]) == len(runs[name]) >= STEPS
    for one, other in zip(runs["shared"], runs[name], strict=True):
        assert {k for k in one if "/" not in k} <= other.keys()
        for key in ("reward", "eval_reward", "rollout/tokens", "rollout/response_len"):
            assert one.get(key) == other.get(key), (key, one["step"])
        for key in ("loss", "grad_norm", "policy/entropy", "policy/ppo_kl"):
            assert other.get(key) == pytest.approx(one.get(key), abs=1e-5), (key, one["step"])


def test_the_demo_replays_every_row_as_the_engine_routed_it(runs: dict[str, Any]):
    for row in (row for rows in runs.values() for row in rows if "loss" in row):
        assert row["route/agree_topk"] == row["route/coverage"] == 1
        assert row["mismatch/max"] < 1e-5 and row["grad_norm"] > 0


# pictures of one's own ----------------------------------------------------------------------------


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
GOOD = png(Image.fromarray(NOISE))
BAD = {
    "gone.png": (None, "no such file, expected an image file"),
    "corrupt.png": (b"\x89PNG corrupt", "expected an image (PNG, JPEG, WEBP, BMP, GIF)"),
    "cut.png": (GOOD[:1500], "expected an image that can be decoded"),
    "bomb.png": (png(Image.new("1", (2**13 + 1, 2**13))), "8193 x 8192 pixels, expected at most"),
    "thin.png": (png(Image.new("RGB", (2, 402))), "2 x 402 pixels"),
}


def ask(folder: Path, *pictures: str) -> tuple[str, ...]:
    """Overrides of a run on prompts with these pictures, each in a record."""
    parts = [[{"type": "image", "image": name}, {"type": "text", "text": "?"}] for name in pictures]
    turns = [[{"role": "user", "content": each}] for each in parts]
    lines = [json.dumps({"messages": each, "answer": "1"}) + "\n" for each in turns]
    (folder / "asked.jsonl").write_text("".join(lines))
    (folder / "good.png").write_bytes(GOOD)
    files = (f"data.prompts={folder}/asked.jsonl", f"data.eval_prompts={folder}/asked.jsonl")
    reward = "data.reward=pyrl_ext.data.rewards:exact_match"
    return ("data.task=null", "data.task_options={}", *files, reward)


@pytest.mark.parametrize("name", BAD)
def test_main_names_the_record_of_a_bad_picture_before_a_model_is_built(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert run(tmp_path / "run", *ask(tmp_path, "good.png", name), "steps=1") == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/asked.jsonl:2: image 0: " in error and message in error
    assert "1 of 2 records" in error and "Traceback" not in error
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_main_names_the_record_of_a_picture_that_is_corrupt_inside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Pixels are decoded in the step that asks about them; steps before it are kept."""
    (tmp_path / "bad.png").write_bytes(GOOD[:1500] + bytes(100) + GOOD[1600:])
    asked = ask(tmp_path, *["good.png"] * 4, "bad.png")
    order = ("data.shuffle=false", "evaluate.every=0", "steps=2")
    assert run(tmp_path / "run", *asked, *order) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/asked.jsonl:5: image {tmp_path}/bad.png: " in error
    assert "expected an image that can be decoded" in error and "Traceback" not in error
    (tmp_path / "bad.png").write_bytes(GOOD)
    assert run(tmp_path / "run", *asked, *order) == 0
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1]


def test_main_trains_on_the_shipped_pictures(tmp_path: Path):
    shipped = ("data.task=null", "data.task_options={}", "data.prompts=data/squares.jsonl")
    reward = "data.reward=pyrl_ext.data.rewards:number_match"
    assert run(tmp_path, *shipped, reward, "steps=1") == 0
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1]
