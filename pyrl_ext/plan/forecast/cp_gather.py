"""Work of attention under context parallelism: ranks gather latents, or keys and values."""

from __future__ import annotations

from pyrl_ext.plan.forecast.attention import head_widths, kv_heads
from pyrl_ext.plan.forecast.hardware import Gpu, group_rate
from pyrl_ext.plan.forecast.parts import Part, Work, computed_again, reached
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.model.families.blocks import Latent
from pyrl_ext.plan.plan import Plan


def gather_parts(plan: Plan, gpu: Gpu, cp: int, work: Work, layers: int) -> list[Part]:
    """Work of `layers` layers, because `cp` ranks share a sequence."""
    if not plan.gathers_latents:
        return [_sent(plan, gpu, cp, work, layers * _head_elements(plan))]
    sizes = plan.sizes
    tp = plan.parallel.tp
    assert isinstance(sizes, Latent)
    both = sizes.kv_lora_rank + sizes.qk_rope_head_dim
    others = (cp - 1) / cp
    found = [_sent(plan, gpu, cp, work, layers * both / tp)]
    again = computed_again(plan) if work == "backward" else frozenset()
    if tp > 1:  # rows of the other ranks; the backward pass gathers latents once more
        times = (2 if work == "backward" else 1) + ("attention" in again)
        sent = DTYPE_BYTES[plan.model.dtype] * both * (tp - 1) / tp * others
        rate = reached("ring", group_rate(gpu, plan.hardware.gpus_per_node, tp, 1), "byte")
        found.append(Part("tensor parallel", "byte", *rate, row=layers * times * sent))
    # own rows are among the projections, also where the backward pass recomputes all of these
    heads = sizes.num_attention_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    each = 2 * sizes.kv_lora_rank * heads / tp
    times = (2 if work == "backward" else 1) * others
    if "projections" in again:
        times += others
    elif "attention" in again:  # core attention starts with the latents
        times += 1
    fp8 = plan.model.fp8 is not None
    flops = gpu.flops["fp8" if fp8 else plan.model.dtype]
    rate = reached("fp8" if fp8 else "projections", flops)
    return [*found, Part("latents", "FLOP", *rate, row=layers * times * each)]


def _head_elements(plan: Plan) -> int:
    """Elements of a row's keys and values on a tensor-parallel rank. Values narrower than the keys
    of latent attention are padded."""
    (key, value), tp = head_widths(plan.sizes), plan.parallel.tp
    return kv_heads(plan, tp) * (key + max(key, value))


def _sent(plan: Plan, gpu: Gpu, cp: int, work: Work, elements: float) -> Part:
    """An all-gather forward, and a reduce-scatter backward, of so many elements a row."""
    again = work == "backward" and "context parallel" in computed_again(plan)
    sent = DTYPE_BYTES[plan.model.dtype] * elements * (cp - 1) / cp * (1 + again)
    rate = group_rate(gpu, plan.hardware.gpus_per_node, cp, plan.parallel.tp)
    return Part("context parallel", "byte", *reached("ring", rate, "byte"), row=sent)
