"""One stream of the embedded engine: the samples that wait, run and finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.rollout.hf.kv_slots import Slots
from pyrl_ext.rollout.hf.sampling import draw, stream_keys
from pyrl_ext.rollout.hf.stop_strings import StopStrings
from pyrl_ext.samples import Image, Prompt, Sample, Sampling

if TYPE_CHECKING:
    from pyrl_ext.rollout.hf.engine import HFEngine


class Run:
    """One call of `stream`: which samples wait and which run."""

    def __init__(self, engine: HFEngine, prompts: Sequence[Prompt], sampling: Sampling):
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.group = sampling.samples_per_prompt
        assert engine.version is not None
        self.version = engine.version
        self.next, self.total = 0, len(prompts) * self.group
        self._images: dict[int, tuple[Image, ...]] = {}
        ids = torch.tensor([p.id for p in prompts], dtype=torch.int64)
        self.keys = stream_keys(
            sampling.seed,
            ids.repeat_interleave(self.group),
            torch.arange(self.group).repeat(len(prompts)),
        )
        self.stop = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=engine.device)
        self.stops = StopStrings(engine.tokenizer, sampling.stop) if sampling.stop else None
        sizes = [len(p.tokens) for p in prompts]
        self.limit = np.repeat(np.array(sizes, dtype=np.int64), self.group)
        self.limit += sampling.max_new_tokens
        self.slots = Slots(
            min(engine.max_num_seqs, self.total),
            max(sizes, default=0) + sampling.max_new_tokens,
            engine.route_shape(),
            stored(engine.route_dtype),
            engine.device,
        )

    def images(self, prompt: Prompt) -> tuple[Image, ...]:
        """The images of a prompt, decoded once; its samples share them."""
        if prompt.id not in self._images:
            self._images[prompt.id] = tuple(each.load() for each in prompt.images)
        return self._images[prompt.id]

    @property
    def waiting(self) -> int:
        return self.total - self.next

    def should_admit(self) -> bool:
        """A prefill costs a whole forward, so it waits until a quarter of the slots is free."""
        free = self.slots.free
        enough = free >= self.waiting or 4 * free >= self.slots.length.size
        return self.waiting > 0 and free > 0 and enough

    def admit(self, max_tokens: int) -> tuple[np.ndarray, list[Prompt], np.ndarray]:
        """Moves waiting samples into free rows.

        Returns:
            jobs [M], their distinct prompts, and the index of each job's prompt among them [M]
        """
        first, width = self.next, 0
        prompts: list[Prompt] = []
        while self.waiting and self.next - first < self.slots.free:
            prompt = self.prompts[self.next // self.group]
            if not prompts or prompts[-1] is not prompt:
                width = max(width, len(prompt.tokens))
                if prompts and (len(prompts) + 1) * width > max_tokens:
                    break
                prompts.append(prompt)
            self.next += 1
        jobs = np.arange(first, self.next)
        return jobs, prompts, jobs // self.group - first // self.group

    def advance(self, first: int, logits: Tensor) -> list[Sample]:
        """Draws a token for the rows first..running-1; removes finished rows and returns them."""
        slots = self.slots
        span = slice(first, slots.running)
        places = torch.from_numpy(slots.length[span]).to(logits.device)
        tokens, logprobs = draw(logits, slots.keys[span], places, self.sampling)
        slots.append(first, tokens, logprobs)
        stopped = torch.isin(tokens, self.stop).cpu().numpy()
        if self.stops is not None:
            stopped |= self.stops.complete(self._tails(span, self.stops.window))
        done = np.zeros(slots.running, dtype=bool)
        done[span] = stopped | (slots.length[span] >= self.limit[slots.job[span]])
        if not done.any():
            return []
        finished = self._harvest(np.flatnonzero(done), stopped[done[span]])
        slots.retire(done)
        return finished

    def _tails(self, span: slice, window: int) -> list[list[int]]:
        """Up to `window` last tokens of the responses in these rows."""
        ends, jobs = self.slots.length[span], self.slots.job[span]
        begins = np.maximum(ends - window, self.limit[jobs] - self.sampling.max_new_tokens)
        low = begins.min()
        block = self.slots.tokens[span, low : ends.max()].cpu().numpy()
        return [
            row[begin - low : end - low].tolist()
            for row, begin, end in zip(block, begins, ends, strict=True)
        ]

    def _harvest(self, rows: np.ndarray, stopped: np.ndarray) -> list[Sample]:
        """Copies finished rows to samples."""
        slots, engine = self.slots, self.engine
        take = torch.from_numpy(rows).to(engine.device)
        width = int(slots.length[rows].max())
        tokens = slots.tokens[take, :width].cpu()
        logprobs = slots.logprobs[take, :width].cpu()
        routes = None if slots.routes is None else slots.routes[take, :width].cpu()
        if not bool(torch.isfinite(logprobs).all()):
            row = int((~torch.isfinite(logprobs)).any(1).nonzero()[0])
            prompt = self.prompts[int(slots.job[rows[row]]) // self.group]
            raise RuntimeError(
                f"HFEngine.stream(prompt {prompt.id}): non-finite logits, expected numbers; "
                f"weights of version {self.version} produced them"
            )
        sizes, jobs = slots.length[rows].tolist(), slots.job[rows].tolist()
        finished = []
        for row, (job, size) in enumerate(zip(jobs, sizes, strict=True)):
            prompt = self.prompts[job // self.group]
            count = len(prompt.tokens)
            places = torch.arange(size)
            known = places < (size - 1 if routes is not None else 0)
            experts = None
            if routes is not None:
                experts = routes[row, :size].clone()
                experts[-1] = 0
                experts = experts.view(engine.route_dtype)
            sample = Sample(
                prompt_id=prompt.id,
                index=job % self.group,
                tokens=tokens[row, :size].clone(),
                prompt_len=count,
                loss_mask=places >= count,
                rollout_logprobs=logprobs[row, :size].clone(),
                routes=experts,
                layer_ids=engine.layer_ids,
                route_mask=known,
                weight_version=self.version,
                finish_reason="stop" if stopped[row] else "length",
                images=self.images(prompt),
            )
            finished.append(sample)
        return finished


def stored(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that torch can index; it cannot write into uint16 by index."""
    return torch.int16 if dtype == torch.uint16 else dtype
