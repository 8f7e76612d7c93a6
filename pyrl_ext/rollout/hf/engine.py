"""The embedded rollout engine: a transformers model with continuous batching, in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyrl_ext.data.chat import Tokenizer
from pyrl_ext.ops.digest import digest_on_device, read
from pyrl_ext.parallel.offload import OffloadedStorage
from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.engine import Capabilities, Engine, TurnFeed, incomplete, require_weights
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.hf.images import PromptImages, Scale
from pyrl_ext.rollout.hf.kv_slots import Slots
from pyrl_ext.rollout.hf.model import build_model, read_config
from pyrl_ext.rollout.hf.routers import expert_ids, find_routers, num_experts
from pyrl_ext.rollout.hf.run import Run, stored
from pyrl_ext.rollout.hf.stop_strings import need_tokenizer
from pyrl_ext.rollout.static_feed import AllAtOnce
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn, route_dtype


class HFEngine(Engine):
    """Generates with a transformers model in this process, and reports routed experts.

    The samples of one prompt share its prefill. Log-probs are those of the distribution the token
    was drawn from, in float32. With the same weights a sample depends on (seed, prompt id, sample
    index) and the prompt alone, up to the rounding of matrix products of different sizes. With
    layers that carry a state, prompts of one length share a prefill, and turns begin anew.

    Args:
        config: Hugging Face config: a dict, a config.json or its directory
        dtype: of weights and activations, float32 or bfloat16
        device: "cpu", "cuda", "cuda:0"
        max_num_seqs: sequences that run at once
        max_prefill_tokens: padded prompt tokens of one prefill; a longer prompt runs alone
        experts, attention: transformers implementations by name; None = the faster ones here
        tokenizer: a transformers tokenizer, for sampling with stop strings
        scale: of the image processor; None: prompts have no images
        lora: adapters that it applies itself; their factors come with the weights
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
        scale: Scale | None = None,
        lora: Lora | None = None,
    ):
        if max_num_seqs < 1:
            raise ValueError(f"HFEngine.max_num_seqs: {max_num_seqs}, expected at least 1")
        self.device = torch.device(device)
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.tokenizer = tokenizer
        self.model = build_model(read_config(config), dtype, self.device, experts, attention)
        self.text: Any = self.model.config.get_text_config()
        kinds = getattr(self.text, "layer_types", None) or ()
        self.has_states = "linear_attention" in kinds
        self.images = PromptImages(self.model.config, scale)
        self.layer_ids, routers = find_routers(self.model)
        self.route_dtype = route_dtype(max((num_experts(r) for r in routers), default=1))
        self._chosen: list[Tensor | None] = [None] * len(routers)
        for slot, router in enumerate(routers):
            router.register_forward_hook(self._hook(slot))
        self._destinations = Destinations.of(self.model, lora)
        self._offloaded = OffloadedStorage()
        self._refusal = "no weights were loaded yet"
        self.version: int | None = None
        self.loads = 0  # times that the weights changed

    @property
    def capabilities(self) -> Capabilities:
        """Routes if the model has routers; processed log-probs; every kind of sampling."""
        images = self.images.scale is not None
        return Capabilities(
            routes=bool(self.layer_ids), images=images, sampling_mask=True, turns=True
        )

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
        self.loads = self.loads + 1
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
        require_weights("HFEngine.checksums", self.version, self._refusal)
        held = self._destinations
        if unknown := [name for name in names or () if name not in held.parts]:
            raise ValueError(f"HFEngine.checksums: {unknown[:4]}, expected names of its weights")
        wanted = held.parts if names is None else names
        return read({name: digest_on_device(held.tensor(name)) for name in wanted})

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
        require_weights("HFEngine.stream", self.version, self._refusal)
        need_tokenizer("HFEngine.stream", sampling, self.tokenizer)
        seen: set[int] = set()
        for prompt in prompts:
            if prompt.id in seen:
                where = f"HFEngine.stream(prompt {prompt.id})"
                raise ValueError(f"{where}: id given twice, expected distinct prompt ids")
            seen.add(prompt.id)
        yield from self._run(Run(self, AllAtOnce(prompts, sampling), sampling, "stream"))

    @torch.no_grad()
    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Samples every turn of ``feed``; each yields one sample, whose prompt is its context.

        A finished turn's row stays until another turn needs it. The next turn of its trajectory
        computes what is new in its context alone, if that begins with the row's tokens; otherwise,
        or when the row is gone, all of it.

        Args:
            feed: asked for turns between forwards
            sampling: ``samples_per_prompt`` and ``max_new_tokens`` are the feed's

        Raises:
            RuntimeError, ValueError: as `stream`; a turn of a trajectory that still has one
        """
        require_weights("HFEngine.answer", self.version, self._refusal)
        need_tokenizer("HFEngine.answer", sampling, self.tokenizer)
        yield from self._run(Run(self, feed, sampling, "answer"))

    def _run(self, run: Run) -> Generator[Sample, None, None]:
        while run.goes_on():
            yield from self.step(run)

    def step(self, run: Run) -> list[Sample]:
        """One forward of ``run``, if it has turns; the samples that are finished with it."""
        first = run.slots.running
        if run.should_admit():
            return run.advance(first, self._prefill(run))
        return run.advance(0, self._decode(run.slots)) if first else []

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor that `load_weights` wants, by its checkpoint name."""
        return {name: self._destinations.shape(name) for name in self._destinations.parts}

    def sleep(self) -> int:
        """Frees the memory of the weights until the next `load_weights`; returns bytes."""
        self.version = None
        self._refusal = "sleep freed its weights"
        self.loads = self.loads + 1
        held = [part for parts in self._destinations.parts.values() for part in parts]
        return self._offloaded.offload(held, keep=False)

    def close(self) -> None:
        """Does nothing: nothing runs outside of the calls."""

    def _prefill(self, run: Run) -> Tensor:
        """Runs the contexts of newly admitted turns; returns their first logits [M, V]."""
        if turns := run.continuing(self.max_prefill_tokens):
            return self._continue(run, turns)
        turns, prompts, source = run.beginning(self.max_prefill_tokens)
        slots = run.slots
        first = run.slots.running
        ids, sizes = _padded([prompt.tokens for prompt in prompts])
        width = ids.shape[1]
        device = self.device
        tokens = torch.from_numpy(ids).to(device)
        take = torch.from_numpy(source).to(device)
        ends, end_of = np.unique(sizes - 1, return_inverse=True)
        slots.cache.prefill(first, take)
        # prompts are padded on the right: a causal mask already hides the padding
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
        images = [run.images(prompt) for prompt in prompts]
        places, ahead = self.images.positions(images, width, sizes)
        pixels = self.images.inputs(images, device, self.model.dtype)
        keep = torch.from_numpy(ends).to(device)
        logits = self._forward(tokens, causal, places.to(device), slots, keep, **pixels)
        span = slice(first, first + len(turns))
        slots.tokens[span, :width] = tokens[take]
        slots.ahead[span] = ahead[source]
        if slots.routes is not None:
            routes = self._routes().view(len(prompts), width, *slots.routes.shape[2:])
            slots.routes[span, :width] = routes[take]
        run.begin(turns)
        return logits[take, torch.from_numpy(end_of.reshape(-1)[source]).to(device)]

    def _continue(self, run: Run, turns: list[Turn]) -> Tensor:
        """Runs what is new in the contexts of turns whose rows are parked; returns the first logits
        [M, V]. The token that was sampled last is new too: it was no input yet."""
        slots = run.slots
        first = run.slots.running
        slots.resume(turns)
        known = slots.length[first : first + len(turns)] - 1
        new = [turn.prompt.tokens[begin:] for turn, begin in zip(turns, known, strict=True)]
        ids, sizes = _padded(new)
        ends, end_of = np.unique(sizes - 1, return_inverse=True)
        # padding beyond a row goes to the row's last place, which no context reaches
        places = np.minimum(known[:, None] + np.arange(ids.shape[1]), slots.capacity - 1)
        run.begin(turns)
        tokens, where, keep, last = (
            torch.from_numpy(x).to(self.device) for x in (ids, places, ends, end_of.reshape(-1))
        )
        rows = torch.arange(first, slots.running, device=self.device)
        slots.tokens[rows[:, None], where] = tokens
        logits = self._extend(slots, first, tokens, where, keep)
        return logits[torch.arange(len(turns), device=self.device), last]

    def _decode(self, slots: Slots) -> Tensor:
        """Runs the newest token of every running row; returns the next logits [running, V]."""
        places = slots.positions()[:, None]
        rows = torch.arange(slots.running, device=self.device)[:, None]
        return self._extend(slots, 0, slots.tokens[rows, places], places, 1)[:, -1]

    def _extend(
        self, slots: Slots, first: int, tokens: Tensor, places: Tensor, keep: Tensor | int
    ) -> Tensor:
        """Runs tokens [M, N] at these places of the rows first..running-1, after what is there."""
        span = slice(first, slots.running)
        length = int(slots.length[span].max())
        slots.cache.extend(first, places, length)
        seen = torch.arange(length, device=self.device) <= places[..., None]
        ahead = torch.from_numpy(slots.ahead[span]).to(self.device)[:, None]
        positions = places + ahead
        positions = positions.expand(3, -1, -1) if self.images.three else positions
        logits = self._forward(tokens, seen[:, None], positions, slots, keep)
        if slots.routes is not None:
            rows = torch.arange(first, slots.running, device=self.device)[:, None]
            routes = self._routes().view(*places.shape, *slots.routes.shape[2:])
            slots.routes[rows, places] = routes
        return logits

    def _forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        positions: Tensor,
        slots: Slots,
        keep: Tensor | int,
        **images: Tensor,
    ) -> Tensor:
        if self.text._attn_implementation == "eager":
            bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device)
            mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=slots.cache,
            use_cache=True,
            logits_to_keep=keep,
            **images,
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
        return torch.stack(chosen, dim=1).to(stored(self.route_dtype))

    def route_shape(self) -> tuple[int, int] | None:
        if not self.layer_ids:
            return None
        return len(self.layer_ids), int(self.text.num_experts_per_tok)


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids, padded on the right with 0, and their lengths."""
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.zeros((len(rows), sizes.max()), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : sizes[number]] = row
    return ids, sizes
