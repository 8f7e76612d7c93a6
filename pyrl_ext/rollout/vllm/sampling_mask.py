"""The sets of tokens that vLLM's top-p and top-k keep.

On a GPU vLLM returns them (`return_sampling_mask`), which needs its second model runner and a
top-k; its build for CPUs refuses that, and the sampler of its first model runner is watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrl_ext.samples import kept_counts

if TYPE_CHECKING:
    from vllm import CompletionOutput


class SamplerWatch:
    """Part of vLLM's workers: watches the sampler."""

    model_runner: Any
    _scheduled: Any
    _sets: dict[str, list[Tensor]]

    def watch_sets(self) -> None:
        """From now on keep, until `take_sets`, the tokens that could be drawn in place of each."""
        self._sets = {}
        sampler = self.model_runner.sampler.topk_topp_sampler
        self._draw = sampler.forward
        sampler.forward = self._draw_watched

    def take_sets(self, name: str) -> list[Tensor]:
        """The sets [n] int32 of the tokens of a finished request; none if it was greedy."""
        return self._sets.pop(name, [])

    def _draw_watched(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tokens, logprobs = self._draw(*args, **kwargs)
        runner = self.model_runner
        for row, name in enumerate(runner.input_batch.req_ids):
            request = runner.requests[name]
            done = request.num_computed_tokens + self._scheduled.num_scheduled_tokens[name]
            if done >= request.num_tokens:  # else vLLM discards the token of a partial prefill
                kept = (logprobs[row] > -torch.inf).nonzero()[:, 0].int().cpu()
                self._sets.setdefault(name.rpartition("-")[0], []).append(kept)
        return tokens, logprobs


def returned_sets(output: CompletionOutput) -> list[Tensor]:
    """The sets [n] int32 that vLLM returned with a finished request."""
    found = output.sampling_mask
    return [torch.tensor(ids, dtype=torch.int32) for ids in (found.token_ids if found else ())]


def sample_fields(sets: list[Tensor], prompt_len: int) -> dict[str, Any]:
    """The fields of a `Sample` whose response was drawn from ``sets``; without sets none."""
    if not sets:
        return {}
    return {"kept_counts": kept_counts(sets, prompt_len), "kept_ids": torch.cat(sets)}
