"""The part of this package that vLLM's server loads, through vLLM's own entry points.

Each of its processes calls `general` before it builds anything, and `platform` while it looks for
its platform. Both do nothing unless `python -m pyrl_ext.train.serve` has started the server.
"""

from __future__ import annotations

import os

SERVED = "PYRL_SERVED"


def platform() -> None:
    """Names no platform: a CPU's Triton gets its name before vLLM asks for it."""
    if os.environ.get(SERVED) == "1" and os.environ.get("TRITON_INTERPRET") == "1":
        from pyrl_ext.rollout.vllm import cpu

        if cpu.installed():
            cpu.prepare(interpreted=True)


def general() -> None:
    """Registers the weight transfer, ends the process with its parent, and patches vLLM on CPUs."""
    if os.environ.get(SERVED) != "1":
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    from pyrl_ext.rollout.process.server import end_with
    from pyrl_ext.rollout.vllm import cpu

    end_with(os.getppid())  # without it the engine's processes outlive a killed API server
    if "pyrl" not in Factory._registry:
        Factory.register_engine("pyrl", "pyrl_ext.rollout.remote.vllm_weights", "StagedTransfer")
    if cpu.installed():
        cpu.patch()
        cpu.inspect_models_here()
        if os.environ.get("TRITON_INTERPRET") == "1":
            cpu.without_sampling_kernel()
