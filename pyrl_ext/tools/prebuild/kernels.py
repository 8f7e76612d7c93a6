"""Triton kernels that are compiled before the run, for a GPU that need not be at hand.

`build` makes the very calls that a training run of the plan makes, on tensors without data and with
a driver that launches nothing, into a folder that is a Triton cache. A run loads from it through
:mod:`pyrl_ext.ops.prebuilt`. Triton compiles a kernel for each set of dtypes, constants and
divisibilities by 16 of its sizes, so each call is made with row counts of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from pyrl_ext.ops.prebuilt import MANIFEST, facts, launches
from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.hardware import gpu_of

ROWS = (4096, 4095, 17, 1)  # Triton tells multiples of 16 and 1 from others, in what follows too


class Offline(DriverBase):
    """A GPU that is not there: kernels are compiled for its ``target`` and not launched."""

    def __init__(self, target: int):
        self.target = GPUTarget("cuda", target, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda *binary: (self, self, 0, 0, 1 << 20),
            unload_module=lambda module: None,
        )
        self.launcher_cls = lambda source, metadata: lambda *call: None

    @classmethod
    def is_active(cls) -> bool:  # type: ignore[override]
        return False

    def get_current_target(self) -> GPUTarget:  # type: ignore[override]
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("Offline: nothing is launched")

    get_active_torch_device = get_benchmarker = map_python_to_cpp_type  # type: ignore[assignment]


def build(plan: Plan, folder: Path, say: Callable[[str], object] = print) -> None:
    """Compile every Triton kernel variant of ``plan`` into ``folder``. A process can do so once:
    Triton would not write again what it has compiled already.

    Raises: ValueError when the plan names no GPU.
    """
    target = _target(plan)
    config = plan.sizes.megatron_config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # until all are there
    with offline(folder, target) as found:
        for name, launch in launches(plan, config):
            before = len(found)
            start = perf_counter()
            for rows in ROWS:
                launch(rows)
            new = sum(not hit for _, hit in found[before:])
            old = len(found) - before - new
            say(f"{name}: {new} variants compiled in {perf_counter() - start:.1f} s, {old} there")
    (folder / MANIFEST).write_text(json.dumps(facts(plan, config, target), indent=2) + "\n")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    say(f"{len(found)} kernels for sm_{target} in {folder}, {size / 1e6:.1f} MB")


def _target(plan: Plan) -> int:
    gpu = gpu_of(plan)
    if gpu is None:
        raise ValueError(
            "hardware.gpu: null, expected the GPU to compile kernels for. For example "
            "hardware.gpu=H200"
        )
    return gpu.target


# Triton's switches -------------------------------------------------------------------------------


@contextmanager
def offline(folder: Path, target: int) -> Iterator[list[tuple[str, bool]]]:
    """Let launches inside the ``with`` block compile for ``target`` into ``folder``, and launch
    nothing; gives `compiled`."""
    with _cache(folder), _driver(Offline(target)), compiled() as found:
        yield found


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        yield


@contextmanager
def _driver(other: DriverBase) -> Iterator[None]:
    before = driver._active
    driver.set_active(other)
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def compiled() -> Iterator[list[tuple[str, bool]]]:
    """(kernel, whether it was in the cache) of every variant that Triton asks its cache for."""
    found: list[tuple[str, bool]] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.name, cache_hit))

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before
