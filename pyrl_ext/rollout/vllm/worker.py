"""Runs inside vLLM's workers: records the experts that its routers choose, and loads weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyrl_ext.rollout.vllm import cpu
from pyrl_ext.rollout.vllm.loading import Loading
from pyrl_ext.rollout.vllm.sampling_mask import SamplerWatch
from pyrl_ext.samples import route_dtype

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

if cpu.installed():
    cpu.patch()


class WorkerExtension(Loading, SamplerWatch):
    """`worker_extension_cls` of vLLM: its methods are called by name through `collective_rpc`.

    It also makes chunked prefill work for requests with a seed, which vLLM 0.32 cannot do on a CPU.

    vLLM's own `enable_return_routed_experts` needs Triton, which a CPU interprets 100 times slower.
    This class uses the same callbacks in the routers.
    """

    def watch_steps(self, layer_ids: Sequence[int], num_experts: int) -> None:
        """From now on keep the random generators of requests and, until `take_routes`, their routes
        of ``layer_ids`` (0-based; empty: none)."""
        self._slots = {layer: slot for slot, layer in enumerate(layer_ids)}
        self._kept: dict[str, list[tuple[int, Tensor]]] = {}
        self._generators: dict[str, torch.Generator] = {}
        self._execute = self.model_runner.execute_model
        self.model_runner.execute_model = self._execute_with_generators
        if not layer_ids:
            return
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturer

        topk = self.vllm_config.model_config.get_num_experts_per_tok()
        rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        self._now = torch.zeros(rows, len(layer_ids), topk, dtype=route_dtype(num_experts))
        capturer.bind_routed_experts_capturer(self.model_runner.model, self)  # type: ignore[arg-type]

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Called by vLLM's routers, layer by layer, with the rows of the whole batch."""
        slot = self._slots[layer_id]
        self._now[: len(topk_ids), slot] = topk_ids.to("cpu", self._now.dtype)
        if slot < len(self._slots) - 1:
            return
        row = 0
        requests = self.model_runner.requests
        for name in self.model_runner.input_batch.req_ids:
            count = self._scheduled.num_scheduled_tokens[name]
            part = self._now[row : row + count].clone()
            # internally, vLLM appends a random suffix to a request's name
            kept = self._kept.setdefault(name.rpartition("-")[0], [])
            kept.append((requests[name].num_computed_tokens, part))
            row += count

    def take_routes(self, name: str, tokens: int) -> tuple[Tensor | None, Tensor]:
        """Routes [tokens, layers, K] of a finished request, and the mask [tokens] of those computed
        here: neither the last token, which is no input, nor any from a prefix cache."""
        routes = None
        routed = torch.zeros(tokens, dtype=torch.bool)
        for start, part in self._kept.pop(name, ()):  # a preempted request has some rows twice
            if routes is None:
                routes = part.new_zeros(tokens, *part.shape[1:])
            end = min(start + len(part), tokens - 1)
            routes[start:end], routed[start:end] = part[: end - start], True
        return routes, routed

    def forget_routes(self) -> None:
        """Drop the routes and kept sets of aborted requests, which nobody takes."""
        self._kept = {}
        self._sets = {}

    def _execute_with_generators(
        self, scheduled: SchedulerOutput, *args: object, **kwargs: object
    ) -> object:
        """For a partial prefill vLLM samples a token, discards it and rewinds the generator, which
        CPU generators cannot do: keep the generator here until the next step."""
        self._scheduled = scheduled
        runner = self.model_runner
        batch = runner.input_batch
        for name, generator in self._generators.items():
            batch.generators[batch.req_id_to_index[name]] = generator
        self._generators = {}
        result = self._execute(scheduled, *args, **kwargs)
        for name in batch.req_ids if scheduled.total_num_scheduled_tokens else ():
            request = runner.requests[name]
            done = request.num_computed_tokens + scheduled.num_scheduled_tokens[name]
            generator = batch.generators.get(batch.req_id_to_index[name])
            if done < request.num_tokens and generator is not None:
                self._generators[name] = batch.generators.pop(batch.req_id_to_index[name])
        return result
