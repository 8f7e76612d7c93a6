"""The rollout engine on vLLM, in this process."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.engine import (
    AllAtOnce,
    Capabilities,
    Engine,
    TurnFeed,
    agreed_digests,
    incomplete,
    replaced,
    require_weights,
)
from pyrl_ext.rollout.hf.images import Scale
from pyrl_ext.rollout.hf.sampling import need_tokenizer
from pyrl_ext.rollout.vllm import cpu
from pyrl_ext.rollout.vllm.adapters import lora_arguments, request_of
from pyrl_ext.rollout.vllm.drafts import drafting
from pyrl_ext.rollout.vllm.quantization import quantizing
from pyrl_ext.rollout.vllm.requests import Requests, image_arguments
from pyrl_ext.rollout.vllm.sampling_mask import returned_sets, sample_fields
from pyrl_ext.rollout.vllm.start import reports_routes, start, unwritten, world_of
from pyrl_ext.samples import Image, Prompt, Sample, Sampling, Turn, route_dtype

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm.lora.request import LoRARequest


class VLLMEngine(Engine):
    """Generates with vLLM, and reports log-probs of the sampled distribution and routed experts.

    Every sample is a separate request with its own seed. It does not depend on the samples that run
    at the same time, up to the rounding of matrix products of different sizes.

    Args:
        config: folder with the model's config.json; its weights are not read
        tokenizer: folder, for sampling with stop strings, and for models with images
        num_experts: experts per layer; 0: the model has no routers
        layer_ids: 0-based global ids of the layers that have a router
        dtype: of weights and activations, "float32" or "bfloat16"
        tp: ranks that hold one engine together; all make the same calls and get the same samples,
            those that vLLM reports routes for with their routes on the first of these ranks alone
        ranks: that hold engines, the first of torch's; None: all
        max_tokens: longest sample, prompt and response
        max_num_seqs: samples that run at once
        gpu_memory_utilization: share of a GPU's memory for weights and key/value cache
        cache_bytes: of the key/value cache, on a CPU
        engine_routes: let vLLM report routes itself; None: on GPUs only. On a CPU that needs
            Triton's interpreter, 100 times slower than our worker
        sampling_mask: samples carry tokens kept by top-p and top-k. On a GPU sampling then needs
            a top-k, and log-probs of greedy samples are 0
        draft_layers: MTP layers with which it drafts tokens, one each; their weights come with the
            others. Samples count the forward passes that sampled them
        quantization: "fp8": matrices of layers have 8 bits; a load fails if one has other bits
        sleeps: on a GPU, allow `sleep` to free memory; vLLM has to know from the start
        scale: of the image processor; None: prompts have no images
        lora: adapters that it applies itself; their factors come with the weights
        options: further arguments of vLLM's engine

    Raises: ValueError naming modules whose adapters vLLM would not apply.
    """

    def __init__(
        self,
        config: str | Path,
        *,
        num_experts: int,
        layer_ids: Sequence[int],
        dtype: str = "float32",
        tp: int = 1,
        ranks: int | None = None,
        max_tokens: int,
        max_num_seqs: int = 128,
        gpu_memory_utilization: float = 0.6,
        cache_bytes: int = 1 << 28,
        engine_routes: bool | None = None,
        sampling_mask: bool = False,
        draft_layers: int = 0,
        quantization: str | None = None,
        sleeps: bool = False,
        tokenizer: str | Path | None = None,
        scale: Scale | None = None,
        lora: Lora | None = None,
        options: dict[str, Any] | None = None,
    ):
        if find_spec("vllm") is None:
            raise RuntimeError(
                "rollout.engine: vllm is not installed, expected vllm 0.32. On a GPU: pip install "
                "vllm==0.32.0; on a CPU use rollout.engine=hf, or run make .venv/.vllm in a clone"
            )
        self.layer_ids = tuple(layer_ids)
        self.num_experts = num_experts
        self.on_cpu = cpu.installed()
        self.tokenizer = tokenizer
        self.version: int | None = None
        self.max_num_seqs = max_num_seqs
        given = json.loads((Path(config) / "config.json").read_text(encoding="utf-8"))
        self.scale = scale
        self._refusal = "no weights were loaded yet"
        self._lora = lora
        own = not self.on_cpu if engine_routes is None else engine_routes
        self._own = own
        self._loads = 0
        self._sleeps = sleeps
        self._drafts = draft_layers > 0
        self._asleep = set[str]()
        self._captures = bool(self.layer_ids) and not own
        self._kept = sampling_mask
        self._returns_sets = sampling_mask and own
        arguments = {
            "enable_return_routed_experts": bool(self.layer_ids) and own,
            "return_sampling_mask": self._returns_sets,
            "enable_prefix_caching": True,
            "model": str(config),
            "hf_overrides": unwritten(given),
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "skip_tokenizer_init": tokenizer is None,
            "dtype": dtype,
            "tensor_parallel_size": tp,
            "max_model_len": max_tokens,
            "max_num_seqs": max_num_seqs,
        }
        device = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": sleeps}
        arguments |= image_arguments(scale) | lora_arguments(given, lora)
        arguments |= drafting(draft_layers) | quantizing(quantization)
        arguments |= cpu.arguments(cache_bytes) if self.on_cpu else device
        with world_of(ranks):
            self._engine = start(self.on_cpu and own, **(arguments | (options or {})))
        self._reports = reports_routes(self._engine)
        if lora is not None:
            self._watch_adapters(lora)
        if not own:
            self._watch_steps()

    def _watch_steps(self) -> None:
        layers = self.layer_ids if self._captures else ()
        self._engine.collective_rpc("watch_steps", args=(layers, self.num_experts))
        if self._kept:
            self._engine.collective_rpc("watch_sets")

    def _watch_adapters(self, lora: Lora) -> None:
        refused, *_ = self._engine.collective_rpc("watch_adapters", args=(lora.model_dump(),))
        if refused:
            self.close()
            raise ValueError(
                f"VLLMEngine.lora: {len(refused)} adapters that vLLM would not apply:\n  "
                + "\n  ".join(refused[:8])
                + "\nexpected none. Use lora.publish: merge, or leave these targets out"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Routes if the model has routers; processed log-probs; every kind of sampling."""
        routes = bool(self.layer_ids)
        images = self.scale is not None
        return Capabilities(routes=routes, images=images, sampling_mask=self._kept, turns=True)

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Loads new weights. The engine does not generate until that has succeeded.

        Args:
            named: (name, tensor of any device and float dtype) under the names of the model's
                safetensors, experts one by one
            version: kept on each sample
            only: names of the tensors that are sent, in whole layers, and all factors; the others
                stay unchanged; None: all

        Raises:
            ValueError: listing unknown, missing and twice given names, wrong shapes and tensors
                with non-finite values; a layer in part
            RuntimeError: ``only`` is given, but the engine has no complete weights

        Syncs: once, for the finiteness of all tensors together.
        """
        if only is not None and self.version is None:
            raise incomplete("VLLMEngine", only, self._refusal)
        self.version = None
        self._loads = self._loads + 1
        self._refusal = f"loading version {version} failed and left the weights incomplete"
        self._wake("weights")
        with self._uncompiled_on_cpu():
            found = self._engine.collective_rpc("take_weights", args=(named, only, self._loads))
        for errors in found:
            for error in errors:
                raise error
        self._engine.reset_prefix_cache()
        self._engine.reset_encoder_cache()  # what the tower made of images, with earlier weights
        self.version = version

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Digests of the tensors of the last load, as vLLM's loader took them.

        Args:
            names: checkpoint names; None = all, and each worker's own tensors as they are now, as
                ``vllm rank <n>: <parameter>``

        Raises:
            RuntimeError: no complete weights are loaded
            ValueError: a name that was not loaded

        Syncs: once.
        """
        require_weights("VLLMEngine.checksums", self.version, self._refusal)
        found = self._engine.collective_rpc("weight_digests", args=(names,))
        return agreed_digests(found)

    def sleep(self) -> int:
        """Frees the memory of weights and cache. The next `load_weights` allocates the weights
        again, and the next `generate` the cache. Returns the bytes freed.

        Raises:
            RuntimeError: the engine was not started with ``sleeps``, or runs on a CPU
        """
        if self.on_cpu or not self._sleeps:
            raise RuntimeError(
                "VLLMEngine.sleep: "
                + ("vLLM's build for CPUs keeps its memory" if self.on_cpu else "sleeps is False")
                + ", expected an engine on a GPU that was started with sleeps=True"
            )
        self.version = None
        self._refusal = "sleep freed its weights"
        before = torch.cuda.mem_get_info()[0]
        self._engine.sleep(level=2)  # the weights too: the next publish brings all of them
        self._asleep = {"weights", "kv_cache"}
        return torch.cuda.mem_get_info()[0] - before

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._engine.wake_up([part])
            self._asleep.remove(part)

    def close(self) -> None:
        """Shuts vLLM down, before the process groups that it uses end."""
        self._engine.engine_core.shutdown()

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        """Draws `samples_per_prompt` responses to every prompt.

        Yields:
            samples as they finish; on the CPU, not scored

        Raises:
            RuntimeError: no complete weights are loaded, another stream is open, or vLLM gave up
                a request
            ValueError: stop strings without a tokenizer, images without an image processor, or an
                image that cannot be decoded
        """
        yield from self._run(AllAtOnce(prompts, sampling), sampling, "stream")

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Samples every turn of ``feed``; each yields one sample, whose prompt is its context.

        Whole blocks of the context that earlier turns left in the prefix cache are not computed
        again. On a CPU, where our worker sees the routes of what is computed, only turns of one
        trajectory share blocks, so that the first has all its routes; those of later turns have no
        route for cached tokens.

        Args:
            feed: asked for turns between forwards
            sampling: ``samples_per_prompt`` and ``max_new_tokens`` are the feed's

        Raises:
            RuntimeError, ValueError: as `stream`
        """
        yield from self._run(feed, sampling, "answer")

    def _run(self, feed: TurnFeed, sampling: Sampling, call: str) -> Generator[Sample, None, None]:
        where = f"VLLMEngine.{call}"
        require_weights(where, self.version, self._refusal)
        if self._engine.has_unfinished_requests():
            raise RuntimeError(f"{where}: a stream is open, expected it closed before")
        need_tokenizer(where, sampling, self.tokenizer)
        self._wake("kv_cache")
        left = dict[str, Turn]()
        waiting = deque[str]()
        begun = 0
        passes = Counter[str]()
        is_open = True
        loads = self._loads
        version = self.version
        if sampling.greedy and self._returns_sets:  # vLLM returns sets of sampled tokens only
            sampling = replace(sampling, greedy=False, temperature=1.0, top_p=1.0, top_k=1)
        # our worker sees the routes of what is computed, not of what is cached
        isolated = call == "answer" and self._captures
        reads = call == "answer" or self._own
        most = 2 * self.max_num_seqs
        salt = str(self._loads)
        request = self._adapter_request(where) if self._lora else None
        asked = Requests(self._engine, self.scale, sampling, most, salt, isolated, reads, request)
        try:
            while left or is_open:
                if self._loads != loads:
                    raise replaced(where, version)
                new = feed.take(wait=not left) if is_open else None
                is_open = new is not None
                named = {str(n): turn for n, turn in enumerate(new or (), begun)}
                left = left | named
                begun = begun + len(named)
                waiting.extend(named)
                asked.admit(waiting, left)
                if not left:
                    continue
                if not self._engine.has_unfinished_requests():
                    raise RuntimeError(
                        f"{where}: vLLM ended without {len(left)} of {begun} samples, expected all"
                    )
                with self._uncompiled_on_cpu():
                    outputs = cast("list[RequestOutput]", self._engine.step())
                passes.update(output.request_id for output in outputs)
                for each in [output for output in outputs if output.finished]:
                    turn = left.pop(each.request_id)
                    name = each.request_id
                    images = asked.decoded[turn.prompt.id]
                    yield self._sample(turn, name, each.outputs[0], images, passes.pop(name))
        finally:  # also when the caller closes the stream, and after Ctrl-C
            if left:
                self._engine.abort_request(list(left))
            if self._captures or self._kept:
                self._engine.collective_rpc("forget_routes")

    def _uncompiled_on_cpu(self) -> Any:
        """A context without `torch.compile`, which takes longer than all that it would save."""
        return torch.compiler.set_stance("force_eager" if self.on_cpu else "default")

    def _adapter_request(self, where: str) -> LoRARequest:
        """Asks for the adapters of the last load, which every worker has to hold."""
        held = self._engine.collective_rpc("adapters_in_use")
        if any(each != [self._loads] for each in held):
            raise RuntimeError(
                f"{where}: vLLM's workers hold the adapters of loads {held}, expected those of "
                f"load {self._loads} alone; samples would come from other weights"
            )
        return request_of(self.version or 0, self._loads)

    def _sample(
        self,
        turn: Turn,
        name: str,
        output: CompletionOutput,
        images: tuple[Image, ...],
        passes: int,
    ) -> Sample:
        prompt = turn.prompt
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"VLLMEngine.stream(prompt {prompt.id}, sample {turn.index}): vLLM ended it with "
                f"{output.finish_reason!r}, expected stop or length"
            )
        start = len(prompt.tokens)
        tokens = [*prompt.tokens, *output.token_ids]
        mask = torch.arange(len(tokens)) >= start
        logprobs = torch.zeros(len(tokens))
        found = zip(output.token_ids, output.logprobs or (), strict=True)
        logprobs[start:] = torch.tensor([(each or {})[token].logprob for token, each in found])
        if self._captures:
            asked = name, len(tokens)
            routes, routed = self._engine.collective_rpc("take_routes", args=asked)[0]
        else:
            routes, routed = self._reported(output.routed_experts, turn, len(tokens))
        return Sample(
            prompt_id=prompt.id,
            index=turn.index,
            tokens=torch.tensor(tokens),
            prompt_len=start,
            loss_mask=mask,
            rollout_logprobs=logprobs,
            routes=routes,
            layer_ids=() if routes is None else self.layer_ids,
            route_mask=routed,
            weight_version=self.version or 0,
            finish_reason=output.finish_reason,
            images=images,
            turn=turn.number,
            passes=passes if self._drafts else 0,
            **sample_fields(self._sets(name, output), start),
        ).check()

    def _sets(self, name: str, output: CompletionOutput) -> list[Tensor]:
        if self._returns_sets:
            return returned_sets(output)
        return self._engine.collective_rpc("take_sets", args=(name,))[0] if self._kept else []

    def _reported(
        self, ids: np.ndarray | None, turn: Turn, tokens: int
    ) -> tuple[Tensor | None, Tensor]:
        """Routes [T, L, K] of the layers that have a router, as vLLM reports them, and the mask [T]
        of the tokens that have a route: not the last one, which is no input. None on ranks that
        vLLM reports none to."""
        routed = torch.zeros(tokens, dtype=torch.bool)
        if not self._reports:
            return None, routed
        if ids is None:
            raise RuntimeError(
                f"VLLMEngine.stream(prompt {turn.prompt.id}, sample {turn.index}): vLLM returned "
                f"no routes, expected those of {len(self.layer_ids)} layers"
            )
        given = torch.from_numpy(ids.astype(np.int32))[: tokens - 1, list(self.layer_ids)]
        routes = torch.zeros(tokens, *given.shape[1:], dtype=route_dtype(self.num_experts))
        routes[: len(given)], routed[: len(given)] = given, True
        return routes, routed
