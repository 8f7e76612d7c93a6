"""Compile Triton kernels for a GPU that is absent, from the launches of the real backends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

_devices = count()  # Triton keeps the kernels of a device in memory, whatever its target


@dataclass(frozen=True)
class Variant:
    """A kernel that Triton compiled.

    Args:
        kernel: name of the function.
        cubin:  its file in the cache.
        shared: shared memory of a block [bytes].
    """

    kernel: str
    cubin: Path
    shared: int


class OfflineDriver(DriverBase):
    """A GPU that is absent: kernels are compiled for its ``target`` and not launched."""

    def __init__(self, target: int):
        self.device = next(_devices)
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
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("OfflineDriver: nothing is launched")

    get_active_torch_device = get_benchmarker = map_python_to_cpp_type  # type: ignore[assignment]


@contextmanager
def offline(folder: Path, target: int) -> Iterator[list[Variant]]:
    """Let launches inside compile for ``target`` into ``folder``, and launch nothing.

    Args:
        folder: of Triton's cache.
        target: compute capability, 90 for sm_90.

    Returns:
        The variants that the launches asked for, in order.
    """
    variants: list[Variant] = []

    def listen(*, src: Any, metadata: Any, metadata_group: dict[str, str], **_: Any) -> None:
        (cubin,) = (path for name, path in metadata_group.items() if name.endswith(".cubin"))
        variants.append(Variant(src.name, Path(cubin), metadata["shared"]))

    active_driver = driver._active
    listener = knobs.compilation.listener
    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        driver.set_active(OfflineDriver(target))
        knobs.compilation.listener = listen
        try:
            yield variants
        finally:
            driver._active = active_driver
            knobs.compilation.listener = listener
