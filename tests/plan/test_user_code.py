"""Functions of the user that a plan names: found, or missed, without running their modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.records import first_lines, has_chat_template
from pyrl_ext.plan.user_code import function_problem
from tests.helpers.configs import SMALL, TINY, problems_of

MODULE = """\
import torch
from os.path import join as joined
raise RuntimeError("this module ran")
try:
    import fast
except ImportError:
    fast = None
else:
    def quick(): ...
if fast:
    async def answer(): ...
class Game: ...
first, (second, *others) = load()
alias: object = Game
def _hidden(): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_code.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("def f(:\n")
    (tmp_path / "own_star.py").write_text("from os.path import *\n")
    (tmp_path / "own_dynamic.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "own_globals.py").write_text("globals()['made'] = print\n")
    (tmp_path / "own_package/inner").mkdir(parents=True)  # without __init__.py
    (tmp_path / "own_package/inner/code.py").write_text("def f(): ...\n")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"own_code:{n}"
            for n in ("joined", "fast", "quick", "answer", "Game", "second", "alias")
        ),
        "own_code:others",
        "own_code:Game.play",
        "own_star:join",
        "own_dynamic:anything",
        "own_globals:made",
        "own_package.inner.code:f",
        "json:dumps",
        "math:sqrt",  # no Python file
        "pyrl_ext.data.rewards:number_match",
        "__main__:main",
    ],
)
def test_function_problem_finds_what_is_there(folder: Path, name: str):
    assert function_problem(name, str(folder)) is None
    assert not {each for each in sys.modules if each.startswith("own_")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nothing:f", "no module 'own_nothing', expected one next to the YAML file ("),
        ("own_package.outer.code:f", "no module 'own_package.outer', expected"),
        ("own_code.inner:f", "no module 'own_code.inner', expected"),
        (
            "own_code:game",
            "no 'game' in {folder}/own_code.py, expected one of Game. Did you mean G",
        ),
        (
            "own_broken:f",
            "{folder}/own_broken.py:1: invalid syntax, expected a module that imports",
        ),
    ],
)
def test_function_problem_says_what_is_missing(folder: Path, name: str, message: str):
    problem = str(function_problem(name, str(folder)))
    assert problem.startswith(f"{name!r}: {message.format(folder=folder)}"), problem


SIGNATURES = """
def two(prompt, text): ...
def trls(completions, **kwargs): ...
def four(prompt, text, tokens, weight): ...
async def keyword(prompt, text, tokens, *, weight): ...
def three(prompt, text, tokens): ...
async def more(prompt, text, tokens, weight=1.0, *, scale=2.0): ...
def any_number(*values): ...
def none_needed(prompt=None, text="", tokens=()): ...
@wrapped
def decorated(prompt): ...
def twice(prompt): ...
twice = made(twice)
class Scorer:
    def __init__(self, prompt): ...
"""


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("two", "prompt, text"),
        ("trls", "completions, **kwargs"),
        ("four", "prompt, text, tokens, weight"),
        ("keyword", "prompt, text, tokens, *, weight"),
        ("three", None),
        ("more", None),
        ("any_number", None),
        ("none_needed", None),
        ("decorated", None),
        ("twice", None),
        ("Scorer", None),
        ("Scorer.score", None),
    ],
)
def test_function_problem_reads_the_arguments_of_a_function(
    tmp_path: Path, name: str, signature: str | None
):
    file = tmp_path / "own_signatures.py"
    file.write_text(SIGNATURES)
    takes = ("prompt", "text", "tokens")
    found = function_problem(f"own_signatures:{name}", str(tmp_path), takes)
    if signature is None:
        assert found is None
        return
    line = next(i for i, each in enumerate(SIGNATURES.splitlines(), 1) if f"def {name}(" in each)
    assert found == (
        f"'own_signatures:{name}': {file}:{line}: {name} takes ({signature}), expected 3 "
        "positional arguments: prompt, text, tokens"
    )


def test_compile_plan_finds_functions_next_to_the_main_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "config.json").write_text(TINY.read_text())
    path = folder / "mine.yaml"
    path.write_text(SMALL + "objective: {loss: 'own_code:answer'}\n")
    monkeypatch.chdir(Path(__file__).parent)
    assert compile_plan(path).objective.loss == "own_code:answer"
    other = folder / "other"
    other.mkdir()
    path = other / "mine.yaml"
    path.write_text("extends: ../mine.yaml\n")
    (found,) = problems_of(path)
    assert "no module 'own_code'" in found
    monkeypatch.syspath_prepend(folder)
    assert compile_plan(path).objective.loss == "own_code:answer"


def test_first_lines_are_few_and_whole(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n{"a":\n\n' + "[2]\n" * 300)
    found = [*first_lines(str(path))]
    assert found[:3] == [(2, b'{"a": 1}'), (3, b'{"a":'), (5, b"[2]")]
    assert len(found) == 100
    path.write_text("7" * 3_000_000 + "\n8\n")
    assert [*first_lines(str(path))] == []


def test_compile_plan_looks_at_the_first_rows_of_a_parquet_file(folder: Path):
    (folder / "config.json").write_text(TINY.read_text())
    path = folder / "rows.yaml"
    path.write_text(SMALL.replace("task: copy", "prompts: a.parquet, reward: posixpath:join"))
    rows = folder / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1", "2"], "answer": ["3", None]}), rows)
    assert compile_plan(path).data.prompts == "a.parquet"
    (problem,) = problems_of(path, "data.reward=pyrl_ext.data.rewards:exact_match")
    assert f"data.prompts: {rows}: row 1: no answer, expected one; the reward" in problem
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1"] * 200}), rows)
    (problem,) = problems_of(path)
    assert "100 of the first 100 records: fields question, expected either" in problem
    assert problem.endswith(f"first at {rows}: row 0")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": []}), rows)
    (problem,) = problems_of(path)
    assert f"{rows}: no records, expected at least one" in problem
    rows.write_text('{"prompt": "1"}')
    (problem,) = problems_of(path)
    assert f"data.prompts: {rows}: Parquet magic bytes not found" in problem
    assert problem.endswith(", expected a parquet file")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"tokenizer_config.json": "{}"}, False),
        ({"tokenizer_config.json": '{"chat_template": null}'}, False),
        ({"tokenizer_config.json": "[1"}, False),
        ({"tokenizer_config.json": '{"chat_template": "{{ x }}"}'}, True),
        ({"chat_template.jinja": "{{ x }}"}, True),
    ],
)
def test_has_chat_template_looks_where_transformers_does(
    tmp_path: Path, files: dict[str, str], expected: bool
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert has_chat_template(tmp_path) == expected
