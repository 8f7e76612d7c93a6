"""Runs inside vLLM's workers: records the experts that its routers choose, and loads weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.rollout.vllm import cpu
from pyrl_ext.rollout.vllm.loading import Loading

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

if cpu.installed():
    cpu.patch()


class WorkerExtension(Loading):
    """`worker_extension_cls` of vLLM: its methods are called by name through `collective_rpc`.

    It also makes chunked prefill work for requests with a seed, which vLLM 0.32 cannot do on a CPU.

    vLLM's own `enable_return_routed_experts` needs Triton, which a CPU interprets 100 times slower.
    This class uses the same callbacks in the routers.
    """

    def watch_steps(self, routes: bool) -> None:
        """From now on keep the random generators of requests and, with `routes`, their routes until
        `take_routes`."""
        self._kept: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._generators: dict[str, torch.Generator] = {}
        self._execute = self.model_runner.execute_model
        self.model_runner.execute_model = self._execute_and_keep
        self._now: Tensor | None = None
        if not routes:
            return
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturer

        model = self.vllm_config.model_config
        layers, topk = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        self._now = torch.zeros(rows, layers, topk, dtype=torch.int32)
        capturer.bind_routed_experts_capturer(self.model_runner.model, self)  # type: ignore[arg-type]

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Called by vLLM's routers, layer by layer, with the rows of the whole batch."""
        assert self._now is not None
        self._now[: len(topk_ids), layer_id] = topk_ids.to(self._now.device, torch.int32)

    def _execute_and_keep(
        self, scheduled: SchedulerOutput, *args: object, **kwargs: object
    ) -> object:
        runner, row = self.model_runner, 0
        for name, generator in self._generators.items():
            runner.input_batch.generators[runner.input_batch.req_id_to_index[name]] = generator
        self._generators = {}
        result = self._execute(scheduled, *args, **kwargs)
        for name in runner.input_batch.req_ids if scheduled.total_num_scheduled_tokens else ():
            count = scheduled.num_scheduled_tokens[name]
            start = runner.requests[name].num_computed_tokens
            if self._now is not None:
                part = self._now[row : row + count].to(torch.uint16).numpy()
                # internally, vLLM appends a random suffix to a request's name
                self._kept.setdefault(name.rpartition("-")[0], []).append((start, part))
            row += count
            if start + count < runner.requests[name].num_tokens:
                self._keep_generator(name)
        return result

    def _keep_generator(self, name: str) -> None:
        """For a partial prefill vLLM samples a token, discards it and rewinds the generator, which
        CPU generators cannot do: keep the generator here until the next step."""
        batch = self.model_runner.input_batch
        if (generator := batch.generators.pop(batch.req_id_to_index[name], None)) is not None:
            self._generators[name] = generator

    def take_routes(self, names: list[str]) -> dict[str, list[tuple[int, np.ndarray]]]:
        """Request -> (position of its first token, routes [tokens, layers, K] uint16) of every
        part that was computed, in that order; a preempted request has some parts twice."""
        return {name: self._kept.pop(name) for name in names if name in self._kept}

    def forget_routes(self) -> None:
        """Drop the routes of aborted requests, which nobody takes."""
        self._kept = {}
