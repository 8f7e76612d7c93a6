"""Attention under context parallelism: ranks gather keys and values of all heads, or latents.

Latents are fewer numbers, but every rank then projects the rows of all ranks to keys and values.
Both grow with (cp - 1) / cp, so which is faster does not depend on the size of a group, only on
whether it leaves a node.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pyrl_ext.plan.forecast.attention import head_widths, kv_heads
from pyrl_ext.plan.forecast.hardware import Gpu, gpu_of, group_rate
from pyrl_ext.plan.forecast.measured import using
from pyrl_ext.plan.forecast.parts import Part, Work, computed_again, reached
from pyrl_ext.plan.forecast.units import DTYPE_BYTES, duration
from pyrl_ext.plan.model.families.blocks import Latent
from pyrl_ext.plan.plan import Plan

Way = Literal["latents", "heads"]


class Choice(NamedTuple):
    """How a plan's ranks exchange what attention needs of each other's rows."""

    way: Way
    numbers: dict[Way, int]
    """Elements of a token that a tensor-parallel rank sends in a layer."""
    seconds: dict[Way, float] | None
    """For a row and a layer, forward and backward, on one rank; None: the plan names no GPU."""

    def __str__(self) -> str:
        way, other = self.way, "heads" if self.way == "latents" else "latents"
        said = (
            f"context parallelism gathers {_NAMES[way]}, {self.numbers[way]:,} numbers a token and "
            f"layer, and not {_NAMES[other]} ({self.numbers[other]:,})"
        )
        if self.seconds is None:
            return f"{said}: the fewer of the two, as hardware.gpu is null"
        took, saved = (duration(1e6 * self.seconds[each]) for each in (way, other))
        return f"{said}: {took} and not {saved} for a million rows of a layer, projection included"


_NAMES = {"latents": "latents", "heads": "keys and values of all heads"}


def choose_gather(plan: Plan) -> Choice | None:
    """The faster way by the plan's rates; None: without latents or context parallelism, or where
    transformer-engine's attention exchanges heads."""
    cp = plan.parallel.dynamic_cp or plan.parallel.cp
    if not isinstance(plan.sizes, Latent) or cp == 1 or plan.model.te_attention:
        return None
    sizes, numbers = plan.sizes, dict[Way, int]()
    numbers["latents"] = (sizes.kv_lora_rank + sizes.qk_rope_head_dim) // plan.parallel.tp
    numbers["heads"] = _head_elements(plan)
    if (gpu := gpu_of(plan)) is None:
        return Choice(min(numbers, key=lambda way: numbers[way]), numbers, None)
    seconds = dict.fromkeys(numbers, 0.0)
    for way in numbers:
        for work in ("forward", "backward"):
            with using(None):  # a run, which has no report, chooses by the same numbers
                parts = gather_parts(plan, gpu, cp, work, 1, way)
            seconds[way] += sum(part.row / part.rate for part in parts)
    return Choice(min(seconds, key=lambda way: seconds[way]), numbers, seconds)


def gathers_latents(plan: Plan) -> bool:
    """Whether attention gathers latents under context parallelism."""
    choice = choose_gather(plan)
    return choice is not None and choice.way == "latents"


def gather_parts(
    plan: Plan, gpu: Gpu, cp: int, work: Work, layers: int, way: Way | None = None
) -> list[Part]:
    """Work of `layers` layers, because `cp` ranks share a sequence; None: the way of the plan."""
    if (way or ("latents" if gathers_latents(plan) else "heads")) == "heads":
        return [_sent(plan, gpu, cp, work, layers * _head_elements(plan))]
    sizes, tp = plan.sizes, plan.parallel.tp
    assert isinstance(sizes, Latent)
    both, others = sizes.kv_lora_rank + sizes.qk_rope_head_dim, (cp - 1) / cp
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
