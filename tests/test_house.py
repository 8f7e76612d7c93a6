"""The rooms of the package: who may import whom, and who may touch what."""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "pyrl_ext"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room imports rooms to its left.
ORDER: list[str] = [
    "lazy",
    "ops",
    "schedule",
    "plan",
    "prompt",
    "samples",
    "parallel",
    "metrics",
    "loss",
    "pack",
    "replay",
    "data",
    "rollout",
    "megatron",
    "models",
    "weights",
    "trainer",
    "train",
    "tools",
    "integrations",
    "cli",
]

# Modules that only files or folders whose name starts with one of these words may import.
NAMED_AFTER = {
    "triton": {"triton", "vllm"},  # vLLM runs on it
    "vllm": {"vllm"},
    "transformer_engine": {"te", "transformer"},
    "huggingface_hub": {"hf"},
    "wandb": {"wandb"},
    "causal_conv1d": {"causal"},
    "fla": {"fla"},
    "mamba_ssm": {"mamba"},
    "pyrl_ext._C": {"native"},
}
# files that may import megatron-core, next to whole rooms
MEGATRON_ROOMS = {"replay", "megatron", "models", "trainer", "integrations"}
MEGATRON_FILES = {"pyrl_ext/pack/thd.py", "pyrl_ext/parallel/groups.py"}
PLAN_MAY_IMPORT = {"pydantic", "pydantic_core", "yaml", "rich", "jinja2", "markupsafe"} | {
    "huggingface_hub",
    "reasoning_gym",  # only if a plan names one of its tasks
    "pyarrow",
}


def test_house_imports_go_one_way():
    wrong = []
    for file in FILES:
        room = room_of(file)
        for line, module in imports_of(file):
            other = module.split(".")[1] if module.startswith("pyrl_ext.") else None
            if other in (None, room, "_C", "__version__"):
                continue
            if room == "__init__":
                wrong.append(
                    f"{place(file, line)}: pyrl_ext imports {module}; importing it is free"
                )
            elif other not in ORDER or room not in ORDER:
                wrong.append(f"{place(file, line)}: {room} or {other} is no room of ORDER")
            elif ORDER.index(other) > ORDER.index(room):
                wrong.append(f"{place(file, line)}: {room} imports {module}, a room above it")
    assert not wrong, "\n".join(wrong)


def test_house_has_no_import_circle():
    """Imports of functions are left out, those for type annotations are not."""
    modules = {module_of(file): file for file in FILES}
    graph = {
        name: {
            other
            for _, target in module_level_imports(file)
            if (other := longest_prefix(target, modules)) not in (None, name)
        }
        for name, file in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other: {' <- '.join(error.args[1])}")


def test_house_has_a_room_for_every_file():
    homeless = [place(f) for f in FILES if room_of(f) not in {*ORDER, "__init__"}]
    assert not homeless, f"files outside the rooms {ORDER}: {homeless}"


def test_house_imports_megatron_in_its_rooms_only():
    wrong = [
        f"{place(file, line)}: {module}"
        for file in FILES
        for line, module in imports_of(file)
        if within(module, "megatron")
        and room_of(file) not in MEGATRON_ROOMS
        and place(file) not in MEGATRON_FILES
    ]
    assert not wrong, (
        f"megatron-core belongs to {sorted(MEGATRON_ROOMS | MEGATRON_FILES)}:\n" + "\n".join(wrong)
    )


def test_house_reads_parallel_state_in_groups_only():
    wrong = [
        f"{place(file, line)}: {name}"
        for file in FILES
        if place(file) != "pyrl_ext/parallel/groups.py"
        for line, name in [*imports_of(file), *attributes_of(file)]
        if "parallel_state" in name.split(".")
    ]
    assert not wrong, "groups and ranks come from parallel/groups.py:\n" + "\n".join(wrong)


@pytest.mark.parametrize("library", NAMED_AFTER)
def test_house_keeps_accelerators_in_the_files_named_after_them(library: str):
    wrong = [
        f"{place(file, line)}: {module}"
        for file in FILES
        for line, module in imports_of(file)
        if within(module, library)
        and not {p.strip("_").split("_")[0] for p in (file.stem, file.parent.name)}
        & NAMED_AFTER[library]
    ]
    assert not wrong, f"{library} belongs to {NAMED_AFTER[library]}:\n" + "\n".join(wrong)


def test_house_has_no_process_group_in_ops():
    wrong = [
        f"{place(file, line)}: {name}"
        for file in FILES
        if room_of(file) == "ops"
        for line, name in [*imports_of(file), *attributes_of(file)]
        if within(name, "torch.distributed") or name.split(".")[-1] == "ProcessGroup"
    ]
    assert not wrong, "ops are local; collectives live above them:\n" + "\n".join(wrong)


def test_house_imports_no_other_room_in_ops():
    wrong = [
        f"{place(file, line)}: {module}"
        for file in FILES
        if room_of(file) == "ops"
        for line, module in imports_of(file)
        if within(module, "pyrl_ext")
        and not within(module, "pyrl_ext.ops")
        and not within(module, "pyrl_ext._C")
    ]
    assert not wrong, "an operator knows tensors only:\n" + "\n".join(wrong)


@pytest.mark.parametrize(("room", "libraries"), [("schedule", set()), ("plan", PLAN_MAY_IMPORT)])
def test_house_imports_few_libraries_where_the_plan_is_compiled(room: str, libraries: set[str]):
    allowed = {"pyrl_ext", *sys.stdlib_module_names, *libraries}
    wrong = [
        f"{place(file, line)}: {module}"
        for file in FILES
        if room_of(file) == room
        for line, module in imports_of(file)
        if module.split(".")[0] not in allowed
    ]
    assert not wrong, "`pyrl plan` answers in a second:\n" + "\n".join(wrong)


def test_house_forecasts_in_plan_and_tools_only():
    wrong = [
        f"{place(file, line)}: {module}"
        for file in FILES
        if room_of(file) not in {"plan", "tools", "cli"}
        for line, module in imports_of(file)
        if within(module, "pyrl_ext.plan.forecast") or within(module, "pyrl_ext.plan.show")
    ]
    assert not wrong, "a run computes nothing with the forecast:\n" + "\n".join(wrong)


def test_house_imports_no_test_module_in_test_modules():
    """The scripts that tests run in other processes are texts; they may import their own module."""
    wrong = []
    for file in sorted((REPOSITORY / "tests").rglob("*.py")):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
                names = [name for name in names if "test" in name.split(".")[0] or node.level]
            else:
                continue
            named = [n for n in names if any(part.startswith("test_") for part in n.split("."))]
            wrong += [f"{place(file, node.lineno)}: {name}" for name in named]
    assert not wrong, "what test modules share is in tests/helpers:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch.distributed as dist", {"torch.distributed"}),
        ("from .. import layout", {"pyrl_ext.layout"}),
        ("from . import native", {"pyrl_ext.ops.native"}),
        ("from ..plan.schema import Model", {"pyrl_ext.plan.schema.Model"}),
        ("from pyrl_ext import _C", {"pyrl_ext._C"}),
        ("def f():\n    from megatron.core import x", {"megatron.core.x"}),
    ],
)
def test_house_resolves_its_imports(code: str, expected: set[str]):
    found = resolve(ast.parse(code), PACKAGE / "ops" / "gather.py")
    assert {module for _, module in found} == expected


# Reading the source ------------------------------------------------------------------------------


def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse("\n".join(lines_of(file)), str(file))


def place(file: Path, line: int | None = None) -> str:
    name = str(file.relative_to(REPOSITORY))
    return name if line is None else f"{name}:{line}"


def room_of(file: Path) -> str:
    """First path part below pyrl_ext: `ops/gather/native.py` -> ops, `layout.py` -> layout."""
    return Path(file.relative_to(PACKAGE).parts[0]).stem


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@cache
def imports_of(file: Path) -> tuple[tuple[int, str], ...]:
    return tuple(resolve(tree_of(file), file))


def resolve(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, also inside functions."""
    package = ["pyrl_ext", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def module_of(file: Path) -> str:
    """Dotted name of the module in a file."""
    parts = ["pyrl_ext", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


def longest_prefix(name: str, modules: Container[str]) -> str | None:
    """The module that a dotted name is, or is an attribute of; None: it is none of `modules`."""
    while name not in modules:
        name = name.rpartition(".")[0]
        if not name:
            return None
    return name


def module_level_imports(file: Path) -> Iterator[tuple[int, str]]:
    """The imports of `imports_of` that are not inside functions."""
    nodes: list[ast.AST] = [tree_of(file)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from resolve(node, file)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def attributes_of(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute chain that starts at a name, aliases undone."""
    aliases = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            aliases |= {alias.asname: prefix + alias.name for alias in node.names if alias.asname}
    for node in ast.walk(tree_of(file)):
        parts = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(node, ast.Attribute) and isinstance(inner, ast.Name):
            yield node.lineno, ".".join([aliases.get(inner.id, inner.id), *reversed(parts)])
