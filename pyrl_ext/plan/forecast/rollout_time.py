"""Seconds that the rollout engine takes to generate a step's samples."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pyrl_ext.plan.forecast.attention import kv_bytes_per_token
from pyrl_ext.plan.forecast.compute_time import Spent
from pyrl_ext.plan.forecast.encoder import encoder_parameters, encoders
from pyrl_ext.plan.forecast.flops import model_flops
from pyrl_ext.plan.forecast.hardware import Gpu, group_rate, memory_limit
from pyrl_ext.plan.forecast.parts import reached
from pyrl_ext.plan.forecast.state_layers import state_bytes
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.forecast.workload import Sample, step_samples
from pyrl_ext.plan.model.counts import Parameters, parameters
from pyrl_ext.plan.plan import Plan

# Assumed: fixed time of a layer besides memory traffic and FLOPs, in a CUDA graph and with kernels
# launched one by one.
GRAPH_SECONDS = 60e-6
EAGER_SECONDS = 400e-6


@dataclass(frozen=True)
class Decoder:
    """One engine: `tp` GPUs that generate a share of the samples."""

    plan: Plan
    gpu: Gpu

    @property
    def tp(self) -> int:
        """GPUs of one engine."""
        return self.plan.rollout.tp if self.plan.rollout.engine == "vllm" else 1

    @property
    def engines(self) -> int:
        """Engines of the run; each generates an equal share of the samples."""
        return max(1, self.plan.num_engines)

    @cached_property
    def prompts(self) -> tuple[int, ...]:
        """Lengths of the prompts that one engine reads."""
        groups = {i // self.plan.batching.samples_per_prompt for i in self._ids}
        each = self.plan.batching.samples_per_prompt
        samples = step_samples(self.plan)
        return tuple(samples[group * each].prompt for group in sorted(groups))

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The samples that one engine generates."""
        samples = step_samples(self.plan)
        return tuple(samples[i] for i in self._ids)

    @cached_property
    def _ids(self) -> Sequence[int]:
        """Samples are dealt out one by one to vLLM engines, by whole groups to embedded ones."""
        whole = 1 if self.plan.rollout.engine == "vllm" else self.plan.batching.samples_per_prompt
        return [i for i in range(self.plan.samples) if i // whole % self.engines == 0]

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache for one token on one GPU."""
        return kv_bytes_per_token(self.plan, self.tp)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence on one GPU, read and written for each token."""
        return state_bytes(self.plan, self.tp)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights on one GPU."""
        return self._parameters.total * DTYPE_BYTES[self.plan.rollout_dtype] / self.tp

    @cached_property
    def tokens(self) -> float:
        """Mean length of a sequence while it is generated."""
        return sum(s.prompt + s.response / 2 for s in self.samples) / len(self.samples)

    @cached_property
    def running(self) -> int:
        """Sequences that run at a time, bounded by the KV cache and the engine's limit."""
        rollout = self.plan.rollout
        limit = memory_limit(self.plan)
        if rollout.engine != "vllm" or limit is None:
            return self.plan.max_num_seqs
        towers = encoder_parameters(self.plan) * DTYPE_BYTES[self.plan.rollout_dtype] / self.tp
        free = rollout.gpu_memory_utilization * limit - self.weight_bytes - towers
        cached = int(free / (self.cache_bytes * self.tokens + self.state_bytes))
        return max(1, min(cached, self.plan.max_num_seqs))

    def used(self, sequences: int) -> float:
        """Share of the weights read when each of `sequences` decodes a token: experts that no token
        chooses are not read."""
        sizes = self.plan.sizes
        counts = self._parameters
        if not counts.expert:
            return 1.0
        missed = counts.expert * (1 - sizes.topk / sizes.num_experts) ** sequences
        return 1 - missed / counts.total

    @cached_property
    def _parameters(self) -> Parameters:
        return parameters(self.plan.sizes)

    @property
    def layer_seconds(self) -> float:
        """Fixed time of a layer for each token, in addition to memory traffic and FLOPs."""
        return GRAPH_SECONDS if self.plan.rollout.engine == "vllm" else EAGER_SECONDS

    def decode(self, sequences: int) -> tuple[float, float]:
        """(bytes read, seconds) of a token of each of `sequences`, without the layers' fixed time
        and the exchange between an engine's GPUs."""
        each = model_flops(self.plan.sizes).of(1, self.tokens, 1) / self.tp
        memory, _ = reached("memory", self.gpu.bandwidth, "byte")
        rate, _ = reached("projections", self.gpu.flops[self.plan.rollout_dtype])
        held = self.weight_bytes * self.used(sequences)
        held += sequences * (self.tokens * self.cache_bytes + 2 * self.state_bytes)
        return held, max(held / memory, sequences * each / rate)

    def token_seconds(self, sequences: int) -> float:
        """Seconds of a token of each of `sequences`."""
        layers = self.plan.sizes.num_hidden_layers * self.layer_seconds
        return self.decode(sequences)[1] + layers + self._exchange(sequences)

    def read_seconds(self, tokens: int) -> float:
        """Seconds in which the engine reads so many tokens."""
        rate, _ = reached("projections", self.gpu.flops[self.plan.rollout_dtype])
        flops = model_flops(self.plan.sizes).of(tokens, tokens * (tokens + 1) / 2, 1)
        return flops / self.tp / rate + self._exchange(tokens)

    def _exchange(self, rows: int) -> float:
        link, _ = reached("ring", self.link, "byte")
        return self.sent(rows) / link

    def sent(self, rows: int) -> float:
        """Bytes that a GPU of an engine sends to the others for so many rows: an all-reduce a
        block, each a reduce-scatter and an all-gather."""
        width = self.plan.sizes.hidden_size * DTYPE_BYTES[self.plan.rollout_dtype]
        blocks = sum(kind.blocks for kind in self.plan.sizes.layer_kinds)
        return 2 * blocks * rows * width * (self.tp - 1) / self.tp

    @property
    def link(self) -> float:
        """Peak rate between the GPUs of an engine [byte/s]."""
        return group_rate(self.gpu, self.plan.hardware.gpus_per_node, self.tp, 1)


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


def rollout_costs(plan: Plan, gpu: Gpu) -> list[Spent]:
    """Prefill once for each group, then decoding token by token."""
    if plan.rollout.engine not in ("hf", "vllm"):
        return []
    engine = Decoder(plan, gpu)
    each = model_flops(plan.sizes)
    samples = engine.samples
    slots = engine.running
    prompts = engine.prompts
    rate, why = reached("projections", gpu.flops[plan.rollout_dtype])
    first = each.of(sum(prompts), sum(n * (n + 1) / 2 for n in prompts), len(prompts)) / engine.tp
    _, how = reached("memory", gpu.bandwidth, "byte")
    moved = seconds = launched = 0.0
    for steps, sequences in running_over_time(tuple(s.response for s in samples), slots):
        held, took = engine.decode(sequences)
        moved += steps * held
        seconds += steps * took
        launched += steps * plan.sizes.num_hidden_layers
    shared = (
        f"{len(samples)} samples on each of {engine.engines} engines, at most {slots} at a time"
    )
    shown = len(prompts) * plan.estimate.images * plan.estimate.image_patches / engine.tp
    costs = [
        Spent.at("prompts", first, "FLOP", rate, f"each once; {why}"),
        *(
            Spent.at(e.name, shown * e.patch_flops, "FLOP", rate, f"images of prompts; {why}")
            for e in encoders(plan)
        ),
        Spent("tokens", moved, "byte", seconds, f"{shared}; weights and cache, {how}"),
        Spent(
            "layers",
            launched,
            "layer",
            launched * engine.layer_seconds,
            f"{engine.layer_seconds * 1e6:g} us a layer and token, however few sequences run",
        ),
    ]
    if engine.tp > 1:
        rows = sum(s.response for s in samples) + sum(prompts)
        link, how = reached("ring", engine.link, "byte")
        costs.append(Spent.at("tensor parallel", engine.sent(rows), "byte", link, how))
    return costs
