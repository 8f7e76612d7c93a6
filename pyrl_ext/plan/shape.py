"""The sizes that a family's HF config states, and the parameters that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pyrl_ext.plan.schema import Positive

Count = Annotated[int, Field(ge=0)]


class Shape(BaseModel):
    """glm4_moe_lite: multi-latent attention, leading dense layers, sigmoid-routed experts.

    Keys keep their HF names. What a checkpoint may leave out has transformers' default.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    moe_intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    n_routed_experts: Positive
    n_shared_experts: Count
    num_experts_per_tok: Positive
    n_group: Positive
    topk_group: Positive
    routed_scaling_factor: Annotated[float, Field(gt=0)]
    initializer_range: Annotated[float, Field(gt=0)]
    q_lora_rank: Positive | None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    max_position_embeddings: Positive
    rms_norm_eps: Annotated[float, Field(gt=0)]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    num_nextn_predict_layers: Count = 0
    mlp_layer_types: Annotated[
        tuple[Literal["dense", "sparse"], ...] | None, Field(strict=False)
    ] = None
    first_k_dense_replace: Count | None = None

    @property
    def router_layers(self) -> tuple[int, ...]:
        """0-based global ids of the decoder layers that have a router."""
        if self.mlp_layer_types is not None:
            return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")
        # transformers: without either key, every layer but the first is sparse
        dense = 1 if self.first_k_dense_replace is None else self.first_k_dense_replace
        return tuple(range(dense, self.num_hidden_layers))

    @property
    def route_bytes_per_token(self) -> int:
        """Bytes of one token's routed experts: one id a router and chosen expert."""
        id_bytes = 1 if self.n_routed_experts <= 256 else 2
        return len(self.router_layers) * self.num_experts_per_tok * id_bytes


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of parts, told apart by how they are split over ranks."""

    replicated: int = 0
    """Norms and routers: whole on every tensor-parallel rank."""
    tensor: int = 0
    """Split over tensor-parallel ranks."""
    expert: int = 0
    """Routed experts: split over expert-parallel and expert-tensor-parallel ranks."""
    active_expert: int = 0
    """Of `expert`, those that one token uses."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.replicated + other.replicated,
            self.tensor + other.tensor,
            self.expert + other.expert,
            self.active_expert + other.active_expert,
        )

    @property
    def total(self) -> int:
        """Every parameter once."""
        return self.replicated + self.tensor + self.expert

    @property
    def active(self) -> int:
        """Parameters one token passes through, with the whole embedding and head counted."""
        return self.replicated + self.tensor + self.active_expert


def layer_parameters(shape: Shape, layer: int) -> Parameters:
    """Parameters of decoder layer `layer` (0-based), without its router's bias buffer."""
    hidden = shape.hidden_size
    norms = Parameters(replicated=2 * hidden)
    if layer not in shape.router_layers:
        ffn = Parameters(tensor=3 * hidden * shape.intermediate_size)
        return norms + _attention(shape) + ffn
    one = 3 * hidden * shape.moe_intermediate_size
    return (
        norms
        + _attention(shape)
        + Parameters(
            replicated=hidden * shape.n_routed_experts,
            tensor=one * shape.n_shared_experts,
            expert=one * shape.n_routed_experts,
            active_expert=one * shape.num_experts_per_tok,
        )
    )


def _attention(shape: Shape) -> Parameters:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    latent = shape.kv_lora_rank + shape.qk_rope_head_dim
    norms = shape.kv_lora_rank
    split = hidden * latent + heads * shape.v_head_dim * hidden
    split += shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    if shape.q_lora_rank is None:
        split += hidden * query
    else:
        norms += shape.q_lora_rank
        split += shape.q_lora_rank * (hidden + query)
    if shape.attention_bias:
        split += (shape.q_lora_rank or 0) + latent
        norms += hidden
    return Parameters(replicated=norms, tensor=split)


def embedding_parameters(shape: Shape) -> Parameters:
    """The token embedding."""
    return Parameters(tensor=shape.vocab_size * shape.hidden_size)


def head_parameters(shape: Shape) -> Parameters:
    """The final norm, and the output projection where it is not the embedding again."""
    tied = shape.tie_word_embeddings
    return Parameters(
        replicated=shape.hidden_size, tensor=0 if tied else shape.vocab_size * shape.hidden_size
    )


def parameters(shape: Shape) -> Parameters:
    """Parameters of the whole model, multi-token-prediction layers apart."""
    total = embedding_parameters(shape) + head_parameters(shape)
    for layer in range(shape.num_hidden_layers):
        total += layer_parameters(shape, layer)
    return total


def read_shape(hf: dict[str, Any]) -> Shape:
    """The sizes in an HF config. Raises pydantic's `ValidationError`."""
    return Shape.model_validate(hf)
