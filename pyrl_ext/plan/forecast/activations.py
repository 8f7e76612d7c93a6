"""Bytes that a forward pass saves for the backward pass, and temporary memory of kernels.

The count is of the tensors that autograd saves on the local backend, for one row of the rank's
packed microbatch: what sequence parallelism splits is divided by tp, as are heads and widths;
routed experts are assumed to be evenly used. Norms and attention save different tensors on a CPU
and on a GPU. What transformer-engine fuses is counted as if it were not fused.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from pyrl_ext.plan.forecast.parameters import adapters
from pyrl_ext.plan.model.attention import Heads, heads_of
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.families.blocks import GroupedQuery, Latent
from pyrl_ext.plan.model.layer_kinds import LayerKind
from pyrl_ext.plan.plan import Plan

# The tensors that linears of a layer read: of its mixer, and of its feed-forward part.
MIXER_INPUTS = frozenset({"attention", "query", "latent", "core"})
ALL_INPUTS = MIXER_INPUTS | {"mlp", "inside mlp", "experts", "inside experts"}


class Layer(NamedTuple):
    """Bytes that a decoder layer saves for a row when nothing is recomputed, by part."""

    norms: float
    """The norms before attention and before the feed-forward part."""
    projections: float
    """Inputs of attention's matrix products, and its inner norms."""
    core: float
    """Core attention."""
    core_inputs: float
    """Query, key and value as they enter core attention: kept if it is recomputed."""
    feed_forward: float
    """The feed-forward part with its input."""
    feed_forward_input: float
    """Its input alone: kept if the feed-forward part is recomputed."""

    @property
    def whole(self) -> float:
        return self.norms + self.projections + self.core + self.feed_forward


def layer(plan: Plan, kind: LayerKind) -> Layer:
    """Bytes that a layer saves when nothing is recomputed."""
    sizes = plan.sizes
    tp = plan.parallel.tp
    width = plan.weight_bytes
    sparse = kind.feed_forward == "moe"
    heads = heads_of(plan)
    # of frozen weights only inputs that adapters read are kept, for the gradients of theirs
    adapting = [*adapters(plan, [kind])]
    read = ALL_INPUTS if plan.lora is None else {linear.input for linear, _ in adapting}
    projections = core = core_inputs = 0.0
    feed_forward = feed_forward_input = 0.0
    for linear, rank in adapting:  # outputs of A, which ranks gather where W is cut by rows
        rows = dispatched(plan) if linear.experts else 1 if linear.cut == "rows" else 1 / tp
        if linear.input in MIXER_INPUTS:
            projections += rows * width * rank
        else:
            feed_forward += rows * width * rank
    if kind.mixer is not None:
        projections += width * sizes.hidden_size * ("attention" in read) / tp
    if kind.mixer == "attention":
        projections += _latent_inputs(plan, read) / tp + _norms_of_heads(plan, heads)
        # the gate, and what it multiplies
        projections += width * heads.output * (("core" in read) + 2 * sizes.has_output_gate)
        core = _core(plan, heads)
        core_inputs = width * (heads.query + _own_keys(plan, heads))
    elif kind.has_state:
        projections += _state_elements(plan, outputs=2) * width
    if kind.feed_forward is not None:
        # megatron's routers keep their input, also for a frozen weight
        feed_forward_input = width * sizes.hidden_size * ("mlp" in read or sparse) / tp
        part = _experts(plan, read) if sparse else _mlp(plan, sizes.intermediate_size, read)
        feed_forward += part
    return Layer(
        norms=kind.blocks * _norm(plan, sizes.hidden_size) / tp,
        projections=projections,
        core=core,
        core_inputs=core_inputs,
        feed_forward=feed_forward_input + feed_forward,
        feed_forward_input=feed_forward_input,
    )


def _state_elements(plan: Plan, outputs: int) -> float:
    """Elements of a row in a mixer that carries a state: the input projection's and the
    convolution's outputs, and `outputs` times the scan's."""
    mixer = plan.sizes.state_mixer
    if mixer is None:
        return 0.0
    return (mixer.inputs + mixer.convolved + outputs * mixer.inner) / plan.parallel.tp


def _norm(plan: Plan, width: int) -> int:
    """A norm saves its input, or the tensor `width` wide that this is a slice of, and a float32
    number a row."""
    return plan.weight_bytes * width + 4


def _latent_inputs(plan: Plan, read: Set[str]) -> int:
    """The compressed query and key/value: their norms, and the outputs of these, except for latents
    that other ranks gather."""
    sizes = plan.sizes
    if not isinstance(sizes, Latent):
        return 0
    width = plan.weight_bytes
    rank = sizes.kv_lora_rank
    kept = _norm(plan, rank + sizes.qk_rope_head_dim)
    kept += width * rank * ("latent" in read and not plan.gathers_latents)
    if sizes.q_lora_rank:
        kept += _norm(plan, sizes.q_lora_rank) + width * sizes.q_lora_rank * ("query" in read)
    return kept


def _own_keys(plan: Plan, heads: Heads) -> float:
    """Elements of keys and values as they enter core attention."""
    if isinstance(plan.sizes, Latent) and plan.gathers_latents:
        return (plan.sizes.kv_lora_rank + plan.sizes.qk_rope_head_dim) / plan.parallel.tp
    return heads.key + _own_value(plan, heads)


def _norms_of_heads(plan: Plan, heads: Heads) -> int:
    """The norms of queries and keys, head by head or over all heads."""
    sizes = plan.sizes
    every = heads.query + heads.key + heads.value  # one product makes them
    if sizes.normalizes_all_heads:  # of copies; what saves the values keeps the product for them
        product = _saves_values_in_place(plan) or "core_attn" in plan.recomputed_modules
        kept = plan.weight_bytes * every if product else 0
        return kept + _norm(plan, heads.query) + _norm(plan, heads.key)
    if not (isinstance(sizes, GroupedQuery) and sizes.has_qk_norm):
        return 0
    more_heads = 4 * (heads.number + heads.number * heads.key // heads.query - 2)
    return _norm(plan, heads.query) + _norm(plan, every) + more_heads


def _own_value(plan: Plan, heads: Heads) -> int:
    """Elements that are saved for the values as they enter core attention. Grouped queries, keys
    and values are slices of one product, which the norm of the keys has saved already."""
    return heads.value if isinstance(plan.sizes, Latent) else 0


def takes_equal_shapes(plan: Plan) -> bool:
    """True if core attention batches sequences of equal length; otherwise it runs packed (thd)."""
    return plan.device == "cpu" or plan.model.dtype == "float32"


def _saves_values_in_place(plan: Plan) -> bool:
    """True if core attention reads values in the product that made them, without a copy."""
    cp = plan.parallel.dynamic_cp or plan.parallel.cp
    return not takes_equal_shapes(plan) and cp == 1 and not isinstance(plan.sizes, Latent)


def _core(plan: Plan, heads: Heads) -> float:
    """Queries, keys, values and output as the kernel reads them, its log-sum-exps, and gathered
    latents from which keys are made."""
    width = plan.weight_bytes
    cp = plan.parallel.dynamic_cp or plan.parallel.cp
    # rank r of cp holds the zigzag chunks r and 2 cp - 1 - r of a sequence, which see r + 1 and
    # 2 cp - r chunks of keys: (2 cp + 1) / 2 times its own rows
    seen = 1 if cp == 1 else cp + 0.5
    value = max(heads.key, heads.value)  # a narrower value is padded
    if _saves_values_in_place(plan):
        value = _own_value(plan, heads)
    kept = width * (heads.query + seen * (heads.key + value)) + 4 * heads.number
    if takes_equal_shapes(plan):
        kept += width * max(heads.query, heads.output) + 8  # 8: index back to packed rows
    else:  # packed rows need no index; only padding of the values is copied
        kept += width * heads.query * (heads.query != heads.output)
    if isinstance(plan.sizes, Latent) and plan.gathers_latents:
        kept += width * plan.sizes.kv_lora_rank * cp / plan.parallel.tp
    return kept


def _mlp(plan: Plan, width: int, read: Set[str]) -> float:
    """An MLP saves up, with a gate that too, and what of them enters the last product."""
    saved = plan.sizes.mlp_matrices - 1 + ("inside mlp" in read)
    return saved * plan.weight_bytes * width / plan.parallel.tp


def dispatched(plan: Plan) -> float:
    """Rows that a rank's experts compute for each row of its microbatch, evenly used."""
    return plan.sizes.topk * plan.parallel.etp_size / plan.parallel.tp


def _inside_experts(plan: Plan) -> float:
    """Bytes of a row of the input of an expert's last product."""
    return plan.weight_bytes * plan.sizes.moe_intermediate_size / plan.parallel.etp_size


def _experts(plan: Plan, read: Set[str]) -> float:
    """Router and dispatch of a row, its copies for the routed experts, and the shared expert."""
    sizes = plan.sizes
    # scores and probabilities; of the chosen pairs the row, its place among the row's and in the
    # map, and where a row's begin; the pairs themselves, unless they are replayed
    router = 8 * sizes.num_experts + 24 * sizes.topk + 8 + 8 * sizes.topk * (not plan.replay.train)
    width = sizes.moe_intermediate_size / plan.parallel.etp_size
    saved = sizes.mlp_matrices - 1 + ("inside experts" in read)
    elements = sizes.hidden_size * ("experts" in read) + saved * width
    row = plan.weight_bytes * elements + 4
    shared = _mlp(plan, sizes.shared_expert_width, read)
    return router / plan.parallel.tp + dispatched(plan) * row + shared


# A chunk, a stage -------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Bytes for a row."""

    kept: float
    """Held from the forward pass to the backward pass."""
    again: float
    """Recomputed in the backward pass, one layer at a time."""


def chunk_activations(plan: Plan, chunk: ModelChunk) -> Kept:
    """The tensors that one microbatch saves in a model chunk, under the plan's recompute choice."""
    hidden = plan.sizes.hidden_size
    tp = plan.parallel.tp
    width = plan.weight_bytes
    split = [_recomputed(plan, layer(plan, kind), kind) for kind in plan.sizes.kinds_in(chunk)]
    kept = sum(part.kept for part in split)
    # an MTP layer adds two norms, the concatenated input of a projection, and a last norm
    joined = 2 * width * hidden * (plan.lora is None)
    kept += chunk.mtp * (3 * _norm(plan, hidden) + joined) / tp
    head = 0.0
    if chunk.loss:  # the final norm, and the hidden states of every depth as the head reads them
        head = (_norm(plan, hidden) + (1 + plan.num_mtp_layers) * width * hidden) / tp
    if plan.parallel.pp > 1:  # the pipeline schedule also holds the chunk's output; its input is
        kept += width * hidden / tp  # what the first norm has saved
    again = max((part.again for part in split), default=0) - head  # the head's are freed by then
    return Kept(kept + head, max(again, 0))


def _recomputed(plan: Plan, saved: Layer, kind: LayerKind) -> Kept:
    """The plan's recompute choice for one layer."""
    if plan.model.recompute == "none":
        return Kept(saved.whole, 0)
    if plan.model.recompute == "full":
        entering = plan.weight_bytes * plan.sizes.hidden_size / plan.parallel.tp
        return Kept(entering, saved.whole - entering)  # the first norm saves the same tensor
    modules = plan.recomputed_modules
    kept = saved.whole
    core = experts = 0.0  # recomputed
    if "core_attn" in modules:
        kept += saved.core_inputs - saved.core
        core = saved.core
        if core and not takes_equal_shapes(plan):
            core -= saved.core_inputs
    if kind.feed_forward == "moe":
        if "moe" in modules:
            experts = saved.feed_forward - saved.feed_forward_input
        elif "moe_act" in modules:
            experts = dispatched(plan) * _inside_experts(plan)
        kept -= experts
    # core attention is recomputed when the part behind it is done
    behind = saved.norms / 2 + saved.feed_forward - experts
    return Kept(kept, max(core - behind, experts))


def in_flight(plan: Plan, stage: int) -> tuple[int, ...]:
    """Most forward passes of each chunk of a stage that still wait for their backward pass.

    Megatron's schedules: with one chunk the warm-up of pp - 1 - stage microbatches plus one;
    interleaved, (pp - 1 - stage) * 2 + (vpp - 1) * pp passes plus one, pp microbatches of a chunk
    at a time.
    """
    pp = plan.parallel.pp
    vpp = plan.parallel.vpp_size
    most = -(-plan.samples_per_minibatch // plan.parallel.dp)
    if vpp == 1:
        return (min(pp - stage, most),)
    warm_up = (pp - 1 - stage) * 2 + (vpp - 1) * pp
    passes = min(warm_up + 1, -(-most // pp) * pp * vpp)
    order = [number % (pp * vpp) // pp for number in range(passes)]
    return tuple(order.count(chunk) for chunk in range(vpp))


def stage_activations(plan: Plan, stage: int) -> Kept:
    """Bytes for a row of everything that a pipeline stage holds at the same time."""
    parts = [chunk_activations(plan, chunk) for chunk in plan.stages[stage]]
    counts = in_flight(plan, stage)
    angles = 4 * heads_of(plan).rotary  # cosines and sines, which all layers of a pass share
    kept = sum(n * part.kept for n, part in zip(counts, parts, strict=True))
    return Kept(kept + max(counts) * angles, max(part.again for part in parts))


def mixer_scratch(plan: Plan, kinds: Set[LayerKind]) -> float:
    """Temporary bytes for a row in the backward pass of a mixer: gradients; of core attention on a
    GPU also a float32 sum for the queries, elsewhere a second copy ordered by sequence length."""
    width = plan.weight_bytes
    scratch = 0.0
    if any(kind.has_state for kind in kinds):
        scratch = width * _state_elements(plan, outputs=1)
    if any(kind.mixer == "attention" for kind in kinds):
        heads = heads_of(plan)
        gradients = width * (heads.query + heads.key + max(heads.key, heads.value))
        second = gradients if takes_equal_shapes(plan) else 4 * heads.query
        scratch = max(scratch, gradients + second)
    return scratch


def dispatch_scratch(plan: Plan) -> float:
    """Temporary bytes for a row between experts and router: the experts' output sorted by expert,
    the same sorted by the rank it came from, and the gradient."""
    return 3 * plan.weight_bytes * plan.sizes.hidden_size * dispatched(plan)
