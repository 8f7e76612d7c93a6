"""The methods of vLLM's workers that a trainer calls through /collective_rpc."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyrl_ext.rollout.remote.holder import Holder, Run
from pyrl_ext.rollout.remote.identity import make_identity
from pyrl_ext.rollout.vllm.quantization import quantization_of


class ServedWorker:
    """`--worker-extension-cls` of vLLM's server."""

    vllm_config: Any
    get_draft_model: Callable[[], Any]
    weight_transfer_engine: Any
    _held = Holder()  # vLLM has one worker in a process

    def weight_digests(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Digests of the tensors last loaded, as they came; with None also of those in memory."""
        return self.weight_transfer_engine.weight_digests(names)

    def kept(self) -> str:
        """See `StagedUpdate.kept`; the first worker receives."""
        return self.weight_transfer_engine.staged.kept

    def claim(self, number: str, name: str) -> str:
        """See `Holder.claim`."""
        return self._held.claim(Run(number, name))

    def release(self, number: str, name: str) -> str:
        """See `Holder.release`."""
        answer = self._held.release(Run(number, name))
        if self._held.run is None:
            self.weight_transfer_engine.staged.forget_kept()
        return answer

    def identity(self) -> dict[str, str]:
        """The digests that a trainer compares before it publishes to this server."""
        # vLLM gives a transfer engine the model alone
        self.weight_transfer_engine.draft = self.get_draft_model()
        model = self.vllm_config.model_config
        config = json.loads(Path(model.model, "config.json").read_text(encoding="utf-8"))
        shapes = self.weight_transfer_engine.staged.wanted
        tokenizer = None if model.skip_tokenizer_init else model.tokenizer
        quantization = quantization_of(self.vllm_config)
        dtype = str(model.dtype)[6:]
        return make_identity(config, shapes, dtype, tokenizer, quantization=quantization)
