"""Data sheets of the GPUs a plan may name: what memory and time are held against."""

from __future__ import annotations

from dataclasses import dataclass

from pyrl_ext.plan.compiled import Plan


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


MIB = 2**20
# Source: NVIDIA's data sheets of the SXM parts; memory as nvidia-smi reports it; the network is one
# adapter a device, 200 Gbit/s in A100 nodes and 400 Gbit/s in the others.
_HOPPER = {"float32": 494e12, "bfloat16": 989e12, "fp8": 1979e12}
_BLACKWELL = {"float32": 1100e12, "bfloat16": 2250e12, "fp8": 4500e12}
GPUS = {
    "A100": Gpu(80, 81920 * MIB, {"float32": 156e12, "bfloat16": 312e12}, 2.039e12, 300e9, 25e9),
    "H100": Gpu(90, 81559 * MIB, _HOPPER, 3.35e12, 450e9, 50e9),
    "H200": Gpu(90, 143771 * MIB, _HOPPER, 4.8e12, 450e9, 50e9),
    "B200": Gpu(100, 183359 * MIB, _BLACKWELL, 8e12, 900e9, 50e9),
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
