"""Memory of a GPU of a vLLM engine: weights, and the key/value cache that is left."""

from __future__ import annotations

from dataclasses import dataclass

from pyrl_ext.plan.forecast.attention import kv_bytes_per_token
from pyrl_ext.plan.forecast.encoder import encoder_parameters
from pyrl_ext.plan.forecast.hardware import memory_limit
from pyrl_ext.plan.forecast.state_layers import state_bytes
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.plan import Plan

# vLLM's options that change how much a GPU holds.
UNCOUNTED = {"quantization", "kv_cache_dtype", "cpu_offload_gb", "num_gpu_blocks_override"}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine, counted from shapes."""

    limit: int
    """Memory of the GPU."""
    taken: int
    """The engine's share of it."""
    weights: int
    cache: int
    """Key/value cache of one token."""
    sample: int
    """Tokens of the longest sample."""
    state: int = 0
    """States of one sequence, of layers that have no such cache."""

    @property
    def least(self) -> int:
        """Needed for the weights and the longest sample."""
        return self.weights + self.state + self.cache * self.sample

    @property
    def tokens(self) -> int:
        """Tokens for which the key/value cache has room."""
        return max(0, self.taken - self.weights) // max(1, self.cache)


def engine_memory(plan: Plan) -> EngineMemory | None:
    """Memory of each GPU of an engine; None where it is not vLLM's on GPUs of a known size, or
    options of the engine change it. Remote engines have GPUs such as the trainer's."""
    rollout = plan.rollout
    limit = memory_limit(plan)
    if rollout.engine != "vllm" or plan.device != "cuda" or limit is None:
        return None
    if UNCOUNTED & rollout.engine_options.keys():
        return None
    held = DTYPE_BYTES[plan.rollout_dtype] * (
        parameters(plan.sizes).total + encoder_parameters(plan)
    )
    return EngineMemory(
        limit,
        int(rollout.gpu_memory_utilization * limit),
        held // rollout.tp,
        kv_bytes_per_token(plan, rollout.tp),
        plan.longest + 1,
        state_bytes(plan, rollout.tp),
    )
