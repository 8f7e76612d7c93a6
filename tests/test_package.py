"""The package as a whole: importing it is free, and the binary needs no torch."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from pyrl_ext.lazy import missing
from tests.helpers.deadline import DEADLINE
from tests.helpers.declared import declared, undeclared
from tests.helpers.python_path import python_path

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[1]


def run(script):
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_import_runs_one_module_and_what_pkgutil_needs():
    """Counted, not timed: seconds depend on the machine."""
    script = "import sys; b = set(sys.modules); import {}; print(*set(sys.modules) - b)"
    loaded, needed = (set(run(script.format(name)).split()) for name in ("pyrl_ext", "pkgutil"))
    assert "pyrl_ext" in loaded
    assert loaded <= {"pyrl_ext", "pkgutil"} | needed


def test_version_is_that_of_the_project():
    import pyrl_ext

    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared and declared[1] == pyrl_ext.__version__


def test_changes_begin_with_this_version():
    import pyrl_ext

    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "docs/changes.md").read_text(), re.M)
    assert versions[0] == pyrl_ext.__version__


def test_workflow_runs_what_a_change_must_pass():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_ci_runs_what_needs_no_extras_before_it_installs_them():
    """vLLM and TransformerEngine bring packages that this one may have forgotten to declare."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8").replace("\\\n  ", "")
    lines = [line.split(" #")[0].strip() for line in script.splitlines()]
    assert [line for line in lines if re.match(r"make |\.venv/", line)] == [
        "make build .venv/.browser",
        ".venv/bin/python -m tests.readme --extras without --until $((start + 3900))"
        " --end $((start + 4800)) --first 'make check' 'make test' 'make parity' \"$SLOW\"",
        ".venv/bin/python -m tests.readme --extras with --print",  # on a slow machine
        "make .venv/.vllm .venv/te .venv/wandb .venv/verl .venv/skyrl .venv/.docs",
        ".venv/bin/python -m tests.readme --extras with --until $((start + 4200))"
        " --end $((start + 4800)) --first 'make test-vllm' 'make test-te'",
    ]


LIBRARY = """
from tests.helpers.declared import hide_undeclared

hidden = hide_undeclared()
assert {"pydantic", "megatron", "transformers"} <= hidden and not {"torch", "numpy"} & hidden
import torch

from pyrl_ext import loss, ops, pack, replay, schedule

layout = pack.TokenLayout((3, 2), cp_size=2)
print(ops.gather_rows(torch.arange(5), layout.rows(0), fill=torch.tensor(9)).tolist())
print(loss.vocab_parallel.logprobs(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=int)).exp().item())
print(loss.linear_logprob(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3]))[1].exp().item())
print(schedule.plan_microbatches([3, 2], 1, 4).samples)
groups = schedule.CpGroups(2, 4, cost=schedule.CostModel(1.0, 0.0))
print(sorted(schedule.plan_dynamic_cp([6, 2], groups).samples))
routes = torch.tensor([[[[0, 1]], [[1, 0]]]])
found = replay.RoutedExperts.from_padded(routes, torch.ones(1, 2), num_experts=2)
print(found.of_layers([0])[0].ids.tolist())
for package, name in ((loss, "evaluate"), (pack, "no_such_name")):
    try:
        getattr(package, name)
    except (ImportError, AttributeError) as error:
        print(error)
try:
    pack.packed_seq_params([1])
except ImportError as error:
    print(error)
from pyrl_ext.cli import main

print(main(["plan", "tiny"]))
"""


def test_library_works_with_torch_and_numpy_alone():
    """And what needs more says so."""
    ran = subprocess.run(
        [sys.executable, "-c", LIBRARY], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE
    )
    assert ran.returncode == 0, ran.stderr
    lacks = "which is not installed. Run: pip install 'pyrl-ext[train]'"
    assert ran.stdout.splitlines() == [
        "[0, 9, 3, 9]",
        "0.25",
        "4.0",
        "[0, 1]",
        "[0, 1]",
        "[[0, 1], [1, 0]]",
        f"pyrl_ext.loss.evaluate needs the package pydantic, {lacks}",
        "module 'pyrl_ext.pack' has no attribute 'no_such_name'",
        f"pyrl_ext.pack.packed_seq_params needs the package megatron, {lacks}",
        "2",
    ]
    assert f"pyrl plan needs the package pydantic, {lacks}" in ran.stderr


def test_library_names_are_what_their_packages_define():
    from pyrl_ext import loss, pack, plan, replay, schedule

    for package in (loss, pack, plan, replay, schedule):
        for name in package.__all__:
            found = getattr(package, name)
            home = getattr(found, "__module__", None) or found.__name__
            assert home.startswith(package.__name__ + "."), name


def test_every_family_runs_with_declared_packages_alone(tmp_path: Path):
    """A whole step, where nothing is found that pyproject.toml's dependencies do not bring."""
    names = ("tiny", "tiny_qwen3", "tiny_qwen3_next", "tiny_nemotron", "tiny_vl")
    configs = [str(ROOT / f"configs/{name}.yaml") for name in names]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.declared", *configs],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    hidden = ran.stdout.splitlines()[0].split()
    assert "pytest" in hidden and "torch" not in hidden
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(names)


def test_package_imports_what_its_dependencies_or_extras_bring():
    hidden = undeclared(declared("train"))
    of_extras = {"causal_conv1d", "fla", "mamba_ssm", "transformer_engine", "vllm", "wandb"}
    of_extras |= {"datasets", "httpx", "math_verify", "openai", "reasoning_gym", "renderers"}
    of_extras |= {"verifiers", "verl"}
    imported = set[str]()
    for file in (ROOT / "pyrl_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    assert {"torch", "PIL", "megatron", "vllm"} <= imported
    assert not imported & hidden - of_extras


def test_undeclared_are_the_modules_that_no_requirement_brings():
    hidden = undeclared(["pytest", "pyrl-ext"])
    assert {"pytest", "pluggy", "pyrl_ext", "torch"} & hidden == set()
    assert {"ruff", "hypothesis"} <= hidden
    assert "torch" in undeclared(["pytest"])


def test_C_does_not_link_torch():
    spec = find_spec("pyrl_ext._C")
    assert spec is not None and spec.origin is not None, "pyrl_ext._C is not built"
    binary = Path(spec.origin).read_bytes()
    for library in (b"libtorch", b"libc10", b"libcudart.so"):
        assert library not in binary


def test_C_loads_without_torch():
    """It is as old or as new as any torch, since it knows none."""
    script = (
        "import sys; from pyrl_ext import _C; print('torch' in sys.modules, _C.has_isa('portable'))"
    )
    assert run(script).split() == ["False", "True"]


def test_native_sources_know_no_torch_and_bindings_alone_know_python():
    sources = [file for file in (ROOT / "csrc").rglob("*") if file.is_file()]
    assert len(sources) > 30
    for source in sources:
        text = source.read_text(encoding="utf-8")
        assert "torch/" not in text and "ATen" not in text, source
        assert source.name == "bindings.cpp" or "pybind11" not in text, source


def test_C_has_emulation_for_developers_only():
    """The GPU grids walked on the host are in an editable install, never in a wheel."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = build["tool"]["scikit-build"]
    cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert re.search(r"option\(PYRL_TESTS .* OFF\)", cmake)
    assert "PYRL_TESTS" not in settings["cmake"]["define"]
    (developers,) = (o for o in settings["overrides"] if "PYRL_TESTS" in str(o))
    assert developers["if"] == {"state": "editable"}
    from pyrl_ext import _C

    emulated = {name for name in dir(_C) if name.endswith("_emulated")}
    kernels = {name for name in dir(_C) if name.endswith("_cuda")}
    assert not kernels or {name.removesuffix("_emulated") for name in emulated} == {
        name.removesuffix("_cuda") for name in kernels
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel of a copy of this tree, without the native
    extension, which no command here needs. Dependencies are those of this process."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.so")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-C", "wheel.cmake=false"]
    subprocess.run([*pip, *build, "-w", str(folder), str(source)], check=True, timeout=DEADLINE)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    install = ["install", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=DEADLINE)
    (site / "dependencies.pth").write_text(str(Path(yaml.__file__).parents[1]))
    shutil.rmtree(source)
    return folder / "venv/bin/python"


@pytest.mark.slow
def test_wheel_brings_configs_and_benchmarks_in_the_package_alone(installed: Path):
    (site,) = installed.parents[1].glob("lib/python*/site-packages")
    shipped = site / "pyrl_ext/shipped"
    for folder in ("configs", "benchmarks"):
        there = {f.relative_to(shipped) for f in (shipped / folder).rglob("*") if f.is_file()}
        here = {f.relative_to(ROOT) for f in (ROOT / folder).rglob("*") if f.is_file()}
        left_out = {f for f in here if f.suffix in (".png", ".pyc") or "results" in f.parts}
        assert there == here - left_out and there
    top = {path.name for path in site.iterdir() if not path.name.endswith((".pth", "_"))}
    assert {name for name in top if "dist-info" not in name} == {"pyrl_ext", "bin"}


@pytest.mark.slow
def test_wheel_copies_a_config_that_plans_and_refuses_unknown_benchmarks(
    installed: Path, tmp_path: Path
):
    def pyrl(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [installed, "-m", "pyrl_ext.cli", *arguments],
            cwd=tmp_path,
            env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )

    assert pyrl("plan", "tiny").returncode == 0  # the shipped one
    assert "Shipped configs with a name like this: tiny" in pyrl("plan", "tinny").stderr
    assert "configs/tiny.yaml" in pyrl("configs", "--copy", "tiny").stdout.splitlines()
    planned = pyrl("plan", "configs/tiny.yaml")
    assert planned.returncode == 0, planned.stderr
    assert "every field is known" in planned.stdout
    assert "gather_rows" in pyrl("bench", "--list").stdout
    refused = pyrl("bench", "gater_rows")
    assert refused.returncode == 2 and "Did you mean gather_rows?" in refused.stderr
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version and pyrl("--version").stdout == f"pyrl_ext {version[1]}\n"


def test_missing_names_what_to_install_except_for_a_module_of_this_package():
    own = ModuleNotFoundError("No module named 'pyrl_ext.none'", name="pyrl_ext.none")
    assert missing("pyrl_ext.loss", own) is own
    other = missing("pyrl_ext.loss", ModuleNotFoundError("No module", name="megatron.core"))
    assert other.name == "megatron" and "pip install 'pyrl-ext[train]'" in str(other)
