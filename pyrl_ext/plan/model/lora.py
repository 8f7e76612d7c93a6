"""The linears of a model that may have adapters, and the sizes of the factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pyrl_ext.plan.model.families.blocks import GroupedQuery, Latent
from pyrl_ext.plan.model.layer_kinds import LayerKind
from pyrl_ext.plan.model.sizes import ModelSizes
from pyrl_ext.plan.schema import Config
from pyrl_ext.plan.schema.lora import ROUTER, Lora


class Linear(NamedTuple):
    """A linear of a checkpoint's layer: y [outputs] = W x [inputs]."""

    name: str
    """Last part of its HF name."""
    inputs: int
    outputs: int
    cut: Literal["rows", "columns", "whole"]
    """Split of W over tensor-parallel ranks."""
    input: str
    """The tensor that it reads, which linears may share."""
    experts: int = 0
    """Number of routed experts that have one each; 0: it is not theirs."""


class FactorShape(NamedTuple):
    """A [rank, inputs] or B [outputs, rank] of a linear's adapter."""

    name: str
    """Such as q_proj.lora_A."""
    numbers: int
    """Numbers in each."""
    cut: bool
    """True if tensor-parallel ranks, of experts expert-tensor-parallel ranks, split it."""
    experts: int
    """Number of routed experts that have one each; 0: one in a layer."""

    @property
    def tensors(self) -> int:
        """Number of of them a layer has."""
        return max(1, self.experts)


def linears(sizes: ModelSizes, kind: LayerKind) -> Iterator[Linear]:
    """The linears of a layer."""
    if kind.mixer == "gated_delta_net":
        yield from _delta_net(sizes)
    elif kind.mixer == "mamba":
        yield from _mamba(sizes)
    elif kind.mixer is not None:
        yield from _latent(sizes) if isinstance(sizes, Latent) else _grouped_query(sizes)
    hidden = sizes.hidden_size
    gated = sizes.mlp_matrices == 3
    if kind.feed_forward == "mlp":
        yield from _mlp(hidden, sizes.intermediate_size, "mlp", gated)
    if kind.feed_forward != "moe":
        return
    yield Linear(ROUTER, hidden, sizes.num_experts, "whole", "mlp")
    gate, up, down = expert_linears(sizes)
    names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    for each in _mlp(hidden, sizes.moe_intermediate_size, "experts", gated, sizes.num_experts):
        yield each._replace(name=names[each.name])
    if width := sizes.shared_expert_width:
        yield from _mlp(hidden, width, "mlp", gated)


def _delta_net(sizes: ModelSizes) -> Iterator[Linear]:
    mixer = sizes.state_mixer
    hidden = sizes.hidden_size
    assert mixer is not None
    both = mixer.vectors  # a beta and a decay of each value head, whose bias and rate these are
    yield Linear("in_proj_qkvz", hidden, mixer.inputs - both, "rows", "attention")
    yield Linear("in_proj_ba", hidden, both, "rows", "attention")
    yield Linear("out_proj", mixer.inner, hidden, "columns", "core")


def _mamba(sizes: ModelSizes) -> Iterator[Linear]:
    mixer = sizes.state_mixer
    hidden = sizes.hidden_size
    assert mixer is not None
    yield Linear("in_proj", hidden, mixer.inputs, "rows", "attention")
    yield Linear("out_proj", mixer.inner, hidden, "columns", "core")


def _grouped_query(sizes: ModelSizes) -> Iterator[Linear]:
    assert isinstance(sizes, GroupedQuery)
    hidden = sizes.hidden_size
    width = sizes.head_width
    heads = sizes.num_attention_heads
    keys = sizes.num_key_value_heads
    numbers = heads * (1 + sizes.has_output_gate), keys, keys
    for letter, number in zip("qkv", numbers, strict=True):
        yield Linear(f"{letter}_proj", hidden, number * width, "rows", "attention")
    yield Linear("o_proj", heads * width, hidden, "columns", "core")


def _latent(sizes: Latent) -> Iterator[Linear]:
    hidden = sizes.hidden_size
    heads = sizes.num_attention_heads
    narrow = sizes.kv_lora_rank
    queries = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
    if sizes.q_lora_rank is None:
        yield Linear("q_proj", hidden, queries, "rows", "attention")
    else:
        yield Linear("q_a_proj", hidden, sizes.q_lora_rank, "whole", "attention")
        yield Linear("q_b_proj", sizes.q_lora_rank, queries, "rows", "query")
    down = narrow + sizes.qk_rope_head_dim
    both = sizes.qk_nope_head_dim + sizes.v_head_dim
    yield Linear("kv_a_proj_with_mqa", hidden, down, "whole", "attention")
    yield Linear("kv_b_proj", narrow, heads * both, "rows", "latent")
    yield Linear("o_proj", heads * sizes.v_head_dim, hidden, "columns", "core")


def _mlp(hidden: int, width: int, read: str, gated: bool, experts: int = 0) -> Iterator[Linear]:
    for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
        yield Linear(name, hidden, width, "rows", read, experts)
    yield Linear("down_proj", width, hidden, "columns", f"inside {read}", experts)


def expert_linears(sizes: ModelSizes) -> tuple[str, str, str]:
    """Last parts of the HF names of a routed expert's gate, up and down."""
    gate, up, down = (sizes.hf_part(f".{kind}_proj.").strip(".") for kind in ("gate", "up", "down"))
    return gate, up, down


def names_of(sizes: ModelSizes) -> tuple[str, ...]:
    """Last parts of the HF names of all linears that may have adapters, the router's last."""
    kinds = dict.fromkeys(sizes.layer_kinds)
    found = dict.fromkeys(each.name for kind in kinds for each in linears(sizes, kind))
    return tuple(sorted(found, key=lambda name: name == ROUTER))


def adapted(sizes: ModelSizes, lora: Lora, kind: LayerKind) -> list[Linear]:
    """The linears of a layer that have adapters."""
    return [each for each in linears(sizes, kind) if lora.adapts(each.name, each.experts > 0)]


def factors(sizes: ModelSizes, lora: Lora, kind: LayerKind) -> Iterator[FactorShape]:
    """The factors of a layer's adapters."""
    for linear in adapted(sizes, lora, kind):
        rank = lora.rank_of(linear.experts > 0)
        experts = linear.experts
        shared = experts > 0 and lora.experts == "shared_outer"
        outer = "B" if linear.cut == "columns" else "A"  # of experts, the one at the hidden size
        for letter, width in (("A", linear.inputs), ("B", linear.outputs)):
            cut = linear.cut != "whole" and letter != outer
            number = 0 if shared and letter == outer else experts
            yield FactorShape(f"{linear.name}.lora_{letter}", rank * width, cut, number)


# adapters in the engine --------------------------------------------------------------------------

# vLLM's largest max_lora_rank
VLLM_MAX_RANK = 512
STATE_LINEARS = "in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj"


def adapter_faults(config: Config, sizes: ModelSizes) -> list[str]:
    """Adapters that the engine would leave out, or has no kernel for, each with the reason."""
    lora = config.lora
    rollout = config.rollout
    if lora is None:
        return []
    found = {each for kind in {*sizes.layer_kinds} for each in adapted(sizes, lora, kind)}
    names = {each.name for each in found}
    on_cpu = config.device == "cpu"
    experts = any(each.experts for each in found)
    states = sorted(names.intersection(STATE_LINEARS))
    remote = bool(rollout.servers or rollout.launch.hosts)
    most = max(lora.rank, lora.rank_of(expert=experts))
    reasons = {f"{ROUTER}: no engine applies adapters to routers": ROUTER in names}
    if rollout.engine == "vllm":
        reasons |= {
            "rollout.servers or launch: requests to vLLM's servers name no adapter": remote,
            "routed experts: vLLM has no kernel for their adapters on a CPU": on_cpu and experts,
            "kv_b_proj: vLLM's latent attention reads weights that it split at load, past the "
            "adapter": not on_cpu and "kv_b_proj" in names,
            f"{', '.join(states)}: vLLM's adapters of layers with states were never compared "
            "with the trainer's": bool(states),
            f"rank {most}: vLLM takes at most {VLLM_MAX_RANK}": most > VLLM_MAX_RANK,
        }
    return [reason for reason, holds in reasons.items() if holds]
