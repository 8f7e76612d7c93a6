"""Rows of the language model that an encoder computed: in place of their embeddings, and added
after its first layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class FeatureGPT(GPTModel):
    """megatron's model, whose forward also takes ``features``, on the chunk with the embedding.

    Args:
        features: (rows [n] int64 of this rank's shard of the sequence, values [n, (1 + deep) * H])
            of each sender. A row's first H numbers stand in place of its embedding, the next H are
            added to its output of the model's first layer, and so on.

    Raises: ValueError if the chunk has fewer layers than features are added to, or their width is
        no multiple of H.
    """

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        *,
        features: Sequence[tuple[Tensor, Tensor]] = (),
        **more: Any,
    ) -> Any:
        if features:
            rows, values = (torch.cat(each) for each in zip(*features, strict=True))
            width = self.config.hidden_size
            layers = len(self.decoder.layers)
            if values.shape[1] % width or not 0 < values.shape[1] // width <= 1 + layers:
                raise ValueError(
                    f"FeatureGPT: features are {values.shape[1]} wide, expected {width} times 1 to "
                    f"{1 + layers}; one part is the embedding, each other is added after one of "
                    f"the chunk's {layers} layers"
                )
            hidden = self.embedding(input_ids=input_ids, position_ids=position_ids)
            first, deep = values.split([width, values.shape[1] - width], dim=1)
            more["decoder_input"] = hidden.index_copy(0, rows, first[:, None])
            if deep.shape[1]:
                more["extra_block_kwargs"] = {"context": deep, "context_mask": rows}
        return super().forward(input_ids, position_ids, attention_mask, **more)


class FeatureLayer(TransformerLayer):
    """A decoder layer that adds its part of the features to its output.

    They come as ``context`` [n, deep * H] and their rows as ``context_mask`` [n]: megatron hands
    both through all layers for cross-attention, which these layers have not, and recomputation
    takes them as arguments. So the features' gradient is complete in one piece, with recomputation
    and without.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        layer_output: tuple[Any, Tensor | None] = super().forward(*args, **kwargs)
        output, context = layer_output
        if context is None:
            return output, None
        parts = context.split(output.shape[-1], dim=-1)
        mine = parts[self.layer_number - 1]
        output = output.index_add(0, kwargs["context_mask"], mine[:, None])
        return output, context if self.layer_number < len(parts) else None
