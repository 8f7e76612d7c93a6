"""The embedded rollout engine: a transformers model with continuous batching, in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyrl_ext.data.chat import Tokenizer
from pyrl_ext.dist.offload import OffloadedStorage
from pyrl_ext.ops.digest import digest_on_device, read
from pyrl_ext.rollout.engine import Capabilities, Engine, incomplete, need_weights
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.hf.kv_slots import Slots
from pyrl_ext.rollout.hf.model import build_model, read_config
from pyrl_ext.rollout.hf.routers import expert_ids, find_routers, num_experts
from pyrl_ext.rollout.hf.sampling import draw, stream_keys
from pyrl_ext.rollout.hf.stop_strings import StopStrings, need_tokenizer
from pyrl_ext.samples import Prompt, Sample, Sampling, route_dtype


class HFEngine(Engine):
    """Generates with `AutoModelForCausalLM` in this process, and reports routed experts.

    The samples of one prompt share its prefill. Log-probs are those of the distribution the token
    was drawn from, in float32. With the same weights a sample depends on (seed, prompt id, sample
    index) and the prompt alone, up to the rounding of matrix products of different sizes.

    Args:
        config: Hugging Face config: a dict, a config.json or its directory
        dtype: of weights and activations, float32 or bfloat16
        device: "cpu", "cuda", "cuda:0"
        max_num_seqs: sequences that run at once
        max_prefill_tokens: padded prompt tokens of one prefill; a longer prompt runs alone
        experts, attention: transformers implementations by name; None = the faster ones here
        tokenizer: a transformers tokenizer, for sampling with stop strings
    """

    def __init__(
        self,
        config: dict[str, Any] | str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_num_seqs: int = 128,
        max_prefill_tokens: int = 16384,
        experts: str | None = None,
        attention: str | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        if max_num_seqs < 1:
            raise ValueError(f"HFEngine.max_num_seqs: {max_num_seqs}, expected at least 1")
        self.device = torch.device(device)
        self.max_num_seqs, self.max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self.tokenizer = tokenizer
        self.model = build_model(read_config(config), dtype, self.device, experts, attention)
        self.layer_ids, routers = find_routers(self.model)
        self.route_dtype = route_dtype(max((num_experts(r) for r in routers), default=1))
        self._chosen: list[Tensor | None] = [None] * len(routers)
        for slot, router in enumerate(routers):
            router.register_forward_hook(self._hook(slot))
        self._destinations = Destinations(self.model)
        self._offloaded = OffloadedStorage()
        self._refusal = "no weights were loaded yet"
        self.version: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Routes if the model has routers; processed log-probs; every kind of sampling."""
        return Capabilities(routes=bool(self.layer_ids))

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Copies new weights in. The engine does not generate until that has succeeded.

        Args:
            named: (name, tensor of any device and float dtype) under the names of the model's
                safetensors, experts one by one; every parameter and persistent buffer exactly once
            version: kept on each sample
            only: names of the tensors that are sent, the others stay unchanged; None: all

        Raises:
            ValueError: listing unknown, missing and twice given names, wrong shapes and tensors
                with non-finite values
            RuntimeError: ``only`` is given, but the engine has no complete weights

        Syncs: once.
        """
        if only is not None and self.version is None:
            raise incomplete("HFEngine", only, self._refusal)
        self.version = None
        self._refusal = f"loading version {version} failed and left the weights incomplete"
        self._offloaded.onload()
        self._destinations.fill(named, only)
        self.version = version

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Digests of the parameters it generates with, as they are now.

        Args:
            names: checkpoint names; None = all

        Raises:
            RuntimeError: no complete weights are loaded
            ValueError: a name that the model does not have

        Syncs: once.
        """
        need_weights("HFEngine.checksums", self.version, self._refusal)
        views = self._destinations.views
        if unknown := [name for name in names or () if name not in views]:
            raise ValueError(f"HFEngine.checksums: {unknown[:4]}, expected names of its weights")
        wanted = views if names is None else names
        return read({name: digest_on_device(views[name]) for name in wanted})

    @torch.no_grad()  # not inference_mode: its tensors could not take part in a loss
    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        """Draws `samples_per_prompt` responses to every prompt.

        Args:
            prompts: with distinct ids, token ids inside the vocabulary
            sampling: see `Sampling`

        Yields:
            samples as they finish; on the CPU, not scored

        Raises:
            RuntimeError: no complete weights are loaded, or the model produced non-finite logits
            ValueError: a prompt is empty, out of the vocabulary, too long, or its id is repeated;
                stop strings without a tokenizer

        Syncs: once a token.
        """
        need_weights("HFEngine.stream", self.version, self._refusal)
        self._check(prompts, sampling)
        run = _Run(self, prompts, sampling)
        while run.waiting or run.slots.running:
            if self.version != run.version:
                raise RuntimeError(
                    f"HFEngine.stream: version {run.version} of the weights was replaced while a "
                    "stream of it was open, expected the stream closed before"
                )
            first = run.slots.running
            if run.should_admit():
                yield from run.advance(first, self._prefill(run))
            else:
                yield from run.advance(0, self._decode(run.slots))

    def sleep(self) -> int:
        """Frees the memory of the weights until the next `load_weights`; returns bytes."""
        self.version, self._refusal = None, "sleep freed its weights"
        return self._offloaded.offload(self._destinations.views.values(), keep=False)

    def close(self) -> None:
        """Does nothing: nothing runs outside of the calls."""

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        need_tokenizer("HFEngine", sampling, self.tokenizer)
        vocab = self.model.config.vocab_size
        limit = self.model.config.max_position_embeddings
        seen: set[int] = set()
        for prompt in prompts:
            where = f"HFEngine.stream(prompt {prompt.id})"
            if prompt.id in seen:
                raise ValueError(f"{where}: id given twice, expected distinct prompt ids")
            seen.add(prompt.id)
            if not prompt.tokens:
                raise ValueError(f"{where}: 0 tokens, expected at least one")
            if len(prompt.tokens) + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"{where}: {len(prompt.tokens)} tokens + max_new_tokens "
                    f"{sampling.max_new_tokens}, expected at most {limit} positions in all"
                )
            bad = [t for t in prompt.tokens if not 0 <= t < vocab]
            if bad:
                raise ValueError(f"{where}: token id {bad[0]}, expected 0 to {vocab - 1}")

    def _prefill(self, run: _Run) -> Tensor:
        """Runs the prompts of newly admitted samples; returns their first logits [M, V]."""
        slots, first = run.slots, run.slots.running
        jobs, prompts, source = run.admit(self.max_prefill_tokens)
        sizes = np.array([len(p.tokens) for p in prompts], dtype=np.int64)
        ids = np.zeros((len(prompts), sizes.max()), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : sizes[row]] = prompt.tokens
        width = ids.shape[1]
        device = self.device
        tokens, take = torch.from_numpy(ids).to(device), torch.from_numpy(source).to(device)
        ends, end_of = np.unique(sizes - 1, return_inverse=True)
        slots.cache.prefill(first, take)
        # prompts are padded on the right: a causal mask already hides the padding
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
        places = torch.arange(width, device=device)[None].expand(len(prompts), -1)
        logits = self._forward(tokens, causal, places, slots, torch.from_numpy(ends).to(device))
        span = slice(first, first + len(jobs))
        slots.tokens[span, :width] = tokens[take]
        slots.logprobs[span] = 0
        slots.keys[span] = run.keys[jobs].to(device)
        slots.length[span], slots.job[span] = sizes[source], jobs
        if slots.routes is not None:
            routes = self._routes().view(len(prompts), width, *slots.routes.shape[2:])
            slots.routes[span, :width] = routes[take]
        slots.running += len(jobs)
        return logits[take, torch.from_numpy(end_of.reshape(-1)[source]).to(device)]

    def _decode(self, slots: Slots) -> Tensor:
        """Runs the newest token of every running row; returns the next logits [running, V]."""
        positions = slots.positions()
        length = int(slots.length[: slots.running].max())
        slots.cache.decode(positions, length)
        rows = torch.arange(slots.running, device=self.device)
        seen = torch.arange(length, device=self.device) <= positions[:, None]
        tokens = slots.tokens[rows, positions][:, None]
        logits = self._forward(tokens, seen[:, None, None], positions[:, None], slots, 1)
        if slots.routes is not None:
            slots.routes[rows, positions] = self._routes()
        return logits[:, -1]

    def _forward(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, slots: Slots, keep: Tensor | int
    ) -> Tensor:
        if self.model.config._attn_implementation == "eager":
            bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device)
            mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=slots.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return out.logits

    def _hook(self, slot: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: object, output: object) -> None:
            self._chosen[slot] = expert_ids(output)

        return keep

    def _routes(self) -> Tensor:
        """[tokens, L, K] experts of the forward that just ran."""
        chosen = [c for c in self._chosen if c is not None]
        if len(chosen) != len(self._chosen):
            missing = [i for i, c in zip(self.layer_ids, self._chosen, strict=True) if c is None]
            raise RuntimeError(f"HFEngine: routers of layers {missing} did not run, expected all")
        self._chosen = [None] * len(chosen)
        return torch.stack(chosen, dim=1).to(_stored(self.route_dtype))

    def _route_shape(self) -> tuple[int, int] | None:
        if not self.layer_ids:
            return None
        return len(self.layer_ids), int(self.model.config.num_experts_per_tok)


class _Run:
    """One call of `stream`: which samples wait and which run."""

    def __init__(self, engine: HFEngine, prompts: Sequence[Prompt], sampling: Sampling):
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.group = sampling.samples_per_prompt
        assert engine.version is not None
        self.version = engine.version
        self.next, self.total = 0, len(prompts) * self.group
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
            engine._route_shape(),
            _stored(engine.route_dtype),
            engine.device,
        )

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
            )
            finished.append(sample)
        return finished


def _stored(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that torch can index; it cannot write into uint16 by index."""
    return torch.int16 if dtype == torch.uint16 else dtype
