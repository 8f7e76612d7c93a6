"""Data sheets of the GPUs a plan may name: what memory and time are held against."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyrl_ext.plan.plan import Plan


@dataclass(frozen=True)
class Gpu:
    """One device. Rates are the data sheet's dense peaks; what kernels reach is `timing`'s."""

    target: int
    """Compute capability: 90 is sm_90."""
    memory: int
    """What the driver reports [bytes]."""
    flops: dict[str, float]
    """dtype -> matrix products [FLOP/s]."""
    bandwidth: float
    """Of its memory [byte/s]."""
    link: float
    """To the other devices of its node, one direction [byte/s]."""
    network: float
    """Its share of the node's network, one direction [byte/s]."""
    host: float
    """To the host's memory, one direction [byte/s]."""


MIB = 2**20
# Source: NVIDIA's data sheets of the SXM parts; memory as nvidia-smi reports it; the network is one
# adapter a device, 200 Gbit/s in A100 nodes and 400 Gbit/s in the others; the host is behind PCIe
# of generation 4 in A100 nodes and 5 in the others. float32 is that of plain cores: torch's
# products of float32 do not use tensor cores (TF32) unless told to, and the trainer does not.
# An A100 computes in 8 bits no faster than in 16.
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
    """The device that the plan names."""
    return GPUS[plan.hardware.gpu] if plan.hardware.gpu else None


def memory_limit(plan: Plan) -> int | None:
    """Bytes that a rank may take; None where the plan names neither a GPU nor its memory."""
    if plan.hardware.memory is not None:
        return plan.hardware.memory
    gpu = gpu_of(plan)
    return gpu.memory if gpu else None


def parse_gpus(text: str) -> tuple[int, str]:
    """Count and name of `8xH200`.

    Raises:
        ValueError: not written so, or a GPU without a data sheet here
    """
    found = re.fullmatch(r"([1-9]\d{0,4})\s*x\s*(\w+)", text.strip(), re.IGNORECASE)
    name = found[2].upper() if found else ""
    if found is None or name not in GPUS:
        raise ValueError(f"{text!r}, expected a number and one of {', '.join(GPUS)}: 8xH200")
    return int(found[1]), name


def group_rate(gpu: Gpu, per_node: int, size: int, stride: int) -> float:
    """What a rank of a ring of ``size`` ranks, ``stride`` apart, can send at best [byte/s].

    A ring over nodes crosses each border through the adapters of its members in that node.
    """
    if size * stride <= per_node:
        return gpu.link
    members = max(1, per_node // stride)
    return min(gpu.link, gpu.network * members)


def exchange_rate(gpu: Gpu, per_node: int, size: int, stride: int) -> float:
    """What a rank of an all-to-all can send at best [byte/s]: an equal part to every other rank,
    through the node's links and its own adapter at once."""
    near = min(size, max(1, per_node // stride))
    if near == size:
        return gpu.link
    across = (size - near) / (size - 1)
    return 1 / max(across / gpu.network, (1 - across) / gpu.link)
