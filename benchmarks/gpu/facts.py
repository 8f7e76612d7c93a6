"""The machine: what the report says first. ``python -m benchmarks.gpu.facts``"""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.rows import note

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "vllm")


def answer(*command: str) -> str:
    """The text that a program prints; "": it is not there, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:
        return ""


def facts() -> dict[str, Any]:
    """GPU, driver, packages, commit."""
    found: dict[str, Any] = {"gpu": "none", "python": platform.python_version()}
    if torch.cuda.is_available():
        sheet = torch.cuda.get_device_properties(0)
        found |= {"gpu": sheet.name, "memory_bytes": sheet.total_memory}
        found |= {
            "sm": f"{sheet.major}{sheet.minor}",
            "multiprocessors": sheet.multi_processor_count,
        }
        query = ("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader")
        found["driver, top clock"] = answer(*query)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__
    found["commit"] = answer("git", "rev-parse", "--short", "HEAD")
    return found


if __name__ == "__main__":
    note("machine", **facts())
