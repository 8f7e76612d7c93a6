"""A GPU without hardware: what a GPU refuses, waits for and may reorder, on a CPU.

Its tensors call themselves ``gpu:0`` and hold their values on the host. What it shows:

- an operator that takes tensors of both sides raises, as CUDA does;
- every wait of the host for the device is counted by line;
- work on streams runs as late or as early as events allow, so that a missing event gives other
  numbers: what is not computed yet holds NaN, or -1;
- memory that is freed is filled with NaN in the order of the stream that allocated it, unless
  ``record_stream`` names the others that use it;
- copies that do not wait need pinned memory, which must not change before they have run;
- bytes that are allocated.

A process has one, which stays, so tests that use it run in separate processes:

    def check(group):
        with gpu_double.rehearsed("late") as seen:
            x = torch.ones(4, device="gpu")
            (x + 1).sum().item()
        assert seen.waits

    run_ranks(check, 1)

Not modelled: how long anything takes, kernels that only a GPU runs (a CPU's serve in their place),
collectives in the order of streams (they run when they are submitted), and processes that share
memory of a device. Python only, torch 2.13 on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from pyrl_ext.ops.tensors import GPU_TYPES
from tests.helpers.gpu_double import memory
from tests.helpers.gpu_double.seen import SEEN, Seen
from tests.helpers.gpu_double.streams import AT_ONCE, EARLY, LATE, ORDER, DeviceModule, drain_all
from tests.helpers.gpu_double.tensor import Device, run

__all__ = ["AT_ONCE", "EARLY", "LATE", "install", "rehearsed"]


@cache
def install() -> None:
    """Register the device ``gpu``, once and for the whole process."""
    # with AMX, products of bf16 depend on the address of their inputs: orders differ in bits
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    _setup_privateuseone_for_python_backend(memory.NAME, DeviceModule())
    GPU_TYPES.add(memory.NAME)
    global _library
    _library = torch.library.Library("aten", "IMPL")

    # `torch.tensor(..., device="gpu")` calls these two, and no mode sees it
    def empty_strided(size: list[int], stride: list[int], **options: Any) -> torch.Tensor:
        options["device"] = memory.device()
        return run(torch.ops.aten.empty_strided.default, (size, stride), options)

    def copy_from(
        source: torch.Tensor, out: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        return run(torch.ops.aten.copy_.default, (out, source, non_blocking), {})

    _library.impl("empty_strided", empty_strided, "PrivateUse1")
    _library.impl("_copy_from", copy_from, "PrivateUse1")


_library: torch.library.Library | None = None  # alive as long as the process


@contextmanager
def rehearsed(order: str = AT_ONCE) -> Iterator[Seen]:
    """The device in a block, whose streams run in ``order``.

    Raises: AssertionError at the end if host memory was used in a way that loses data.
    """
    install()
    SEEN.clear()
    ORDER[0] = order
    try:
        with Device():
            yield SEEN
            drain_all()
    finally:
        ORDER[0] = AT_ONCE
    assert not SEEN.reports, "\n".join(SEEN.reports)
