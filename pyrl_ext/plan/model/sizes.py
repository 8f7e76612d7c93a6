"""The sizes that an HF config states, and the parameters that follow from them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.layer_kinds import DENSE, SPARSE, LayerKind, StateMixer
from pyrl_ext.plan.model.route_ids import route_id_bytes
from pyrl_ext.plan.model.towers import Tower


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
    """How much attention is sharpened with the logarithm of `factor`; 0: not."""


class ModelSizes(BaseModel, ABC):
    """The sizes that all families state; ``plan/families/<family>.py`` adds what one of them does.

    Fields keep their HF names where the families agree on one; `key` gives the name a config uses.
    What a checkpoint may leave out has transformers' default.
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
    has_shared_expert_gate: ClassVar[bool] = False
    """True if a number of each token scales the output of the shared expert."""
    rope_types: ClassVar[frozenset[str]] = frozenset({"default"})
    """Rotary embeddings that the trainer builds."""

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
        """How the rotary embedding is scaled to long contexts; default: not."""
        rope = self.rope_parameters or {}
        return rope.get("rope_type", rope.get("type", "default"))

    @property
    def rope_sections(self) -> tuple[int, ...]:
        """Wavelengths that turn with a row's position in time, height and width; (): with one
        position."""
        return tuple((self.rope_parameters or {}).get("mrope_section", ()))

    @property
    def yarn(self) -> Yarn | None:
        """How YaRN stretches the wavelengths; None unless `rope_type` is yarn."""
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


class Sparse(ModelSizes):
    """A model some of whose layers have routed experts."""

    num_experts: Positive = Field()
    topk: Positive = Field(alias="num_experts_per_tok")
    moe_intermediate_size: Positive = Field()


def read_sizes(hf: dict[str, Any]) -> ModelSizes:
    """The sizes in an HF config, or in its ``text_config``. Raises pydantic's `ValidationError`."""
    family = importlib.import_module(f"pyrl_ext.plan.model.families.{hf['model_type']}")
    return family.SIZES.model_validate(hf.get("text_config", {}) | hf)
