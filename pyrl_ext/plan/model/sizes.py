"""A model family: the sizes that an HF config states, megatron's config, and the weight table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.layer_kinds import DENSE, SPARSE, LayerKind, StateMixer
from pyrl_ext.plan.model.route_ids import route_id_bytes
from pyrl_ext.plan.model.towers import Tower
from pyrl_ext.plan.model.weight import Weight, mlp_rows


@dataclass(frozen=True)
class Yarn:
    """Rotary embedding stretched to longer contexts: long wavelengths all the way, short ones not
    at all."""

    factor: float
    """The factor of the context's length."""
    original_positions: float
    """Length of the context before."""
    beta_fast: float
    """Wavelengths that turn more often than this in the original context stay as they are,"""
    beta_slow: float
    """those that turn less often than this are stretched by the whole factor."""
    truncate: bool
    """Round the dimensions between which that changes to whole ones."""
    rotation_scale: float
    """Factor of rotated queries and keys."""
    mscale_all_dim: float
    """Attention temperature per logarithm of `factor`; 0: none."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary embedding stretched to longer contexts as in Llama 3.1."""

    factor: float
    """The factor of the context's length."""
    original_positions: float
    """Length of the context before."""
    low_freq_factor: float
    """Wavelengths that turn less often than this in the original context are stretched by the whole
    factor,"""
    high_freq_factor: float
    """those that turn more often than this stay as they are."""


class ModelSizes(BaseModel, ABC):
    """A model of any family; ``plan/model/families/`` has a subclass for each.

    Fields keep their HF names where the families agree on one; `key` gives the name a config uses.
    A key that a checkpoint may leave out has transformers' default.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    initializer_range: Annotated[float, Field(gt=0)]
    max_position_embeddings: Positive
    rms_norm_eps: Annotated[float, Field(gt=0)]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"
    # configs written by transformers 4 have the base next to rope_scaling, not in it
    rope_parameters: dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("rope_parameters", "rope_scaling")
    )
    rope_theta: float = 10000.0
    num_nextn_predict_layers: Count = 0
    # of a model with experts (`Sparse`); a dense one has none
    num_experts: Count = 0
    topk: Count = Field(0, alias="num_experts_per_tok")
    moe_intermediate_size: Count = 0
    # of a model that reads images
    vision: Tower | None = Field(None, validation_alias="vision_config")

    has_output_bias: ClassVar[bool] = True
    """True if ``attention_bias`` means the output projection too, which the trainer cannot."""
    has_router_bias: ClassVar[bool] = False
    """True if routers have a bias that only chooses experts, and can be moved towards balance."""
    built_act: ClassVar[str] = "silu"
    """The activation that the trainer builds."""
    mlp_matrices: ClassVar[int] = 3
    """Matrices of an MLP or expert: gate, up and down; 2 without a gate."""
    has_output_gate: ClassVar[bool] = False
    """True if attention's output is gated by as many more outputs of the query projection."""
    normalizes_all_heads: ClassVar[bool] = False
    """True if a token's queries are normalized over all heads together, and so are its keys."""
    has_shared_expert_gate: ClassVar[bool] = False
    """True if a number of each token scales the output of the shared expert."""
    rope_types: ClassVar[frozenset[str]] = frozenset({"default"})
    """Rotary embeddings that the trainer builds."""
    hf_parts: ClassVar[Mapping[str, str]] = {}
    """Part of a checkpoint name of most families -> this family's, replaced in turn."""

    @classmethod
    def key(cls, field: str) -> str:
        """The name of `field` in the HF config."""
        return cls.model_fields[field].alias or field

    @property
    def router_layers(self) -> tuple[int, ...]:
        """0-based global ids of the decoder layers that have a router."""
        return ()

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every decoder layer."""
        routers = {*self.router_layers}
        return tuple(SPARSE if i in routers else DENSE for i in range(self.num_hidden_layers))

    @property
    def mtp_kind(self) -> LayerKind:
        """The kind of the layers for multi-token prediction."""
        return SPARSE if self.num_experts else DENSE

    def kinds_in(self, chunk: ModelChunk) -> list[LayerKind]:
        """The kinds of a model chunk's layers, those for multi-token prediction last."""
        return [self.layer_kinds[layer] for layer in chunk.layers] + [self.mtp_kind] * chunk.mtp

    @property
    def state_mixer(self) -> StateMixer | None:
        """The mixer of layers that carry a state; None: all attend."""
        return None

    @property
    @abstractmethod
    def rotary_width(self) -> int:
        """Elements of a query or key head that are rotated by position."""

    @property
    def tp_widths(self) -> dict[str, int]:
        """Name -> width of what tensor-parallel ranks split, besides the heads; 0: not there."""
        return {
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size * n_shared_experts": self.shared_expert_width,
        }

    @property
    def whole_widths(self) -> dict[str, int]:
        """Name -> width of what every tensor-parallel rank holds whole; 0: not there."""
        return {"hidden_size": self.hidden_size}

    @property
    def query_groups(self) -> int | None:
        """Key/value heads, each shared by a group of query heads; None: every head has its own."""
        return None

    @property
    def shared_expert_width(self) -> int:
        """Width of the expert that every token uses; 0: none."""
        return 0

    @property
    def route_bytes_per_token(self) -> int:
        """Bytes of one token's routed experts: one id a router and chosen expert."""
        return len(self.router_layers) * self.topk * route_id_bytes(self.num_experts)

    @property
    def rope_base(self) -> float:
        """Base of the rotary embedding's wavelengths."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))

    @property
    def rope_type(self) -> str:
        """Scaling of the rotary embedding to long contexts; default: none."""
        rope = self.rope_parameters or {}
        return rope.get("rope_type", rope.get("type", "default"))

    @property
    def rope_sections(self) -> tuple[int, ...]:
        """Wavelengths that turn with a row's position in time, height and width; (): with one
        position."""
        return tuple((self.rope_parameters or {}).get("mrope_section", ()))

    @property
    def rope_scaling(self) -> Yarn | Llama3Scaling | None:
        """The scaling of wavelengths that `rope_type` names; None: none."""
        return None

    def contradictions(self) -> list[str]:
        """Contradictions that no model can have, each the message of a rule."""
        few = (
            f"num_experts_per_tok {self.topk}, expected at most {self.key('num_experts')} "
            f"{self.num_experts}; a token uses distinct experts"
        )
        return [few] if self.topk > self.num_experts else []

    def unsupported(self) -> list[str]:
        """Parts that transformers builds from such a config and the trainer does not."""
        found = []
        if self.rope_type not in self.rope_types:
            found.append(f"rope_type is {self.rope_type}; its rotary embeddings are not built")
        if self.hidden_act != self.built_act:
            found.append(f"hidden_act is {self.hidden_act}; layers are built with {self.built_act}")
        if self.attention_bias and self.has_output_bias:
            found.append("attention_bias is true; attention is built without biases")
        return found

    def notes(self) -> list[str]:
        """Facts about the family that may surprise a reader."""
        return []

    # megatron's config and the weight table ------------------------------------------------------

    def megatron_config(self) -> dict[str, Any]:
        """Arguments of megatron's TransformerConfig, or of its MLATransformerConfig if they contain
        ``multi_latent_attention``. The activation is named as in HF configs."""
        config = {
            "num_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "ffn_hidden_size": self.intermediate_size,
            "layernorm_epsilon": self.rms_norm_eps,
            "activation_func": self.built_act,
            "gated_linear_unit": self.mlp_matrices == 3,
        }
        if not self.router_layers:
            return config
        sparse = [int(i in self.router_layers) for i in range(self.num_hidden_layers)]
        return config | {
            "num_moe_experts": self.num_experts,
            "moe_layer_freq": sparse,
            "moe_router_topk": self.topk,
            "moe_ffn_hidden_size": self.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": self.shared_expert_width or None,
            "moe_shared_expert_gate": self.has_shared_expert_gate,
        }

    @property
    def num_tensors_outside(self) -> int:
        """Number of tensors of no layer: embedding, last norm, and a head that is not tied."""
        return 2 if self.tie_word_embeddings else 3

    @cached_property
    def num_tensors(self) -> int:
        """Number of tensors of a checkpoint without MTP layers, as `weights` lists them."""
        count = self.num_tensors_outside
        for kind, layers in Counter(self.layer_kinds).items():
            rows = self._layer_rows(self.layer_kinds.index(kind))
            count += layers * sum(len(row.hf_names) for row in rows)
        return count

    @cached_property
    def num_mtp_tensors(self) -> int:
        """Number of tensors of one MTP layer, as `weights` lists them."""
        return sum(len(row.hf_names) for row in self.mtp_weights(0))

    def mtp_weights(self, depth: int) -> list[Weight]:
        """The rows of `weights` that belong to one MTP layer."""
        rows = self._layer_rows(self.num_hidden_layers + depth) + self._mtp_rows(depth)
        return [self.renamed(row) for row in rows]

    def weights(self, mtp_layers: int) -> list[Weight]:
        """The weight table: one row for each parameter, in the order of publishing."""
        vocab = self.vocab_size, self.hidden_size
        embedding = "embedding.word_embeddings.weight"
        final_norm = "decoder.final_layernorm.weight"
        rows = [Weight.vocab("model.embed_tokens.weight", embedding, *vocab)]
        for layer in range(self.num_hidden_layers + mtp_layers):
            rows += self._layer_rows(layer)
        rows.append(Weight.same("model.norm.weight", final_norm, self.hidden_size))
        if not self.tie_word_embeddings:
            rows.append(Weight.vocab("lm_head.weight", "output_layer.weight", *vocab))
        for depth in range(mtp_layers):
            rows += self._mtp_rows(depth)
        return [self.renamed(row) for row in rows]

    def renamed(self, row: Weight) -> Weight:
        """A row of the table with this family's checkpoint names."""
        return replace(row, hf_names=tuple(map(self.hf_name, row.hf_names)))

    def hf_name(self, name: str) -> str:
        """The checkpoint name of a tensor that most families call ``name``."""
        return self.hf_part(name)

    def hf_part(self, name: str) -> str:
        """As `hf_name`, of a part of a name."""
        for common, special in self.hf_parts.items():
            name = name.replace(common, special)
        return name

    def ignored(self, mtp_layers: int) -> dict[str, str]:
        """Patterns of checkpoint tensors that are not loaded, each with the reason: MTP layers that
        the plan leaves out, copies, and values computed from the config."""
        first = self.num_hidden_layers
        pattern = ".*"
        reason = "MTP layer; the plan says model.mtp: off"
        if mtp_layers:
            pattern = r"(embed_tokens|shared_head\.head)\.weight"
            reason = "a copy of the model's own"
        layers = range(first, first + self.num_nextn_predict_layers)
        patterns = {rf"model\.layers\.{i}\.{pattern}": reason for i in layers}
        if self.tie_word_embeddings:
            patterns[r"lm_head\.weight"] = "a copy of the embedding"
        return patterns | {r".*\.rotary_emb\.inv_freq": "computed from the config"}

    def _layer_rows(self, layer: int) -> list[Weight]:
        mtp = layer >= self.num_hidden_layers
        kind = self.mtp_kind if mtp else self.layer_kinds[layer]
        hf = f"model.layers.{layer}."
        mc = f"decoder.layers.{layer}."
        rows: list[Weight] = []
        if kind.mixer is not None:
            norm = "input_layernorm.weight"
            rows.append(Weight.same(hf + norm, mc + norm, self.hidden_size))
            rows += self.state_rows(layer) if kind.has_state else self.attention_rows(layer)
        if kind.feed_forward is None:
            return rows
        between = hf + "post_attention_layernorm.weight"
        rows.append(Weight.same(between, mc + "pre_mlp_layernorm.weight", self.hidden_size))
        if kind.feed_forward == "moe":
            return rows + self._expert_rows(layer)
        return rows + self._mlp_rows(layer, "mlp", self.intermediate_size)

    @abstractmethod
    def attention_rows(self, layer: int) -> list[Weight]:
        """Rows of a layer's attention."""

    def state_rows(self, layer: int) -> list[Weight]:
        """Rows of a layer's mixer that carries a state."""
        raise NotImplementedError(f"{type(self).__name__}.state_rows: layer {layer} has no state")

    def _mlp_rows(
        self, layer: int, name: str, width: int, expert: int | None = None
    ) -> list[Weight]:
        return mlp_rows(layer, name, self.hidden_size, width, self.mlp_matrices == 3, expert)

    def _expert_rows(self, layer: int) -> list[Weight]:
        """Rows of routed experts, their router, and the shared expert."""
        hf = f"model.layers.{layer}.mlp."
        mc = f"decoder.layers.{layer}.mlp."
        router = mc + "router.weight"
        rows = [Weight.same(hf + "gate.weight", router, self.num_experts, self.hidden_size)]
        if self.has_router_bias:
            # next to the router's weight: engines need both before they can use either
            bias = hf + "gate.e_score_correction_bias"
            rows.append(
                Weight.same(bias, mc + "router.expert_bias", self.num_experts, float32=True)
            )
        for expert in range(self.num_experts):
            rows += self._mlp_rows(
                layer, f"mlp.experts.{expert}", self.moe_intermediate_size, expert
            )
        if not self.shared_expert_width:
            return rows
        rows += self._mlp_rows(layer, "mlp.shared_experts", self.shared_expert_width)
        if self.has_shared_expert_gate:
            gate = mc + "shared_experts.gate_weight"
            rows.append(Weight.same(hf + "shared_expert_gate.weight", gate, 1, self.hidden_size))
        return rows

    def _mtp_rows(self, depth: int) -> list[Weight]:
        """Rows of an MTP layer other than those of its decoder layer."""
        hf = f"model.layers.{self.num_hidden_layers + depth}."
        mc = f"mtp.layers.{depth}."
        hidden = self.hidden_size
        return [
            Weight.same(hf + "enorm.weight", mc + "enorm.weight", hidden),
            Weight.same(hf + "hnorm.weight", mc + "hnorm.weight", hidden),
            Weight.rows(hf + "eh_proj.weight", mc + "eh_proj.weight", hidden, 2 * hidden),
            Weight.same(hf + "shared_head.norm.weight", mc + "final_layernorm.weight", hidden),
        ]


class Sparse(ModelSizes):
    """A model some of whose layers have routed experts."""

    num_experts: Positive = Field()
    topk: Positive = Field(alias="num_experts_per_tok")
    moe_intermediate_size: Positive = Field()
    scoring_func: str | None = None

    router_scores: ClassVar[str] = "softmax"
    """The function by which routers score experts."""

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if self.scoring_func not in (None, self.router_scores):
            found.append(
                f"scoring_func is {self.scoring_func}; its routers score experts by "
                f"{self.router_scores}"
            )
        return found

    def megatron_config(self) -> dict[str, Any]:
        config = super().megatron_config()
        if not self.router_layers:
            return config
        return config | {"moe_router_score_function": self.router_scores}
