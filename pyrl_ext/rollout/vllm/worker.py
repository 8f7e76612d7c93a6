"""Runs inside vLLM's workers: catches the experts that its routers choose, and loads weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.rollout.vllm import cpu
from pyrl_ext.rollout.vllm.loading import Loading

if cpu.installed():
    cpu.patch()


class WorkerExtension(Loading):
    """`worker_extension_cls` of vLLM: its methods are called by name through `collective_rpc`.

    It also lets a request with a seed be read in parts, which vLLM 0.32 cannot do on a CPU.

    vLLM's own way (`enable_return_routed_experts`) needs Triton, which on a CPU is interpreted, 100
    times slower. This uses the same callbacks in its routers.
    """

    model_runner: Any
    vllm_config: Any

    def watch_steps(self, routes: bool) -> None:
        """From here on requests keep their random numbers and, with `routes`, their routes until
        `take_routes`."""
        self._kept: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._aside: dict[str, torch.Generator] = {}
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
        """vLLM's routers call it, layer after layer, with the rows of the whole batch."""
        assert self._now is not None
        self._now[: len(topk_ids), layer_id] = topk_ids.to(self._now.device, torch.int32)

    def _execute_and_keep(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        runner, row = self.model_runner, 0
        for name, generator in self._aside.items():
            runner.input_batch.generators[runner.input_batch.req_id_to_index[name]] = generator
        self._aside = {}
        result = self._execute(scheduled, *args, **kwargs)
        for name in runner.input_batch.req_ids if scheduled.total_num_scheduled_tokens else ():
            count = scheduled.num_scheduled_tokens[name]
            start = runner.requests[name].num_computed_tokens
            if self._now is not None:
                part = self._now[row : row + count].to(torch.uint16).numpy()
                # inside, vLLM adds a random suffix to the name of a request
                self._kept.setdefault(name.rpartition("-")[0], []).append((start, part))
            row += count
            if start + count < runner.requests[name].num_tokens:
                self._set_aside(name)
        return result

    def _set_aside(self, name: str) -> None:
        """Of a part of a prompt a token is sampled and thrown away. vLLM then winds the request's
        random numbers back, which a CPU's generator cannot: it waits here until the next step."""
        batch = self.model_runner.input_batch
        if (generator := batch.generators.pop(batch.req_id_to_index[name], None)) is not None:
            self._aside[name] = generator

    def take_routes(self, names: list[str]) -> dict[str, list[tuple[int, np.ndarray]]]:
        """Request -> (position of its first token, routes [tokens, layers, K] uint16) of every
        part that was computed, in that order: a request that was pre-empted has some twice."""
        return {name: self._kept.pop(name) for name in names if name in self._kept}

    def forget_routes(self) -> None:
        """Nobody takes what is left: of requests that were aborted."""
        self._kept = {}
