"""Data sheets of the GPUs that a plan may name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyrl_ext.plan.model.units import MIB
from pyrl_ext.plan.plan import Plan


@dataclass(frozen=True)
class Gpu:
    """One device. Rates are the data sheet's dense peaks; the shares that kernels are assumed to
    reach are in `parts.REACHED`."""

    target: int
    """Compute capability; 90 means sm_90."""
    memory: int
    """Memory that the driver reports [bytes]."""
    flops: dict[str, float]
    """dtype -> matrix products [FLOP/s]."""
    bandwidth: float
    """Memory bandwidth [byte/s]."""
    link: float
    """Bandwidth to the other devices of its node, one direction [byte/s]."""
    network: float
    """Its share of the node's network, one direction [byte/s]."""
    host: float
    """Bandwidth to host memory, one direction [byte/s]."""


# Assumed: the rate at which one process writes to TCP sockets, to all receivers together [byte/s].
TCP = 2.5e9
# Assumed: the rate of a broadcast by NCCL to remote engines, piece by piece through host memory at
# both ends [byte/s].
BROADCAST = 10e9


# Source: NVIDIA's data sheets of the SXM parts; memory as nvidia-smi reports it. Network: one
# adapter a device, 200 Gbit/s in A100 nodes and 400 Gbit/s in the others. Host: PCIe of generation
# 4 in A100 nodes and 5 in the others. float32 is the rate without tensor cores: torch uses them
# (TF32) only on request, and the trainer does not request it. An A100 is no faster in 8 bits than
# in 16.
_HOPPER = {"float32": 67e12, "bfloat16": 989e12, "fp8": 1979e12}
_BLACKWELL = {"float32": 75e12, "bfloat16": 2250e12, "fp8": 4500e12}
_AMPERE = {"float32": 19.5e12, "bfloat16": 312e12}
GPUS = {
    "A100": Gpu(80, 81920 * MIB, _AMPERE, 2.039e12, 300e9, 25e9, 32e9),
    "H100": Gpu(90, 81559 * MIB, _HOPPER, 3.35e12, 450e9, 50e9, 64e9),
    "H200": Gpu(90, 143771 * MIB, _HOPPER, 4.8e12, 450e9, 50e9, 64e9),
    "B200": Gpu(100, 183359 * MIB, _BLACKWELL, 8e12, 900e9, 50e9, 64e9),
}


def gpu_of(plan: Plan) -> Gpu | None:
    """The GPU that the plan names; None if it names none."""
    return GPUS[plan.hardware.gpu] if plan.hardware.gpu else None


def memory_limit(plan: Plan) -> int | None:
    """Device memory of a rank [bytes]; None if the plan names neither a GPU nor its memory."""
    if plan.hardware.memory is not None:
        return plan.hardware.memory
    gpu = gpu_of(plan)
    return gpu.memory if gpu else None


def parse_gpus(text: str) -> tuple[int, str]:
    """Read `8xH200` as (8, H200).

    Raises:
        ValueError: another format, or a GPU without a data sheet here
    """
    found = re.fullmatch(r"([1-9]\d{0,4})\s*x\s*(\w+)", text.strip(), re.IGNORECASE)
    name = found[2].upper() if found else ""
    if found is None or name not in GPUS:
        raise ValueError(f"{text!r}, expected a number and one of {', '.join(GPUS)}: 8xH200")
    return int(found[1]), name


def group_rate(gpu: Gpu, per_node: int, size: int, stride: int) -> float:
    """Peak rate at which a rank sends in a ring of `size` ranks that are `stride` apart [byte/s].

    A ring over several nodes leaves each node through the adapters of its members there.
    """
    if size * stride <= per_node:
        return gpu.link
    members = max(1, per_node // stride)
    return min(gpu.link, gpu.network * members)


def exchange_rate(gpu: Gpu, per_node: int, size: int, stride: int) -> float:
    """Peak rate at which a rank sends in an all-to-all [byte/s]: an equal part to every other rank,
    through the node's links and its own adapter at the same time."""
    near = min(size, max(1, per_node // stride))
    if near == size:
        return gpu.link
    across = (size - near) / (size - 1)
    return 1 / max(across / gpu.network, (1 - across) / gpu.link)
