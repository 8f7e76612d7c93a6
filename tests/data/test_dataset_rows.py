"""Datasets of the library `datasets`, and columns with other names, against the library itself."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import datasets
import pytest

from pyrl_ext.data.dataset_rows import DatasetRows, Renamed, open_data
from pyrl_ext.data.files import Broken, DataError, open_records
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.plan import ConfigError
from tests.helpers.configs import CONFIGS
from tests.helpers.prompts import write_lines
from tests.helpers.tiny import tiny_plan

ROWS = [{"question": f"{i}+1=", "solution": {"value": i + 1, "level": "easy"}} for i in range(9)]
COLUMNS = "data.columns={prompt: question, answer: solution.value}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a train and a test split, and a cache for the library."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    folder.mkdir()
    write_lines(folder / "train.jsonl", *ROWS)
    datasets.Dataset.from_list(ROWS[:4]).to_parquet(folder / "test.parquet")
    (folder / "test.parquet").unlink()
    write_lines(folder / "test.jsonl", *ROWS[:4])
    return folder


def overrides(name: str | Path, *more: str) -> tuple[str, ...]:
    return (
        "data.task=null",
        "data.task_options={}",
        f"data.prompts={name}",
        "data.reward=number_match",
        *more,
    )


def test_rows_are_those_of_the_library(folder: Path):
    rows = DatasetRows(str(folder), None, "train[2:5]")
    want = datasets.load_dataset(str(folder), split="train[2:5]")
    assert len(rows) == 3
    assert [rows.read(i) for i in range(3)] == list(want)
    assert rows.where(1) == f"{folder}, train[2:5]: row 1"


def test_a_run_trains_on_one_split_and_holds_out_the_other(folder: Path):
    plan = tiny_plan(*overrides(folder, COLUMNS, "data.eval_split=test", "data.shuffle=false"))
    source = build_source(plan)
    prompts = source.prompts.take(0, 9)
    assert [p.text for p in prompts] == [row["question"] for row in ROWS]
    assert [p.answer for p in prompts] == [row["solution"]["value"] for row in ROWS]
    assert [p.answer for p in source.prompts.held_out(9)] == [1, 2, 3, 4]


def test_a_set_to_evaluate_on_is_a_split(folder: Path):
    evaluation = f"evaluate.sets={{few: {{file: {folder}, prompts: 2}}}}"
    source = build_source(tiny_plan(*overrides(folder, COLUMNS, evaluation)))
    assert [p.answer for p in source.sets["few"].prompts] == [1, 2]


def test_sets_that_name_the_same_reward_share_its_workers(folder: Path):
    own = "reward: 'tests.helpers.judges:judge'"
    evaluation = f"evaluate.sets={{a: {{file: {folder}, {own}}}, b: {{file: {folder}, {own}}}}}"
    with closing(build_source(tiny_plan(*overrides(folder, COLUMNS, evaluation)))) as source:
        rewards = [each.reward for each in source.sets.values()]
    assert rewards[0] is rewards[1] is not source.reward


def test_columns_of_a_file_have_other_names(tmp_path: Path):
    file = write_lines(tmp_path / "a.jsonl", *ROWS)
    plan = tiny_plan(*overrides(file, COLUMNS))
    records = open_data(plan, str(file), "train", None, plan.data.columns)
    assert records.read(3) == {"prompt": "3+1=", "answer": 4, "solution": ROWS[3]["solution"]}
    assert records.where(3) == f"{file}:4"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "problem"}, "no column problem among question, solution, expected the one"),
        ({"answer": "solution.final"}, "no column solution.final among question, solution"),
        ({"answer": "question.final"}, "no column question.final among question, solution"),
    ],
    ids=str,
)
def test_a_missing_column_is_named(tmp_path: Path, columns: dict[str, str], message: str):
    records = Renamed(open_records(write_lines(tmp_path / "a.jsonl", *ROWS)), columns)
    with pytest.raises(Broken, match=message):
        records.read(0)


def test_a_column_with_a_dot_in_its_name_is_found(tmp_path: Path):
    records = open_records(write_lines(tmp_path / "a.jsonl", {"a.b": 1, "a": {"b": 2}}))
    assert Renamed(records, {"answer": "a.b"}).read(0)["answer"] == 1


def test_a_folder_or_split_that_does_not_load_says_so(folder: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"split dev: ValueError: Unknown split \"dev\""):
        DatasetRows(str(folder), None, "dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty, subset None, split train: .* data\.split"):
        DatasetRows(str(tmp_path / "empty"), None, "train")


def test_an_id_of_the_hub_that_cannot_be_reached_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"^pyrl-tests/no-such-set, subset main, split train: "):
        DatasetRows("pyrl-tests/no-such-set", "main", "train")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("prompts", "data/sums.csv"),
        ("prompts", "data/sums.JSONL"),
        ("prompts", "data/no_such_folder"),
        ("prompts", "data/sums.jsonl.gz"),
        ("path", "data"),
        ("path", "owner/name"),
    ],
)
def test_what_is_neither_a_file_nor_a_dataset_is_an_error_of_the_plan(key: str, name: str):
    """configs/data is there, so nothing in it is a dataset of the hub."""
    keys = overrides(name)
    if key == "path":
        keys = ("objective=sft", f"data.path={name}", "data.max_tokens=64", "batching.samples=4")
    base = CONFIGS / ("tiny.yaml" if key == "prompts" else "tiny_sft.yaml")
    with pytest.raises(ConfigError, match=rf"data\.{key}.*{re.escape(name)}'?, expected a .jsonl"):
        tiny_plan(*keys, config=base)


def test_an_id_of_the_hub_is_a_dataset_of_the_plan():
    plan = tiny_plan(*overrides("openai/gsm8k"))
    assert plan.is_dataset("openai/gsm8k") and plan.is_hub_id("openai/gsm8k")
