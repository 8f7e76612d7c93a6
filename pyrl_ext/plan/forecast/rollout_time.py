"""Seconds that the rollout engine takes to generate a step's samples."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from pyrl_ext.plan.forecast.compute_time import Spent, reached
from pyrl_ext.plan.forecast.encoder import encoder_parameters, encoders
from pyrl_ext.plan.forecast.engine_memory import expert_weights, language_weights, state_bytes
from pyrl_ext.plan.forecast.flops import model_flops
from pyrl_ext.plan.forecast.parameters import engine_parameters
from pyrl_ext.plan.forecast.workload import SampleLength, step_samples
from pyrl_ext.plan.model.attention import kv_bytes_per_token
from pyrl_ext.plan.model.hardware import Gpu, group_rate, memory_limit
from pyrl_ext.plan.plan import Plan

# Assumed: fixed time of a layer besides memory traffic and FLOPs, in a CUDA graph and with kernels
# launched one by one.
GRAPH_SECONDS = 60e-6
EAGER_SECONDS = 400e-6
# Assumed: of an all-reduce of a few rows within a node, however few bytes.
ALL_REDUCE_SECONDS = 15e-6
# Assumed: share of the drafted tokens that sampling accepts, if it accepted those before. The
# technical report of DeepSeek-V3 has 0.85 to 0.9 for one MTP layer, without training by rewards.
ACCEPTED = 0.7


@lru_cache(maxsize=64)
def running_over_time(responses: tuple[int, ...], slots: int) -> list[tuple[int, int]]:
    """[(steps, running sequences)] in order; a waiting sequence starts as soon as one ends."""
    waiting = deque(responses)
    ends: list[int] = []
    now = 0
    spans = []
    while waiting or ends:
        while waiting and len(ends) < slots:
            heapq.heappush(ends, now + waiting.popleft())
        until = ends[0]
        spans.append((until - now, len(ends)))
        while ends and ends[0] == until:
            heapq.heappop(ends)
        now = until
    return spans


def rollout_costs(plan: Plan, gpu: Gpu) -> Iterator[Spent]:
    """Costs of one engine, which generates an equal share of the samples: prefill once for each
    group, then decoding token by token."""
    if plan.rollout.engine not in ("hf", "vllm"):
        return
    vllm = plan.rollout.engine == "vllm"
    tp = plan.rollout.tp if vllm else 1
    engines = max(1, plan.num_engines)
    samples, prompts = _share(plan, engines, vllm)
    forward = model_flops(plan.sizes)
    peak = gpu.flops[plan.rollout_dtype]
    pairs = sum(n * (n + 1) / 2 for n in prompts)
    first = forward.of(sum(prompts), pairs, len(prompts)) / tp
    spent = Spent.at("prompts", first, "projections", peak, "each once")
    # attention and head have no 8-bit products
    linear = forward.of(sum(prompts), 0, 0) / tp
    yield spent._replace(seconds=spent.seconds - _saved(plan, gpu, linear))
    patches = len(prompts) * plan.estimate.images * plan.estimate.image_patches / tp
    for encoder in encoders(plan):
        yield Spent.at(encoder.name, patches * encoder.patch_flops, "projections", peak)
    # a pass reads the weights that its tokens use, and all caches and states
    mean = sum(s.prompt + s.response / 2 for s in samples) / len(samples)
    cached = mean * kv_bytes_per_token(plan, tp)
    states = state_bytes(plan, tp)
    counts = engine_parameters(plan)
    weights = language_weights(plan) / tp
    experts = expert_weights(plan) / tp
    slots = _slots(plan, weights, cached + states, tp)
    rate = reached("projections", peak)
    a_token = forward.of(1, mean, 1) / tp / rate
    a_token -= _saved(plan, gpu, forward.of(1, 0, 0) / tp)
    drafts = plan.draft_layers
    kept = sum(ACCEPTED**drafted for drafted in range(drafts + 1))
    head = drafts * plan.sizes.vocab_size * plan.sizes.hidden_size * plan.engine_bytes / tp
    memory = reached("memory", gpu.bandwidth)
    moved = seconds = launched = 0.0
    for tokens, running in running_over_time(tuple(s.response for s in samples), slots):
        passes = tokens / kept
        rows = running * (1 + drafts)
        unread = 0.0  # experts that no token chooses
        if counts.expert:
            unread = experts * (1 - plan.sizes.topk / plan.sizes.num_experts) ** rows
        read = weights - unread + head + running * (cached + 2 * states)
        moved += passes * read
        seconds += passes * max(read / memory, rows * a_token)
        launched += passes * (plan.sizes.num_hidden_layers + drafts)
    note = f"{len(samples)} samples on each of {engines} engines, at most {slots} at a time"
    if drafts:
        note += f"; {kept:g} tokens a pass, as {ACCEPTED:.0%} of drafted tokens are accepted"
    yield Spent.at("tokens", moved, "memory", gpu.bandwidth, note)._replace(seconds=seconds)
    fixed = GRAPH_SECONDS if vllm else EAGER_SECONDS
    why = f"{fixed * 1e6:g} us a layer and pass, however few sequences run"
    yield Spent("layers", launched, "layer", launched * fixed, why)
    if tp > 1:  # an all-reduce a block: a reduce-scatter and an all-gather
        rows = sum(s.response for s in samples) * (1 + drafts) / kept + sum(prompts)
        width = plan.sizes.hidden_size * plan.engine_bytes
        blocks = sum(kind.blocks for kind in plan.sizes.layer_kinds) + 2 * drafts
        sent = 2 * blocks * rows * width * (tp - 1) / tp
        peak = group_rate(gpu, plan.hardware.gpus_per_node, tp, 1)
        yield Spent.at("tensor parallel", sent, "ring", peak)
        calls = blocks * launched / (plan.sizes.num_hidden_layers + drafts)
        why = f"{ALL_REDUCE_SECONDS * 1e6:g} us each, however few bytes"
        yield Spent("all-reduces", calls, "call", calls * ALL_REDUCE_SECONDS, why)


def _saved(plan: Plan, gpu: Gpu, flops: float) -> float:
    """Seconds by which 8-bit products are faster than those in `rollout.dtype`."""
    if plan.rollout.quantization is None:
        return 0.0
    slow = flops / reached("projections", gpu.flops[plan.rollout_dtype])
    return slow - flops / reached("fp8", gpu.flops["fp8"])


def _share(plan: Plan, engines: int, vllm: bool) -> tuple[list[SampleLength], list[int]]:
    """(samples, lengths of their prompts) of one engine: samples are dealt out one by one to vLLM
    engines, by whole groups to embedded ones."""
    samples = step_samples(plan)
    group = plan.batching.samples_per_prompt
    whole = 1 if vllm else group
    ids = [i for i in range(plan.samples) if i // whole % engines == 0]
    groups = sorted({i // group for i in ids})
    return [samples[i] for i in ids], [samples[i * group].prompt for i in groups]


def _slots(plan: Plan, weights: float, sequence: float, tp: int) -> int:
    """Sequences that run at a time, bounded by the KV cache and the engine's limit.

    Args:
        weights: bytes on a GPU.
        sequence: bytes of the cache and states of one sequence, on average.
    """
    limit = memory_limit(plan)
    if plan.rollout.engine != "vllm" or limit is None:
        return plan.max_num_seqs
    towers = encoder_parameters(plan) * plan.engine_bytes / tp
    free = plan.rollout.gpu_memory_utilization * limit - weights - towers
    return max(1, min(int(free / sequence), plan.max_num_seqs))
