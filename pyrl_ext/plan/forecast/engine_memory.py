"""Memory of a GPU of an engine: weights, and the key/value cache that is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyrl_ext.plan.forecast.encoder import encoder_parameters
from pyrl_ext.plan.forecast.items import Item
from pyrl_ext.plan.forecast.parameters import (
    engine_parameters,
    published_factors,
    quantized_parameters,
)
from pyrl_ext.plan.model.attention import kv_bytes_per_token
from pyrl_ext.plan.model.hardware import memory_limit
from pyrl_ext.plan.phases import MEMORY_PHASES, START
from pyrl_ext.plan.plan import Plan

# vLLM's options that change how much a GPU holds.
UNCOUNTED = {"kv_cache_dtype", "cpu_offload_gb", "num_gpu_blocks_override"}

BLOCK = 128  # rows, and columns, of an 8-bit matrix that share a float32 scale
FP8_BYTES = 1 + 4 / BLOCK**2


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
    return EngineMemory(
        limit,
        int(rollout.gpu_memory_utilization * limit),
        whole_weights(plan) // rollout.tp,
        kv_bytes_per_token(plan, rollout.tp),
        plan.longest + 1,
        state_bytes(plan, rollout.tp),
    )


def whole_weights(plan: Plan) -> int:
    """Bytes of all weights in the engine's types, with the encoders'."""
    return language_weights(plan) + plan.engine_bytes * encoder_parameters(plan)


def language_weights(plan: Plan) -> int:
    """Bytes of the language model's weights in the engine's types."""
    counts = engine_parameters(plan)
    quantized = quantized_parameters(plan)
    if not quantized:
        return plan.engine_bytes * counts.total
    kept = plan.engine_bytes * (counts.total - quantized)
    dense = FP8_BYTES * (quantized - counts.expert)
    return kept + int(dense + expert_weights(plan))


def expert_weights(plan: Plan) -> float:
    """Bytes of all routed experts in the engine. vLLM fills up those in 8 bits to whole blocks, on
    each of its ranks."""
    sizes = plan.sizes
    experts = engine_parameters(plan).expert
    if plan.rollout.quantization is None or not experts:
        return plan.engine_bytes * experts
    width = sizes.moe_intermediate_size
    if not plan.rollout.engine_options.get("enable_expert_parallel"):
        width //= plan.rollout.tp
    filled = _whole_blocks(width) / width * _whole_blocks(sizes.hidden_size) / sizes.hidden_size
    return FP8_BYTES * experts * filled


def _whole_blocks(side: int) -> int:
    return -(-side // BLOCK) * BLOCK


def state_bytes(plan: Plan, tp: int) -> int:
    """Bytes that an engine keeps for one sequence on each of its `tp` GPUs, however long it is:
    the float32 state of every such layer, and the last inputs of its convolution."""
    mixer = plan.sizes.state_mixer
    if mixer is None:
        return 0
    taps = plan.engine_bytes * mixer.convolved * (mixer.taps - 1)
    layers = sum(kind.has_state for kind in plan.sizes.layer_kinds)
    return layers * -(-(4 * mixer.state + taps) // tp)


def engine_items(plan: Plan, longest: int) -> Iterator[Item]:
    """The rollout engine, if it shares the trainer's devices.

    Args:
        longest: tokens of the longest sample.
    """
    rollout = plan.rollout
    if plan.remote_engines:
        return
    width = plan.engine_bytes
    sleeping = (START, *MEMORY_PHASES[:2])
    always = (START, *MEMORY_PHASES)
    weights = whole_weights(plan)
    factors = width * published_factors(plan).numbers * (plan.lora_publish == "adapter")
    if rollout.engine == "hf":
        awake = sleeping if plan.engine_sleeps else always
        yield Item("engine weights", weights, awake, f"{width} bytes a parameter, whole model")
        if factors:
            yield Item("engine adapters", factors, awake, f"{width} bytes a number of all factors")
        yield _embedded_cache(plan, longest)
    elif rollout.engine == "vllm" and rollout.gpus is None:
        awake = sleeping if rollout.sleep else always
        on_gpu = (weights + factors) // rollout.tp
        each = f"{width} bytes a parameter"
        if rollout.quantization is not None:
            each = f"1 byte an element of quantized matrices, {width} of others"
        why = f"{each} / rollout.tp {rollout.tp}"
        limit = memory_limit(plan)
        if limit is None:
            yield Item("engine weights", on_gpu, awake, why)
            return
        taken = int(rollout.gpu_memory_utilization * limit)
        left = max(0, taken - on_gpu) // max(1, kv_bytes_per_token(plan, rollout.tp))
        phases = (START, "rollout") if rollout.sleep else always
        words = f"rollout.gpu_memory_utilization: weights, and a KV cache of about {left:,} tokens"
        yield Item("engine", taken, phases, words)
        if rollout.sleep:
            yield Item("engine weights", on_gpu, ("publish",), f"{why}; the KV cache still sleeps")


def _embedded_cache(plan: Plan, longest: int) -> Item:
    prompts = -(-plan.prompts_asked // plan.parallel.world_size)
    slots = min(plan.max_num_seqs, prompts * plan.batching.samples_per_prompt)
    tokens = slots * longest
    width = kv_bytes_per_token(plan, 1)
    # a slot's token, log-prob and routes, and three float32 copies of its logits
    held = tokens * (width + 12 + plan.sizes.route_bytes_per_token)
    held += slots * (state_bytes(plan, 1) + 12 * plan.sizes.vocab_size)
    why = f"{slots} sequences, {tokens:,} tokens x {width:,} bytes, and their logits"
    return Item("engine cache", held, ("rollout",), why, exact=False)
