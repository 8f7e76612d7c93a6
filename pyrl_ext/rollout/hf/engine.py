"""The embedded rollout engine: a transformers model with continuous batching, in this process."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.ops.digest import DigestLog
from pyrl_ext.parallel.offload import OffloadedStorage
from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.engine import (
    Capabilities,
    Engine,
    TurnFeed,
    incomplete,
    replaced,
    require_weights,
)
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.hf.images import Scale
from pyrl_ext.rollout.hf.model import RoutedModel
from pyrl_ext.rollout.hf.run import EngineRun
from pyrl_ext.rollout.hf.sampling import need_tokenizer
from pyrl_ext.samples import Sample, Sampling


class HFEngine(Engine):
    """Generates with a transformers model in this process, and reports routed experts.

    The samples of one prompt share its prefill. Log-probs are those of the distribution the token
    was drawn from, in float32. With the same weights a sample depends on (seed, prompt id, sample
    index) and the prompt alone, up to the rounding of matrix products of different sizes. With
    layers that carry a state, prompts of one length share a prefill. A turn computes its whole
    context.

    Args:
        config: Hugging Face config: a dict, a config.json or its directory
        dtype: of weights and activations, float32 or bfloat16
        device: "cpu", "cuda", "cuda:0"
        max_num_seqs: sequences that run at once
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
        tokenizer: Tokenizer | None = None,
        scale: Scale | None = None,
        lora: Lora | None = None,
    ):
        if max_num_seqs < 1:
            raise ValueError(f"HFEngine.max_num_seqs: {max_num_seqs}, expected at least 1")
        self.device = torch.device(device)
        self.max_num_seqs = max_num_seqs
        self.tokenizer = tokenizer
        self.routed = RoutedModel(config, dtype, self.device, scale)
        self.model = self.routed.model
        self._destinations = Destinations.of(self.model, lora)
        self._offloaded = OffloadedStorage()
        self._refusal = "no weights were loaded yet"
        self.version: int | None = None
        self.loads = 0  # times that the weights changed

    @property
    def capabilities(self) -> Capabilities:
        """Routes if the model has routers, and kept sets."""
        images = self.routed.images.scale is not None
        return Capabilities(
            routes=bool(self.routed.layer_ids), images=images, sampling_mask=True, turns=True
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
        weights = self._destinations
        if unknown := [name for name in names or () if name not in weights.parts]:
            raise ValueError(f"HFEngine.checksums: {unknown[:4]}, expected names of its weights")
        names = [*weights.parts] if names is None else names
        log = DigestLog()
        for name in names:
            log.add(name, weights.tensor(name))
        return log.numbers()

    @torch.no_grad()  # not inference_mode: its tensors could not take part in a loss
    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Samples every turn of ``feed``; each yields one sample, whose prompt is its context.

        Args:
            feed: asked for turns between forwards
            sampling: ``samples_per_prompt`` and ``max_new_tokens`` are the feed's

        Yields:
            samples as they finish; on the CPU, not scored

        Raises:
            RuntimeError: no complete weights are loaded, or the model produced non-finite logits
            ValueError: a context is empty, out of the vocabulary or too long; stop strings without
                a tokenizer

        Syncs: once a token.
        """
        where = "HFEngine.answer"
        version = require_weights(where, self.version, self._refusal)
        need_tokenizer(where, sampling, self.tokenizer)
        rows = self.max_num_seqs
        run = EngineRun(self.routed, version, feed, sampling, rows, self.tokenizer)
        loads = self.loads
        while run.has_work():
            if self.loads != loads:
                raise replaced(where, version)
            yield from run.forward()

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor that `load_weights` wants, by its checkpoint name."""
        return {name: self._destinations.shape(name) for name in self._destinations.parts}

    def sleep(self) -> int:
        """Frees the memory of the weights until the next `load_weights`; returns bytes."""
        self.version = None
        self._refusal = "sleep freed its weights"
        self.loads = self.loads + 1
        views = [view for parts in self._destinations.parts.values() for view in parts]
        return self._offloaded.offload(views, keep=False)

    def close(self) -> None:
        """Does nothing: nothing runs outside of the calls."""
