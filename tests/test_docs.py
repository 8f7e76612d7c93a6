"""README and docs are true: what they name exists, what they show runs, what they link is there."""

from __future__ import annotations

import ast
import re
import shutil
import signal
import sys
import threading
import time
import tomllib
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.run import get_args_parser

from pyrl_ext.cli import COMMANDS
from pyrl_ext.loss.inputs import LossInputs
from pyrl_ext.metrics.glossary import GLOSSARY, lookup
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.__main__ import main as plan_command
from pyrl_ext.plan.compile import draft_of, load
from pyrl_ext.plan.language.fields import Section, section_of
from pyrl_ext.plan.schema import Config
from tests.helpers.deadline import DEADLINE
from tests.parity import LAYOUTS, pairwise_cover
from tests.readme import (
    FIRST,
    REPOSITORY,
    Run,
    commands,
    in_order,
    is_left_out,
    needing,
    needs_extras,
    pages,
    rule,
    shown,
    waits,
)

pytestmark = pytest.mark.multiprocess


def of_today(page: Path) -> str:
    """The text of a page, without the columns of names that are not ours: the first one of
    docs/changes.md (of before), all but the first one of docs/from.md (of others)."""
    others = {"changes": (r"^\|[^|]*", ""), "from": (r"^(\|[^|]*\|)(?:[^|]*\|){5}$", r"\1")}
    text = page.read_text("utf-8")
    return re.sub(*others[page.stem], text, flags=re.M) if page.stem in others else text


TEXTS = {page.relative_to(REPOSITORY).as_posix(): of_today(page) for page in pages()}
README = TEXTS["README.md"]
# An example's own names, what commands write, and the binary
INVENTED = re.compile(
    r"\bmy_|\bmine\b|<|\*|^runs/|^checkpoints/|^data/arithmetic|glm47/|^tiny/|^pyrl_ext\._C$"
)
# how a command begins that CI can run
RUN_BY_CI = (
    "make ",
    "tests/",
    ".venv/bin/",
    "OMP_NUM_THREADS=1 .venv/bin/",
    "PYTHONPATH=.venv/wandb .venv/bin/",
    "PYTHONPATH=.venv/verl:.venv/skyrl .venv/bin/",
)
SUFFIXES = r"(?:py|md|yaml|json|jsonl|png|svg|cu|cpp|hpp|txt)"
METRIC_ROOTS = {name.split("/")[0] for name in GLOSSARY if "/" in name}


def quoted(text: str) -> list[str]:
    """Texts in backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@cache
def names_of(module: Path) -> frozenset[str]:
    """Names that a module defines or imports at its top level."""
    names: set[str] = set()
    for node in ast.parse(module.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


def is_there(dotted: str) -> bool:
    """True if `pyrl_ext.a.b` or `pyrl_ext.a:b` is a module or a name that one defines."""
    place = REPOSITORY
    parts = re.split(r"[.:]", dotted)
    while parts and (place / parts[0]).is_dir():
        place = place / parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        module = place / f"{parts.pop(0)}.py"
    else:
        module = place / "__init__.py"
    return not parts or (len(parts) == 1 and parts[0] in names_of(module))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_docs_link_to_what_is_there(page: str):
    folder = (REPOSITORY / page).parent
    wrong = []
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", TEXTS[page])
    for target in (a or b for a, b in targets):
        path, _, anchor = target.partition("#")
        file = folder / path if path else REPOSITORY / page
        if "://" in target:
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong, f"{page} links to {wrong}, which are not there"


@pytest.mark.parametrize("page", TEXTS)
def test_docs_name_modules_and_names_that_exist(page: str):
    named = set(re.findall(r"\bpyrl_ext(?:\.\w+)+(?::\w+)?", TEXTS[page]))
    wrong = [name for name in named if not INVENTED.search(name) and not is_there(name)]
    wrong = [name for name in wrong if not name.endswith((".py", ".md"))]
    assert not wrong, f"{page} names {wrong}, which are not there"


@pytest.mark.parametrize("page", TEXTS)
def test_docs_call_modules_that_exist(page: str):
    """`python -m` of the package, of tests and of benchmarks; pytest and torch have theirs."""
    called = set(re.findall(r"-m ((?:pyrl_ext|tests|benchmarks)\b[\w.]*)", TEXTS[page]))
    places = {name: REPOSITORY / name.replace(".", "/") for name in called}
    wrong = [
        name
        for name, at in places.items()
        if not at.with_suffix(".py").is_file() and not (at / "__main__.py").is_file()
    ]
    assert not wrong, f"{page} calls {wrong}, which are not there"


@pytest.mark.parametrize("page", TEXTS)
def test_docs_name_files_and_folders_that_exist(page: str):
    wrong = []
    for name in quoted(TEXTS[page]):
        is_path = re.fullmatch(rf"[\w./-]+\.{SUFFIXES}|(?:[\w-]+/)+", name)
        if not is_path or INVENTED.search(name):
            continue
        homes = (REPOSITORY, REPOSITORY / "pyrl_ext", REPOSITORY / "configs")
        written = {"plan.json", "metrics.jsonl", "report.png", "error.txt", "tensorboard/", "hf/"}
        written |= {"digests.json", "report.html", "report.csv", "trace/", "wandb/", "scores/"}
        written |= {"eval/results.jsonl", "plan_changes.jsonl"}
        of_an_operator = any(
            any((REPOSITORY / folder).glob(f"*/{name}")) for folder in ("csrc", "pyrl_ext/ops")
        )
        there = of_an_operator or any((home / name).exists() for home in homes)
        if name not in written and not there:
            wrong.append(name)
    assert not wrong, f"{page} names {wrong}, which are not there"


def problem_of_key(dotted: str) -> str | None:
    """Why `section.key` is no key of the config; None if it is one."""
    at: type[Section] = Config
    for part in dotted.split("."):
        if part not in at.model_fields:
            return f"{dotted}: {at.__name__} has no {part}"
        kind = section_of(at.model_fields[part].annotation)
        if kind is None:
            return None  # a value, or a mapping of options
        at = kind
    return None


@pytest.mark.parametrize("page", TEXTS)
def test_docs_name_config_keys_that_exist(page: str):
    sections = "|".join(n for n, f in Config.model_fields.items() if section_of(f.annotation))
    keys = {
        match.group(1)
        for text in quoted(TEXTS[page])
        if (match := re.match(rf"((?:{sections})\.[a-z_]\w*)(?=[:=\s]|$)", text))
    }
    for line in shown(TEXTS[page]):
        if "pyrl_ext.train" in line or "pyrl_ext.plan" in line or "/pyrl " in line:
            keys |= set(re.findall(r"(?<=[ '])([a-z_]+(?:\.\w+)*)=", line))
    wrong = [problem for key in sorted(keys) if (problem := problem_of_key(key))]
    assert not wrong, f"{page} names {wrong}"


def test_docs_from_other_trainers_give_values_that_are_accepted():
    """The first column of the tables: keys that exist, with values of the right type and range."""
    rows = re.findall(r"^\| (`[^|]*) \|$", TEXTS["docs/from.md"], re.M)
    given = [text for text in quoted("\n".join(rows)) if "/" not in text]
    wrong = [problem for text in given if (problem := problem_of_key(text.split("=")[0]))]
    for text in given:
        if "=" in text:
            config = "tiny_sft" if text.endswith("=sft") else "tiny_lora"  # with such sections
            source = load(REPOSITORY / f"configs/{config}.yaml", [text])
            draft_of(source)  # records what the schema refuses; rules are not asked
            wrong += source.problems
    assert len(given) > 90 and not wrong


def test_docs_from_other_trainers_have_forty_keys_of_each():
    """Rows of the tables that name a key of the trainer, without what has no counterpart."""
    tables = (REPOSITORY / "docs/from.md").read_text("utf-8").split("## What has no")[0]
    rows = [row.strip("|").split(" | ")[1:] for row in re.findall(r"^\| `.*\|$", tables, re.M)]
    keys = [sum("`" in cell for cell in column) for column in zip(*rows, strict=True)]
    assert len(keys) == 5 and min(keys) >= 40, keys


def test_README_compares_without_unknown_cells_and_names_the_sources():
    """Each row that another trainer could change has its sources in docs/from.md."""
    table = README.split("| | pyrl_ext |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 11
    assert all(len(row) == 7 and all(cell.strip(" ?") for cell in row) for row in rows)
    sources = (REPOSITORY / "docs/from.md").read_text("utf-8").split("## Sources of the comp")[1]
    named = [line.split(" | ") for line in sources.splitlines() if line.startswith("| ")][2:]
    assert all(len(row) == 6 and all(cell.strip(" |") for cell in row) for row in named)
    numbers = set(re.findall(r"#\d{3,}", table))
    assert numbers <= set(re.findall(r"#\d{3,}", sources))


@pytest.mark.parametrize("page", TEXTS)
def test_docs_name_metrics_that_exist(page: str):
    names = {name for name in quoted(TEXTS[page]) if re.fullmatch(r"[a-z]+/[\w/<>]*\w>?", name)}
    wrong = [n for n in names if n.split("/")[0] in METRIC_ROOTS and lookup(n) is None]
    wrong = [n for n in wrong if not (REPOSITORY / "pyrl_ext" / n).exists()]
    assert not wrong, f"{page} names metrics {wrong}, which the glossary does not define"


@pytest.mark.parametrize("page", TEXTS)
def test_docs_show_commands_that_are_run_or_say_what_they_need(page: str):
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    lines = shown(TEXTS[page])
    run = list(chain.from_iterable(commands(TEXTS).values()))
    wrong = [x for x in lines if not x.startswith(RUN_BY_CI) and not is_left_out(x)]
    wholes = re.findall(r"# part of (make [a-z-]+)", "\n".join(lines))
    wrong += [whole for whole in wholes if not any(x.startswith(whole) for x in run)]
    called = re.findall(r"^make ([a-z-]+)", "\n".join(lines), re.MULTILINE)
    called += [m.group(1) for x in quoted(TEXTS[page]) if (m := re.match(r"make ([a-z-]+)", x))]
    wrong += [f"make {target}" for target in called if target not in targets]
    assert not wrong, f"{page} shows {wrong}: CI cannot run them"


def test_clusters_and_Dockerfile_pass_options_that_torchrun_and_pyrl_have():
    """Nobody has run them: what can be checked here is that names are right."""
    page = TEXTS["docs/clusters.md"]
    scripts = "".join(fenced(page, "text"))
    known = {text for action in get_args_parser()._actions for text in action.option_strings}
    given = set(re.findall(r"torchrun(.*?)-m,? pyrl_ext", scripts, re.DOTALL))
    options = {option for text in given for option in re.findall(r"--[a-z-]+", text)}
    assert len(options) >= 6 and options <= known
    for config in set(re.findall(r"configs/\w+\.yaml", scripts)):
        hosts = "rollout.launch.hosts=[a,b]" if "async" in config else "seed=0"
        assert compile_plan(REPOSITORY / config, [hosts, "run=/shared/runs/x"]).run
    dockerfile = (REPOSITORY / "docs/Dockerfile").read_text("utf-8")
    assert "Nobody has built this file" in dockerfile and "Nobody\nhas built it" in page
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", dockerfile, re.MULTILINE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_docs_name_every_command_of_pyrl():
    called = {name for text in TEXTS.values() for name in re.findall(r"[`/]pyrl (\w+)", text)}
    assert called == set(COMMANDS)


def test_commands_lists_those_of_all_pages_once():
    text = (
        "```bash\nmake demo   # a minute\nmake gpu  # needs a GPU\nmake demo\nmake x \\\n  A=1\n```"
    )
    assert commands({"a": text, "b": text}) == {"a": ["make demo", "make x A=1"]}


def test_needs_extras_is_true_of_targets_that_install_vllm_te_or_wandb():
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    run = list(chain.from_iterable(commands(TEXTS).values()))
    named = {
        "make test-vllm",
        ".venv/bin/pyrl train configs/tiny.yaml rollout.engine=vllm rollout.max_mismatch=1e-4"
        " run=runs/vllm steps=40",
        ".venv/bin/pyrl train configs/examples/agent.yaml rollout.engine=vllm"
        " rollout.max_mismatch=1e-4 steps=2 run=runs/agent-vllm",
    }
    found = {command for command in run if needs_extras(command, makefile)}
    assert found == named | {
        "make docs",
        "make test-te",
        "make test-verl",
        "make test-skyrl",
        "PYTHONPATH=.venv/verl:.venv/skyrl .venv/bin/python -m benchmarks.integrations --quick",
        "PYTHONPATH=.venv/wandb .venv/bin/python -m pytest -q tests/wandb",
    }


def test_needing_splits_the_commands_in_two():
    makefile = "test: build\n\tpytest\ndemo: STEPS = 3\ndemo: $(VENV)/.vllm  ## build\n\ttrain\n"
    found = {"a": ["make test", "make demo STEPS=1"], "b": [".venv/bin/pyrl doctor"]}
    without = {"a": ["make test"], "b": [".venv/bin/pyrl doctor"]}
    assert needing(found, extras=False, makefile=makefile) == without
    assert needing(found, extras=True, makefile=makefile) == {"a": ["make demo STEPS=1"]}


def test_commands_without_extras_train_every_tiny_config():
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    found = needing(commands(TEXTS), extras=False, makefile=makefile)
    run = list(chain.from_iterable(found.values()))
    recipes = [rule(word, makefile) for command in run for word in command.split()]
    text = "\n".join([*run, *recipes])
    trained = set(re.findall(r"(?:pyrl |pyrl_ext\.)train configs/(tiny\w*\.yaml)", text))
    assert trained == {path.name for path in (REPOSITORY / "configs").glob("tiny*.yaml")}


def test_in_order_begins_with_what_takes_long():
    found = {"README.md": ["make demo", "make test"], "docs/remote_engines.md": ["make serve"]}
    chosen = in_order(found, ["make check", "make test"])
    assert [*chosen] == [FIRST, "docs/remote_engines.md", "README.md"]
    assert chosen[FIRST] == ["make check", "make test"] and chosen["README.md"] == ["make demo"]
    script = (REPOSITORY / ".ci/run").read_text("utf-8")
    (slow,) = re.findall(r"^SLOW='(.*)'$", script, re.MULTILINE)
    assert slow in commands(TEXTS)["docs/runs.md"]  # begun first it is not run again


def test_Run_of_the_commands_waits_for_what_other_pages_write(tmp_path: Path):
    """In two lanes; what is left out once a command has failed."""

    def said(word: str) -> str:
        return f"echo {word} >> {tmp_path / 'said'}"

    found = {
        "docs/a.md": [
            f"while [ ! -e {tmp_path}/said ]; do sleep 0.1; done; {said('writes')} # runs/x"
        ],
        "docs/b.md": [said("beside")],
        "docs/c.md": [f"{said('reads')} # runs/x", "exit 3", said("never")],
    }
    assert waits(found) == {"docs/a.md": set(), "docs/b.md": set(), "docs/c.md": {"docs/a.md"}}
    assert waits({"a": ["make demo"], "b": ["pyrl report runs/tiny-0"]})["b"] == {"a"}
    run = Run(found, waits(found))
    lanes = [threading.Thread(target=run.lane) for _ in range(2)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join(DEADLINE)
    assert (tmp_path / "said").read_text().split() == ["beside", "writes", "reads"]
    assert run.failed == ["exit 3: exit status 3"] and not run.left_out


def test_Run_of_the_commands_leaves_out_all_but_the_first_when_its_time_is_over(tmp_path: Path):
    tests = f"touch {tmp_path}/tested"
    found = {FIRST: [tests], "a": [f"touch {tmp_path}/trained"]}
    run = Run(found, {FIRST: set(), "a": {FIRST}}, until=time.time() - 1)
    run.lane()
    assert [path.name for path in tmp_path.iterdir()] == ["tested"]
    assert run.left_out == [f"touch {tmp_path}/trained"] and not run.failed


def test_Run_of_the_commands_ends_what_hangs_and_shows_where(capfd: pytest.CaptureFixture[str]):
    hangs = f"{sys.executable} -X faulthandler -c 'import time; time.sleep({DEADLINE})'"
    run = Run({FIRST: [hangs, "echo never"]}, {FIRST: set()}, end=time.time() + 3)
    run.lane()
    assert run.failed == [f"{hangs}: exit status {-signal.SIGABRT}"]
    said = capfd.readouterr().out
    assert "Fatal Python error: Aborted" in said and "<string>" in said and "never" not in said


def test_docs_index_lists_every_page():
    index = TEXTS["docs/README.md"]
    pages = [page.relative_to(REPOSITORY / "docs") for page in (REPOSITORY / "docs").rglob("*.md")]
    names = [str(page) for page in pages if page.name != "README.md"]
    assert not [name for name in names if f"]({name})" not in index]


def test_index_says_the_gpus_of_configs():
    index = TEXTS["docs/README.md"]
    rows = re.findall(r"^\| (`\w+`.*?) \| .*? \| (.*?) \| .*? \|$", index, re.MULTILINE)
    assert len(rows) == 16
    for names, devices in rows:
        for name in re.findall(r"`(\w+)`", names):
            plan = compile_plan(REPOSITORY / "configs" / f"{name}.yaml")
            ranks = plan.parallel.world_size
            apart = plan.rollout.gpus
            apart = (
                len(plan.addresses) * plan.rollout.tp
                or apart
                or (plan.world_size - ranks if plan.device == "cuda" else 0)
            )
            gpus = f"{ranks} + {apart}" if apart else str(ranks)
            wanted = "CPU" if plan.device == "cpu" else f"{gpus} {plan.hardware.gpu}"
            assert devices == wanted, name


def test_README_shows_errors_as_the_plan_says_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copy(REPOSITORY / "configs/tiny.yaml", tmp_path)
    shutil.copytree(REPOSITORY / "configs/tiny", tmp_path / "tiny")
    lines = ["extends: tiny.yaml", "run: runs/mine", "steps: 3", "seed: 1"]
    lines += ["paralel: {dp: 2}", "parallel: {pp: 3}", "batching: {prompts: '16'}"]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert plan_command(["mine.yaml"]) == 2
    said = capsys.readouterr().err.strip()
    assert said in README
    assert said in TEXTS["docs/plan.md"]


@pytest.mark.parametrize("block", fenced("".join(TEXTS.values()), "yaml"))
def test_docs_show_yaml_that_compiles(block: str, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(block.replace("extends: ", f"extends: {REPOSITORY}/configs/"))
    (tmp_path / "data").symlink_to(REPOSITORY / "configs/data")
    assert compile_plan(path).run


# The examples ------------------------------------------------------------------------------------


def example(function: str) -> list:
    """The functions of that name, from every block that begins with it."""
    found = []
    for text in TEXTS.values():
        for block in fenced(text, "python"):
            if block.startswith(f"def {function}("):
                names = {"torch": torch}
                exec(compile(block, function, "exec"), names)
                found.append(names[function])
    assert found, f"no page shows {function}"
    return found


def test_example_of_a_reward_scores():
    for close in example("close"):
        assert close(SimpleNamespace(answer="42"), " 42 ", [4, 2]) == 0.5
        assert close(SimpleNamespace(answer="42"), "41", [4, 1]) == 0


def test_example_of_an_answer_rule_refuses_other_answers():
    (block,) = (b for b in fenced(TEXTS["docs/extend.md"], "python") if "@answer_rule(" in b)
    names: dict = {}
    exec(compile(block, "answer_rule", "exec"), names)
    _, holds = names["distance"].answer_rule
    assert holds(12) and holds("12") and not holds("twelve") and not holds(None)
    assert names["distance"](SimpleNamespace(answer="12"), "", [1] * 11) == 0.5


def test_example_of_advantages_centres_groups():
    for centred in example("centred"):
        rewards = torch.tensor([1.0, 3.0, 5.0])
        groups = torch.tensor([7, 7, 2])
        assert centred(rewards, groups).tolist() == [-1, 1, 0]


def test_example_of_a_loss_sums_over_loss_tokens():
    mask = torch.tensor([True, False, True])
    advantages = torch.tensor([1.0, 5.0, -2.0])
    for reinforce in example("reinforce"):
        logprobs = torch.tensor([-1.0, float("nan"), -3.0], requires_grad=True)
        fields = LossInputs(logprobs.detach(), logprobs.detach(), None, advantages, mask)
        entropy = torch.zeros(3)
        config = SimpleNamespace(entropy_coef=0.1)
        more = [config] if reinforce.__code__.co_argcount == 4 else []
        total, count, metrics = reinforce(logprobs, entropy, fields, *more)
        assert (total.item(), count.item()) == (-5, 2)
        assert all(float(value) == number for value, number in metrics.values())


def test_docs_show_python_that_parses():
    for page, text in TEXTS.items():
        for block in fenced(text, "python"):
            ast.parse(block, page)


def test_docs_count_the_layouts():
    table = {ranks: some for ranks, some in LAYOUTS.items() if ranks < 6}
    few, many = (sum(map(len, each.values())) for each in (pairwise_cover(table), table))
    most = sum(map(len, LAYOUTS.values())) - many
    page = TEXTS["docs/parallel.md"]
    rules = TEXTS["CONTRIBUTING.md"]
    assert f"{few} layouts of 1 to 4 ranks in which" in page
    assert f"The {few} are a greedy" in page and f"any of the {many} layouts" in page
    assert f"all {many} layouts, and {most} on 6 and 8 ranks" in page
    assert f"({few} layouts in which" in rules and f"has all {many}" in rules
