"""Loads MTP layers into the model with which vLLM drafts tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.rollout.draft_layers import is_draft


def drafting(layers: int) -> dict[str, Any]:
    """Arguments of vLLM's engine that drafts a token with each of so many MTP layers."""
    if not layers:
        return {}
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": layers}}


def drafts_with_mtp(config: Any) -> bool:
    """True if vLLM of this config drafts with MTP layers; it has other ways, such as n-grams."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "mtp"


class DraftLoad:
    """One load of the draft model, next to a load of the model itself.

    vLLM 0.32's ``reload_weights`` loads the model alone. The draft model shares its embedding and
    its head, and is of no use with other weights than those that the trainer has now.

    Args:
        draft: vLLM's draft model; None: it drafts nothing
        config: vLLM's
    """

    def __init__(self, draft: torch.nn.Module | None, config: Any):
        self.draft: Any = draft
        self._config = config
        self._layers = config.model_config.get_total_num_hidden_layers()
        self._begun = False

    def without_drafts(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Loads the tensors of MTP layers, and yields the others."""
        for name, tensor in named:
            if self.draft is None or not is_draft(name, self._layers):
                yield name, tensor
                continue
            self._begin()
            self.draft.load_weights([(name, tensor)])

    def _begin(self) -> None:
        """vLLM skips the modules that a load of the model has begun, those that both share."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        if not self._begun:
            initialize_layerwise_reload(self.draft)
            self._begun = True

    def finish(self) -> None:
        """To be called after the load of the model, which completes what both share."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        if self._begun:
            with set_current_vllm_config(self._config):
                finalize_layerwise_reload(self.draft, self._config.model_config)
            self._begun = False
