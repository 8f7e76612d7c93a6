"""Parameters of the parts of a model."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Self

from pyrl_ext.plan.model.families.blocks import GroupedQuery, Latent
from pyrl_ext.plan.model.layer_kinds import LayerKind
from pyrl_ext.plan.model.sizes import ModelSizes


class Sums:
    """Numbers of parts, which add up field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Parameters(Sums):
    """Parameter counts of parts, separated by how they are split over ranks."""

    replicated: int = 0
    """Norms and routers: whole on every tensor-parallel rank."""
    tensor: int = 0
    """Split over tensor-parallel ranks."""
    expert: int = 0
    """Routed experts: split over expert-parallel and expert-tensor-parallel ranks."""
    active_expert: int = 0
    """The parameters of `expert` that one token uses."""

    @property
    def total(self) -> int:
        """Every parameter once."""
        return self.replicated + self.tensor + self.expert

    @property
    def active(self) -> int:
        """Parameters one token passes through, with the whole embedding and head counted."""
        return self.replicated + self.tensor + self.active_expert


def attention(sizes: ModelSizes) -> Parameters:
    """Parameters of one layer's attention."""
    if isinstance(sizes, Latent):
        return _latent(sizes)
    if isinstance(sizes, GroupedQuery):
        return _grouped_query(sizes)
    raise TypeError(
        f"attention: {type(sizes).__name__}, expected a family with Latent or GroupedQuery "
        "attention"
    )


def _grouped_query(sizes: GroupedQuery) -> Parameters:
    hidden = sizes.hidden_size
    width = sizes.head_width
    heads = sizes.num_attention_heads
    inputs = heads * (1 + sizes.has_output_gate) + 2 * sizes.num_key_value_heads
    whole = 0
    split = hidden * width * (inputs + heads)
    if sizes.has_qk_norm:
        whole += 2 * width
    if sizes.normalizes_all_heads:
        split += width * (heads + sizes.num_key_value_heads)
    if sizes.attention_bias:
        whole += hidden if sizes.has_output_bias else 0
        split += width * inputs
    return Parameters(replicated=whole, tensor=split)


def _latent(sizes: Latent) -> Parameters:
    hidden = sizes.hidden_size
    heads = sizes.num_attention_heads
    query = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
    norms = sizes.kv_lora_rank
    split = heads * sizes.v_head_dim * hidden
    split += sizes.kv_lora_rank * heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    if sizes.q_lora_rank is None:
        split += hidden * query
    else:
        norms += sizes.q_lora_rank
        split += sizes.q_lora_rank * query
    whole = whole_projections(sizes)
    biases = whole // hidden + hidden if sizes.attention_bias else 0
    return Parameters(replicated=norms + whole + biases, tensor=split)


def whole_projections(sizes: ModelSizes) -> int:
    """The matrices of `attention` that every tensor-parallel rank holds whole."""
    if not isinstance(sizes, Latent):
        return 0
    down = (sizes.q_lora_rank or 0) + sizes.kv_lora_rank + sizes.qk_rope_head_dim
    return sizes.hidden_size * down


def layers(sizes: ModelSizes) -> tuple[Parameters, ...]:
    """Parameters of every decoder layer, without its router's bias buffer."""
    kinds = sizes.layer_kinds
    each = {kind: layer_parameters(sizes, kind) for kind in {*kinds}}
    return tuple(each[kind] for kind in kinds)


def layer_parameters(sizes: ModelSizes, kind: LayerKind) -> Parameters:
    """Parameters of a layer: of its norms, its mixer and its feed-forward part."""
    found = Parameters(replicated=kind.blocks * sizes.hidden_size)
    if kind.mixer == "attention":
        found += attention(sizes)
    elif kind.mixer is not None:
        found += state_mixer_parameters(sizes)
    if kind.feed_forward == "mlp":
        found += Parameters(tensor=_mlp(sizes, sizes.intermediate_size))
    elif kind.feed_forward == "moe":
        found += _experts(sizes)
    return found


def state_mixer_parameters(sizes: ModelSizes) -> Parameters:
    """Parameters of a mixer that carries a state."""
    mixer = sizes.state_mixer
    assert mixer is not None
    split = sizes.hidden_size * (mixer.inputs + mixer.inner)
    split += mixer.convolved * mixer.taps + mixer.vectors
    norm = mixer.norm if mixer.norm == mixer.inner else 0
    return Parameters(replicated=mixer.norm - norm, tensor=split + norm)


def _mlp(sizes: ModelSizes, width: int) -> int:
    return sizes.mlp_matrices * sizes.hidden_size * width


def _experts(sizes: ModelSizes) -> Parameters:
    hidden = sizes.hidden_size
    one = _mlp(sizes, sizes.moe_intermediate_size)
    return Parameters(
        replicated=hidden * (sizes.num_experts + sizes.has_shared_expert_gate),
        tensor=_mlp(sizes, sizes.shared_expert_width),
        expert=one * sizes.num_experts,
        active_expert=one * sizes.topk,
    )


def mtp_parameters(sizes: ModelSizes) -> Parameters:
    """Parameters of a layer for multi-token prediction: a decoder layer with experts, behind a
    projection of two normed inputs and before a separate norm."""
    hidden = sizes.hidden_size
    more = Parameters(replicated=3 * hidden, tensor=2 * hidden * hidden)
    return layer_parameters(sizes, sizes.mtp_kind) + more


def embedding_parameters(sizes: ModelSizes) -> Parameters:
    """The token embedding."""
    return Parameters(tensor=sizes.vocab_size * sizes.hidden_size)


def head_parameters(sizes: ModelSizes) -> Parameters:
    """The final norm, and the output projection where it is not the embedding again."""
    tied = sizes.tie_word_embeddings
    return Parameters(
        replicated=sizes.hidden_size, tensor=0 if tied else sizes.vocab_size * sizes.hidden_size
    )


def parameters(sizes: ModelSizes) -> Parameters:
    """Parameters of the whole model, without layers for multi-token prediction."""
    return sum(layers(sizes), embedding_parameters(sizes) + head_parameters(sizes))
