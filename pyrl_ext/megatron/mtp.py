"""Multi-token prediction on packed sequences, the same under every layout.

megatron-core 0.19.2's own path derives inputs and labels by rolling each rank's part of the packed
stream: wrong under context parallelism when sequences are padded (its roll goes by the unpadded
``cu_seqlens_q``), with a loop over sequences that waits for the device. It weights the loss by the
token counts of one microbatch on one rank, so that gradients depend on the split. Here the tokens
ahead come from the batch, shifted before it is sharded, and what is made of the hidden states goes
to the caller, who counts over the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from pyrl_ext.megatron.image_features import FeatureGPT


class MultiTokenGPT(FeatureGPT):
    """In training, returns what ``output_processor`` makes of every depth: [next token, the one
    after it, ...].

    It is called once a depth, with hidden states [M, 1, H] (a shard of the rows with sequence
    parallelism), the output layer, its weight and the depth. Outside of training the layers for
    multi-token prediction do not run, and the next token is the only depth. Both hold on every
    pipeline stage, so that the stages agree on what they exchange.
    """

    def _postprocess(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        rotary_pos_emb: Tensor | None = None,
        output_processor: Callable[..., Any] | None = None,
        **_: Any,
    ) -> Tensor | list[Any]:
        if self.training and self.mtp_process:
            hidden_states = self.mtp(
                input_ids=None,  # the layers below take them from packed_seq_params
                position_ids=None,
                hidden_states=hidden_states,
                attention_mask=None,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                embedding=self.embedding,
            )
        if not self.post_process:
            return hidden_states
        assert output_processor is not None
        weight: Any = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        depths = (self.config.mtp_num_layers or 0) if self.training else 0
        found = []
        for depth, hidden in enumerate(hidden_states.chunk(1 + depths)):
            if depth == 1 and self.config.mtp_detach_heads:
                shared: Any = self.output_layer.weight if weight is None else weight
                weight = shared.detach()
            found.append(
                output_processor(
                    hidden_states=hidden,
                    output_layer=self.output_layer,
                    output_weight=weight,
                    depth=depth,
                )
            )
        return found


class PackedMTPLayer(MultiTokenPredictionLayer):
    """Reads the tokens ahead from the packed microbatch instead of rolling this rank's part."""

    def _get_embeddings(  # type: ignore[override]
        self,
        input_ids: Any,
        position_ids: Any,
        embedding: MegatronModule,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: None = None,
    ) -> tuple[None, None, None, Tensor, Tensor]:
        tokens = packed_seq_params.mtp_tokens[self.layer_number - 1][None]
        ahead = embedding(input_ids=tokens, position_ids=packed_seq_params.positions[None])
        for rows, values in packed_seq_params.ahead.get(self.layer_number, ()):  # of images
            ahead = ahead.index_copy(0, rows, values.to(ahead.dtype)[:, None])
        if self.config.mtp_detach_heads:
            ahead = ahead.detach()
        hidden = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if (
            not hidden.requires_grad
        ):  # detached: recomputation needs one input that wants a gradient
            hidden.requires_grad_(True)
        return None, None, None, ahead, hidden
