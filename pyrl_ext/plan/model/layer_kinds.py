"""The kinds of a model's layers, and the sizes of mixers that carry a state along the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pyrl_ext.plan.model.chunks import ModelChunk

Mixer = Literal["attention", "gated_delta_net", "mamba"]


class LayerKind(NamedTuple):
    """The blocks of a layer, each with one norm before it and one residual sum behind it."""

    mixer: Mixer | None
    feed_forward: Literal["mlp", "moe"] | None

    @property
    def has_state(self) -> bool:
        """True if its mixer carries a state in place of keys and values."""
        return self.mixer in ("gated_delta_net", "mamba")

    @property
    def blocks(self) -> int:
        return len(self) - self.count(None)


DENSE = LayerKind("attention", "mlp")
SPARSE = LayerKind("attention", "moe")

# The letters of megatron-core's hybrid models, whose layers have one block each
LETTERS = {
    LayerKind("mamba", None): "M",
    LayerKind("attention", None): "*",
    LayerKind(None, "mlp"): "-",
    LayerKind(None, "moe"): "E",
}


@dataclass(frozen=True)
class StateMixer:
    """A mixer that projects its input, convolves along the sequence, and scans it with a state."""

    name: str
    inputs: int
    """Outputs of the input projection."""
    convolved: int
    """Channels of the depthwise convolution."""
    taps: int
    inner: int
    """Inputs of the output projection."""
    norm: int
    """Weights of the gated norm: as many as `inner` are split over tensor-parallel ranks, fewer are
    shared by all heads."""
    vectors: int
    """Numbers of vectors that heads and channels split: biases, decays, time steps, skips."""
    state: int
    """Numbers of a sequence's state."""
    scan: float
    """Multiply-adds of the chunked scan for a row."""
    heads: Mapping[str, int]
    """Name -> heads or groups of heads, which tensor-parallel ranks split."""
    widths: Mapping[str, int]
    """Name -> elements of what its kernels take: a head's keys, values or inputs, its state."""
    copied: str | None = None
    """The name of groups that context-parallel ranks may copy, where they are fewer than ranks."""

    def fits(self, tp: int, cp: int) -> bool:
        """True if tp ranks split its heads, and cp ranks those of each: a rank of a group computes
        whole sequences for a part of the heads."""
        if any(number % tp for number in self.heads.values()):
            return False
        each = {name: number // tp for name, number in self.heads.items()}
        return not any(
            number % cp and not (name == self.copied and cp % number == 0)
            for name, number in each.items()
        )


def gated_delta_net(
    key_heads: int, key: int, value_heads: int, value: int, taps: int, chunk: int
) -> StateMixer:
    """The mixer of Qwen3-Next, whose scan is the chunked delta rule: of keys with keys and with
    queries the triangle of a chunk, its inverse applied to keys and values, and three products
    with the state."""
    keys = key_heads * key
    values = value_heads * value
    half = (chunk + 1) / 2
    scan = 3 * key * value + half * (3 * key + 2 * value) + chunk**2 / 6
    return StateMixer(
        "gated_delta_net",
        inputs=2 * keys + 2 * values + 2 * value_heads,
        convolved=2 * keys + values,
        taps=taps,
        inner=values,
        norm=value,
        vectors=2 * value_heads,
        state=value_heads * key * value,
        scan=value_heads * scan,
        heads={"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads},
        widths={"linear_key_head_dim": key, "linear_value_head_dim": value},
    )


def mamba(heads: int, width: int, groups: int, state: int, taps: int, chunk: int) -> StateMixer:
    """The mixer of Mamba-2, whose scan is the chunked state space dual: the triangle of a chunk for
    each group, the same with the inputs of each head, and two products with the state."""
    inner = heads * width
    both = 2 * groups * state
    half = (chunk + 1) / 2
    return StateMixer(
        "mamba",
        inputs=2 * inner + both + heads,
        convolved=inner + both,
        taps=taps,
        inner=inner,
        norm=inner,
        vectors=3 * heads + inner + both,
        state=inner * state,
        scan=half * (groups * state + inner) + 2 * inner * state,
        heads={"mamba_num_heads": heads, "n_groups": groups},
        widths={"mamba_head_dim": width, "ssm_state_size": state},
        copied="n_groups",
    )


def hybrid_pattern(
    stages: Sequence[Sequence[ModelChunk]], kinds: Sequence[LayerKind]
) -> str | None:
    """megatron-core's pattern of a hybrid model: a letter for each layer, stages in the order of
    execution split by `|`; None: layers of one block are not what the model is made of.

    Args:
        stages: [pp][vpp] of the pipeline
        kinds: of every layer
    """
    if not all(kind in LETTERS for kind in kinds):
        return None
    in_order = [chunk for turn in zip(*stages, strict=True) for chunk in turn]
    return "|".join("".join(LETTERS[kinds[i]] for i in chunk.layers) for chunk in in_order)
