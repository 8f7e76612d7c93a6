"""Bytes that a forward pass keeps for the backward pass, and what kernels hold beside them.

Counted are the tensors that autograd saves on the local backend, for one row of the rank's packed
microbatch: what sequence parallelism splits is divided by tp, as are heads and widths; routed
experts are taken as evenly used. Norms and attention save other tensors on a CPU than on a GPU.
What transformer-engine fuses is counted as if it were not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pyrl_ext.plan.forecast.flops import head_widths
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.plan import Plan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Heads(NamedTuple):
    """What attention makes of a row on a rank, in elements."""

    query: int
    key: int
    value: int
    output: int
    number: int
    """Of query heads."""
    rotary: int
    """Rotated elements of one head."""


class Layer(NamedTuple):
    """Bytes a row that a decoder layer saves when nothing is recomputed, by part."""

    norms: float
    """Before attention and before the feed-forward part."""
    projections: float
    """Inputs of attention's products, its inner norms and the rotary angles."""
    core: float
    """What core attention saves,"""
    core_inputs: float
    """and query, key and value as they enter it: kept where it is recomputed."""
    feed_forward: float
    """With its input,"""
    feed_forward_input: float
    """which is kept where it is recomputed."""

    @property
    def whole(self) -> float:
        return self.norms + self.projections + self.core + self.feed_forward


def is_latent(sizes: Any) -> bool:
    """Whether keys and values are compressed (multi-latent attention)."""
    return getattr(sizes, "kv_lora_rank", None) is not None


def heads_of(plan: Plan) -> Heads:
    """The part of a tensor-parallel rank."""
    sizes: Any = plan.sizes
    tp = plan.parallel.tp
    count = -(-sizes.num_attention_heads // tp)
    width, value = head_widths(sizes)
    if is_latent(sizes):
        both, value = count * width, count * value
        return Heads(both, both, value, value, count, sizes.qk_rope_head_dim)
    shared = width * max(1, (sizes.query_groups or sizes.num_attention_heads) // tp)
    return Heads(count * width, shared, shared, count * width, count, width)


def layer(plan: Plan, sparse: bool) -> Layer:
    """What a decoder layer, with experts or without, saves when nothing is recomputed."""
    sizes, tp, each = plan.sizes, plan.parallel.tp, DTYPE_BYTES[plan.model.dtype]
    heads = heads_of(plan)
    projections = (each * sizes.hidden_size + _latent_inputs(plan)) / tp
    projections += _norms_of_heads(plan, heads)
    projections += each * (4 * heads.rotary + heads.output)  # angles; input of the last product
    feed_forward_input = each * sizes.hidden_size / tp
    feed_forward = _experts(plan) if sparse else _gated(plan, sizes.intermediate_size)
    return Layer(
        norms=2 * _norm(plan, sizes.hidden_size) / tp,
        projections=projections,
        core=_core(plan, heads),
        core_inputs=each * (heads.query + heads.key + _own_value(plan, heads)),
        feed_forward=feed_forward_input + feed_forward,
        feed_forward_input=feed_forward_input,
    )


def _norm(plan: Plan, width: int, input_width: int | None = None) -> int:
    """On a GPU the input; on a CPU a float32 one and, normalized, another. ``input_width``: of the
    tensor that the input is a part of."""
    each = DTYPE_BYTES[plan.model.dtype]
    kept = input_width or width
    if plan.device == "cuda":
        return each * kept + 4
    return 4 * (kept if each == 4 else width) + 4 * width + 4


def _latent_inputs(plan: Plan) -> int:
    """The compressed query and key/value: their norms, and what comes out of them."""
    sizes: Any = plan.sizes
    if not is_latent(sizes):
        return 0
    each, rank = DTYPE_BYTES[plan.model.dtype], sizes.kv_lora_rank
    kept = _norm(plan, rank, rank + sizes.qk_rope_head_dim) + each * rank
    if sizes.q_lora_rank:
        kept += _norm(plan, sizes.q_lora_rank) + each * sizes.q_lora_rank
    return kept


def _norms_of_heads(plan: Plan, heads: Heads) -> int:
    """Where queries and keys are normalized head by head."""
    if is_latent(plan.sizes):
        return 0
    every = heads.query + heads.key + heads.value  # one product makes them
    each_head = 4 * (heads.number + heads.number * heads.key // heads.query - 2)
    return _norm(plan, heads.query) + _norm(plan, heads.key, every) + each_head


def _own_value(plan: Plan, heads: Heads) -> int:
    """Elements that are saved for the values as they enter core attention. Grouped queries, keys
    and values are parts of one product, which the norm of the keys may have saved already."""
    if is_latent(plan.sizes):
        return heads.value
    saved = plan.device == "cuda" or plan.model.dtype == "float32"
    return 0 if saved else heads.query + heads.key + heads.value


def takes_equal_shapes(plan: Plan) -> bool:
    """Whether core attention copies sequences of equal shape together; else it is packed."""
    return plan.device == "cpu" or plan.model.dtype == "float32"


def _core(plan: Plan, heads: Heads) -> float:
    """Queries, keys, values and output as the kernel takes them, and the logarithms of its sums."""
    each, cp = DTYPE_BYTES[plan.model.dtype], plan.parallel.dynamic_cp or plan.parallel.cp
    # rank r of cp holds the zigzag chunks r and 2 cp - 1 - r of a sequence, which see r + 1 and
    # 2 cp - r chunks of keys: (2 cp + 1) / 2 times its own rows
    seen = 1 if cp == 1 else cp + 0.5
    value = max(heads.key, heads.value)  # a narrower value is padded
    if not takes_equal_shapes(plan) and cp == 1 and not is_latent(plan.sizes):
        value = _own_value(plan, heads)
    kept = each * (heads.query + seen * (heads.key + value)) + 4 * heads.number
    if takes_equal_shapes(plan):
        return kept + each * max(heads.query, heads.output) + 8  # 8: the way back to packed rows
    # packed rows go on as they are, but for the padding
    return kept + each * heads.query * (heads.query != heads.output)


def _gated(plan: Plan, width: int) -> float:
    """Gate and up, the activated gate, up again, and their product."""
    return 5 * DTYPE_BYTES[plan.model.dtype] * width / plan.parallel.tp


def dispatched(plan: Plan) -> float:
    """Rows that a rank's experts compute for each row of its microbatch, evenly used."""
    return plan.sizes.topk * plan.parallel.etp_size / plan.parallel.tp


def _experts(plan: Plan) -> float:
    """Router and dispatch of a row, its copies for routed experts, and the shared expert."""
    sizes, parallel = plan.sizes, plan.parallel
    each, experts = DTYPE_BYTES[plan.model.dtype], sizes.num_experts
    # scores, the order of all pairs of row and expert, the chosen pairs; a router that chooses for
    # itself saves its scores, their sum, what it divides and what it scatters
    router = (4 if plan.replay.train else 16) * experts + 8 * experts + 8 * sizes.topk
    width = sizes.moe_intermediate_size / parallel.etp_size
    row = each * (sizes.hidden_size + 6 * width) + 4
    shared = _gated(plan, sizes.shared_expert_width)
    return router / parallel.tp + dispatched(plan) * row + shared


# A chunk, a stage -------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Bytes a row of a model chunk."""

    kept: float
    """From the forward pass to the backward pass."""
    again: float
    """Recomputed in the backward pass, of one layer at a time."""
    offloaded: float
    """Of ``kept``, what waits in host memory."""


def chunk_activations(plan: Plan, chunk: ModelChunk) -> Kept:
    """What one microbatch leaves in a model chunk, under the plan's recompute choice."""
    hidden, tp = plan.sizes.hidden_size, plan.parallel.tp
    each = DTYPE_BYTES[plan.model.dtype]
    sparse = [i in plan.router_layers for i in chunk.layers]
    sparse += [bool(plan.router_layers)] * chunk.mtp
    split = [_recomputed(plan, layer(plan, kind), kind) for kind in sparse]
    kept = sum(part for part, _ in split)
    # of multi-token prediction: two norms, the joined input of a product, a last norm
    kept += chunk.mtp * (3 * _norm(plan, hidden) + 2 * each * hidden) / tp
    head = 0.0
    if chunk.loss:  # the final norm, and the hidden states of every depth as the head reads them
        head = (_norm(plan, hidden) + (1 + plan.num_mtp_layers) * each * hidden) / tp
    if plan.parallel.pp > 1:  # both ends of the chunk, which the schedule holds as well
        kept += 2 * each * hidden / tp
    offloaded = sum(part for part, _ in split[: plan.model.offload_layers])
    again = max((part for _, part in split), default=0) - head  # the head's are gone by then
    return Kept(kept + head, max(again, 0), offloaded)


def _recomputed(plan: Plan, saved: Layer, sparse: bool) -> tuple[float, float]:
    """(kept, made again in the backward pass) of a layer."""
    if plan.model.recompute == "none":
        return saved.whole, 0
    if plan.model.recompute == "full":
        each = DTYPE_BYTES[plan.model.dtype]
        entering = each * plan.sizes.hidden_size / plan.parallel.tp
        shared = plan.device == "cuda" or each == 4  # the first norm saves it as it is
        return entering, saved.whole - entering * shared
    # selective: core attention and experts, each from its inputs
    core = saved.core if takes_equal_shapes(plan) else saved.core - saved.core_inputs
    experts = saved.feed_forward - saved.feed_forward_input if sparse else 0
    kept = saved.whole - saved.core + saved.core_inputs - experts
    return kept, max(core, experts)


def in_flight(plan: Plan, stage: int) -> tuple[int, ...]:
    """Forward passes of each chunk of a pipeline stage whose backward pass has not come, at most.

    megatron's schedules: with one chunk the warm-up of pp - 1 - stage microbatches and one more;
    interleaved, (pp - 1 - stage) * 2 + (vpp - 1) * pp chunks and one more, pp microbatches of a
    chunk at a time.
    """
    pp, vpp = plan.parallel.pp, plan.parallel.vpp_size
    most = -(-plan.samples_per_minibatch // plan.parallel.dp)
    if vpp == 1:
        return (min(pp - stage, most),)
    warm_up = (pp - 1 - stage) * 2 + (vpp - 1) * pp
    held = min(warm_up + 1, -(-most // pp) * pp * vpp)
    order = [number % (pp * vpp) // pp for number in range(held)]
    return tuple(order.count(chunk) for chunk in range(vpp))


def stage_activations(plan: Plan, stage: int) -> Kept:
    """Bytes a row of all that a pipeline stage holds at once."""
    chunks: Sequence[ModelChunk] = plan.stages[stage]
    parts = [chunk_activations(plan, chunk) for chunk in chunks]
    counts = in_flight(plan, stage)
    return Kept(
        sum(n * part.kept for n, part in zip(counts, parts, strict=True)),
        max(part.again for part in parts),
        sum(n * part.offloaded for n, part in zip(counts, parts, strict=True)),
    )


def attention_scratch(plan: Plan) -> float:
    """Bytes a row that the backward pass of core attention holds for a while: gradients, on a GPU
    with a float32 sum for the queries, elsewhere with a copy in the order of shapes."""
    heads, each = heads_of(plan), DTYPE_BYTES[plan.model.dtype]
    gradients = each * (heads.query + heads.key + max(heads.key, heads.value))
    return 2 * gradients if takes_equal_shapes(plan) else gradients + 4 * heads.query


def dispatch_scratch(plan: Plan) -> float:
    """Bytes a row of the copies between router and experts that nobody saves: the experts' output,
    sorted by expert and by the rank it came from, and its gradient."""
    each = DTYPE_BYTES[plan.model.dtype]
    return 3 * each * plan.sizes.hidden_size * dispatched(plan) if plan.router_layers else 0
