"""The language of a config: parents and sizes; and what the command says about keys."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.compile import load
from pyrl_ext.plan.language.errors import fields_of
from pyrl_ext.plan.language.resolve import read_size
from pyrl_ext.plan.language.synonyms import SYNONYMS
from pyrl_ext.plan.show.reference import page
from tests.helpers.configs import REPOSITORY, SMALL, TINY, problems_of


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)  # messages show paths from here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base/base.yaml` next to the tiny model's sizes, for files in the folder to extend."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text(TINY.read_text())
    (folder / "base/base.yaml").write_text(SMALL)
    return folder


def written(folder: Path, text: str, name: str = "child.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def child(folder: Path, text: str) -> Path:
    return written(folder, "extends: base/base.yaml\n" + text)


# Parents -----------------------------------------------------------------------------------------


def test_compile_plan_takes_what_a_child_leaves_out_from_its_parent(folder: Path):
    base = compile_plan(folder / "base/base.yaml")
    plan = compile_plan(child(folder, "parallel: {dp: 2}\nrollout: {max_new_tokens: 5}\n"))
    assert (plan.parallel.dp, plan.rollout.max_new_tokens) == (2, 5)
    assert plan.rollout.engine == "hf"
    assert plan.config_path == base.config_path
    assert plan.model.config == "base/config.json"
    assert plan.tokenizer_path == "owner/name"


@pytest.mark.parametrize(
    ("parent", "mine", "expected"),
    [
        ("{a: 1, b: 2}", "{b: 3}", {"a": 1, "b": 3}),
        ("{a: [1, 2]}", "{a: [3]}", {"a": [3]}),
        ("{a: {x: 1}}", "{a: {y: 2}}", {"a": {"y": 2}}),
        ("{a: 1}", "{a: null}", {"a": None}),
        ("{a: 1}", "{}", {}),
    ],
)
def test_load_merges_options_and_replaces_what_is_in_them(
    folder: Path, parent: str, mine: str, expected: object
):
    text = f"extends: base.yaml\nmodel: {{megatron: {parent}}}\n"
    written(folder, text, "base/middle.yaml")
    path = written(folder, f"extends: base/middle.yaml\nmodel: {{megatron: {mine}}}\n")
    assert load(path).tree["model"]["megatron"] == expected


def test_compile_plan_merges_replay_pass_by_pass(folder: Path):
    written(folder, "extends: base.yaml\nreplay: off\n", "base/middle.yaml")
    path = written(folder, "extends: base/middle.yaml\nreplay: {train: on}\n")
    replay = compile_plan(path).replay
    assert (replay.old, replay.reference, replay.train) == (False, False, True)
    assert compile_plan(path, ["replay=on"]).replay.old
    assert not compile_plan(path, ["replay=on", "replay.old=off"]).replay.old
    found = compile_plan(path, ["replay=trainer"]).replay
    assert (found.source, found.old, found.reference, found.train) == ("trainer", False, True, True)
    assert found.of_trainer and not found.of_engine


def test_compile_plan_places_problems_in_the_file_that_wrote_them(folder: Path):
    middle = written(folder, "extends: base.yaml\nparallel:\n  tp: 3\n", "base/middle.yaml")
    path = written(folder, "extends: base/middle.yaml\nsteps: 0\nzzz: 1\nparallel: {dp: x}\n")
    found = problems_of(path)
    assert {line.partition(": ")[0] for line in found} == {
        f"{middle}:3",
        f"{path}:2",
        f"{path}:3",
        f"{path}:4",
    }
    assert any(line.startswith(f"{middle}:3: parallel.tp: 3 does not divide") for line in found)
    # the child's value takes its place
    path.write_text("extends: base/middle.yaml\nparallel: {tp: 2}\n")
    assert compile_plan(path).parallel.tp == 2


def test_resolve_starts_paths_where_they_are_written(folder: Path):
    (folder / "base/words").mkdir(exist_ok=True)
    (folder / "base/words/tokenizer.json").write_text("{}")
    for place in ("base/a.jsonl", "b.jsonl"):
        (folder / place).write_text('{"prompt": "a"}')
    written(
        folder,
        "extends: base.yaml\nmodel: {tokenizer: words}\n"
        "data:\n  task: null\n  prompts: a.jsonl\n  reward: posixpath:join\n"
        "  eval_prompts: a.jsonl\n",
        "base/middle.yaml",
    )
    path = written(folder, "extends: base/middle.yaml\nsteps: 3\n")
    plan = compile_plan(path)
    assert plan.tokenizer_path == str(folder / "base/words")
    for name in (plan.data.prompts, plan.data.eval_prompts):
        assert plan.resolve(str(name)) == str(folder / "base/a.jsonl")
    path.write_text("extends: base/middle.yaml\ndata: {eval_prompts: b.jsonl}\n")
    plan = compile_plan(path)
    assert plan.resolve(str(plan.data.eval_prompts)) == str(folder / "b.jsonl")
    plan = compile_plan(folder / "base/middle.yaml", ["data.eval_prompts=../b.jsonl"])
    assert plan.resolve(str(plan.data.eval_prompts)) == str(folder / "b.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.yaml", "extends: {folder}/none.yaml: No such file or directory"),
        ("base", "extends: {folder}/base: Is a directory"),
        ("[a]", "extends: {folder}/a: No such file or directory"),
        ("[a, 3]", "extends: ['a', 3], expected another YAML file, relative to this one, or a"),
        ("[]", "extends: [], expected another YAML file"),
        ('""', "extends: '', expected another YAML file"),
        (
            "child.yaml",
            "extends: {folder}/child.yaml -> {folder}/child.yaml is a circle, expected a parent "
            "that does not extend this file. Remove one of these extends",
        ),
        (r'"\0"', "extends: '\\x00', expected another YAML file"),
        (r'"\ud800"', "extends: '\\ud800', expected another YAML file"),
    ],
)
def test_read_refuses_a_wrong_parent(folder: Path, name: str, message: str):
    path = written(folder, f"steps: 1\nextends: {name}\n")
    (found,) = problems_of(path)
    assert found.startswith(f"{path}:2: " + message.format(folder=folder))


def test_compile_plan_takes_a_later_parent_over_an_earlier_one(folder: Path):
    written(folder, "steps: 5\nobjective: {clip_low: 0.1, loss: cispo}\n", "base/mine.yaml")
    written(folder, "data: {task_options: {}}\n", "base/plain.yaml")
    parents = "[base/options.yaml, base/plain.yaml, base/mine.yaml]"
    options = "extends: base.yaml\nseed: 7\ndata: {task_options: {length: 3}}\n"
    written(folder, options, "base/options.yaml")
    path = written(folder, f"extends: {parents}\nobjective: {{clip_low: 0.3}}\n")
    plan = compile_plan(path)
    assert (plan.steps, plan.seed, plan.rollout.engine) == (5, 7, "hf")
    assert (plan.objective.clip_low, plan.objective.loss) == (0.3, "cispo")
    assert plan.data.task_options == {}  # the second parent drops what the first one has
    assert plan.tokenizer_path == "owner/name"
    turned = [f"extends=[{folder}/base/mine.yaml, base/base.yaml]"]
    assert compile_plan(path, turned).steps == 10
    written(folder, "steps: 0\n", "base/mine.yaml")
    assert problems_of(path) == [
        f"{folder}/base/mine.yaml:1: steps: 0, expected at least 1; steps of the run"
    ]


def test_read_refuses_a_circle_through_the_second_parent(folder: Path):
    written(folder, "extends: [base/base.yaml, b.yaml]\n", "a.yaml")
    b = written(folder, "steps: 1\nextends: a.yaml\n", "b.yaml")
    (found,) = problems_of(folder / "a.yaml")
    circle = f"{folder}/a.yaml -> {b} -> {folder}/a.yaml"
    assert found.startswith(f"{b}:2: extends: {circle} is a circle, expected")


def test_read_refuses_a_pipe_instead_of_waiting_for_it(folder: Path):
    os.mkfifo(folder / "pipe")
    path = written(folder, "steps: 1\nextends: pipe\n")
    assert problems_of(path) == [
        f"{path}:2: extends: {folder}/pipe: Not a regular file, expected a YAML file"
    ]
    (found,) = problems_of(folder / "base/base.yaml", f"model.config={folder}/pipe")
    assert found.endswith("pipe: Not a regular file, expected an HF config.json")


def test_read_stops_at_a_text_without_end():
    assert problems_of(Path("/dev/zero")) == [
        "/dev/zero: More than 4,000,000 characters, expected a YAML file"
    ]


def test_read_refuses_a_parent_that_is_no_yaml(folder: Path):
    for content, message in [("", "empty"), ("a: [", "not YAML"), ("- 1", "a list")]:
        parent = written(folder, content, "parent.yaml")
        (found,) = problems_of(written(folder, "extends: parent.yaml\nsteps: x\n"))
        assert found.startswith(f"{parent}:1: {message}")


def test_read_takes_the_parent_from_the_command_line(folder: Path):
    path = written(folder, "extends: none.yaml\nsteps: 3\n")
    assert compile_plan(path, ["extends=base/base.yaml"]).steps == 3
    assert problems_of(path, "extends=x.yaml") == [
        f"command line: extends=x.yaml: {folder}/x.yaml: No such file or directory, "
        "expected a YAML file"
    ]
    assert any("model: missing" in line for line in problems_of(path, "extends=null"))
    assert "Did you mean extends?" in problems_of(path, "extend=x.yaml")[0]


# References, which were removed -------------------------------------------------------------------


@pytest.mark.parametrize("value", ["${parallel.tp}", "runs/${model.family}-tp2", "$${x}"])
def test_resolve_refuses_references_and_says_what_to_write(folder: Path, value: str):
    reference = value[value.index("${") : value.index("}") + 1]
    message = (
        f"{reference}, expected the value itself; references to other keys were removed. Write the "
        "value that it stood for"
    )
    for text in (f"run: {value}\n", f"rollout:\n  stop: ['{value}']\n"):
        path = child(folder, text)
        line, key = (2, "run") if text.startswith("run") else (3, "rollout.stop.0")
        assert problems_of(path) == [f"{path}:{line}: {key}: {message}"]
    assert problems_of(folder / "base/base.yaml", f"threads={value}") == [
        f"command line: threads={value}: {message}"
    ]


def test_resolve_leaves_dollars_and_braces_alone(folder: Path):
    path = child(folder, 'run: runs/$5\nrollout: {stop: ["${", "{x}"]}\n')
    plan = compile_plan(path)
    assert (plan.run, plan.rollout.stop) == ("runs/$5", ["${", "{x}"])


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("64k", "tokens", 65536),
        ("64K", "tokens", 65536),
        ("1.5k", "tokens", 1536),
        ("64 Ki", None, 65536),
        ("2GiB", "bytes", 2 * 1024**3),
        ("1.5GiB", "bytes", 3 * 1024**3 // 2),
        ("2GB", "bytes", 2 * 10**9),
        ("64kB", "bytes", 64000),
        ("3Mi", "bytes", 3 * 1024**2),
        ("1_000Ki", "steps", 1024000),
        ("-1Ki", None, -1024),
        ("12", None, "12"),
        ("word", None, "word"),
        ("k", None, "k"),
    ],
)
def test_read_size_reads_units(text: str, unit: str | None, expected: object):
    assert read_size(text, unit) == expected


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("rollout.max_num_seqs", "10k", "is 10000 or 10240, expected a clear size. Write 10000 or"),
        ("rollout.max_new_tokens", "1M", "is 1000000 or 1048576, expected a clear size. Write"),
        ("logprob.chunk_bytes", "2G", "is 2000000000 or 2147483648, expected a clear size. Write "
                                      "2GB or 2GiB"),
        ("logprob.chunk_bytes", "1KB", "is 1000 or 1024, expected a clear size. Write 1kB or 1KiB"),
        ("logprob.chunk_bytes", "1mb", "is 1000000 or 1048576, expected a clear size. Write 1MB"),
        ("rollout.max_new_tokens", "2GB", "is a number of bytes, expected tokens"),
        ("rollout.max_num_seqs", "2KiB", "is a number of bytes, expected a plain number"),
        ("rollout.max_new_tokens", "0.3k", "is 307.2, expected a whole number"),
        ("optimizer.lr", "1k", "is text, expected a number"),
    ],
)  # fmt: skip
def test_read_size_refuses_what_has_two_meanings(folder: Path, key: str, text: str, message: str):
    (found,) = problems_of(folder / "base/base.yaml", f"{key}={text}")
    assert found.startswith(f"command line: {key}={text}: '{text}' {message}")


def test_resolve_reads_sizes_of_numbers_only(folder: Path):
    path = child(
        folder,
        "run: 64k\nlogprob: {chunk_bytes: 64KiB}\nbatching: {tokens_per_microbatch: 1k}\n"
        "data: {task_options: {end: 2GB}}\n",
    )
    plan = compile_plan(path)
    assert (plan.run, plan.data.task_options) == ("64k", {"end": "2GB"})
    assert plan.logprob.chunk_bytes == 65536
    assert plan.batching.tokens_per_microbatch == 1024
    assert problems_of(path, "logprob.chunk_bytes=-1Ki")[0].startswith(
        "command line: logprob.chunk_bytes=-1Ki: -1024, expected at least 1"
    )


# Any text, in either file, is a plan or problems that all have a place ----------------------------

pieces = st.sampled_from(
    [
        *"\n\t:{}[],|'\"#0?$\x00é ",
        *("", ": ", "- ", "&a", "*a", "!!int", "---", "null", "1e3", "-1", ".inf", "tp"),
        "${",
        "}",
        "${run}",
        "64k",
        "2GiB",
        "1.5M",
        "extends: base/base.yaml\n",
        "extends: child.yaml\n",
        "parallel:\n  tp: 2\n",
        "data: {task_options: {length: 5}}\n",
    ]
)
CHILD = "extends: base/mutated.yaml\nsteps: 2\nlogprob: {chunk_bytes: 2GiB}\n"
edits = st.lists(st.tuples(st.integers(0, len(SMALL)), st.integers(0, 12), pieces), max_size=4)


def mutate(text: str, changes: list[tuple[int, int, str]]) -> str:
    for at, length, word in changes:
        text = text[:at] + word + text[at + length :]
    return text


@settings(max_examples=300, deadline=None)
@given(edits, edits, pieces)
@example([(0, 0, "${")], [], "${run}")
@example([], [(8, 99, '"\\ud800"')], "null")
@example([], [(0, 0, "{")], "null")
@example([], [(0, len(SMALL), "{}")], "null")
@example([], [(SMALL.index("config.json"), 11, r'"\0"')], "null")
@example([], [(SMALL.index("config.json"), 11, "long/" * 99 + "x" * 999)], "null")
@example([], [(SMALL.index("owner/name"), 10, r'"\0"')], "null")
@example([], [(SMALL.index("owner/name"), 10, "a/" + "x" * 999)], "null")
@example([], [(SMALL.index("runs/x"), 6, r'"\ud800"')], "null")
@example([], [(0, 0, '"a\\nb": 1\n')], "null")
def test_compile_plan_places_every_problem_of_mutated_files(
    folder: Path, mine: list, parents: list, override: str
):
    written(folder, mutate(SMALL, parents), "base/mutated.yaml")
    path = written(folder, mutate(CHILD, mine))
    check_places(path, (f"run={override}",) if override.strip() else ())


scalars = st.sampled_from(["${steps}", "x${run}", "64k", "2 GiB", "9G", "a:b", None])
scalars = scalars | st.booleans() | st.integers(-2, 9) | st.floats()
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=3), scalars)
keys = st.sampled_from([(name, key) for name in fields_of() for key in fields_of(name)])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, values, max_size=3), st.dictionaries(keys, values, max_size=3))
def test_compile_plan_places_every_problem_of_mutated_values(
    folder: Path, mine: dict, parents: dict
):
    for changes, tree, name in [
        (mine, {"extends": "base/mutated.yaml"}, "child.yaml"),
        (parents, yaml.safe_load(SMALL) | {"optimizer": {"lr": 0.1}}, "base/mutated.yaml"),
    ]:
        for (section, key), value in changes.items():
            tree.setdefault(section, {})[key] = value
        written(folder, yaml.safe_dump(tree), name)
    check_places(folder / "child.yaml")


def test_read_refuses_deep_nesting_with_a_place(folder: Path):
    for depth in (50, 150, 300, 2000):
        check_places(child(folder, f"data: {{task_options: {{a: {'[' * depth}{']' * depth}}}}}\n"))


def check_places(path: Path, overrides: tuple[str, ...] = ()) -> None:
    place = rf"{re.escape(str(path.parent))}/[\w./]+:[1-9]\d*: .|command line: \S"
    try:
        plan = compile_plan(path, overrides)
    except ConfigError as error:
        for line in str(error).splitlines():
            assert re.match(place, line), line
    else:
        assert Plan.from_json(plan.to_json()) == plan


# What the command says about keys --------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_synonyms_name_keys_that_exist_and_are_none_themselves():
    for name, keys in SYNONYMS.items():
        for key in keys:
            *section, last = key.split(".")
            assert last in fields_of(*section), (name, key)
        *section, last = name.split(".")
        assert last not in fields_of(*section), name


def test_page_is_the_shipped_reference():
    """`python -m pyrl_ext.plan --reference > configs/REFERENCE.md` writes it anew."""
    assert (REPOSITORY / "configs/REFERENCE.md").read_text() == page()


def test_schema_describes_every_key(capsys: pytest.CaptureFixture[str]):
    assert main(["--schema"]) == 0
    tree = json.loads(capsys.readouterr().out)
    for name in fields_of():
        inner = (
            tree["$defs"][name.title().replace("_", "")]["properties"] if fields_of(name) else None
        )
        assert name in tree["properties"]
        for key, field in fields_of(name).items():
            assert inner and inner[key]["description"] == field.description
    assert "required" not in json.dumps(tree["$defs"]["Optimizer"])  # a parent may have it
