"""A publish: buckets in which tensors are gathered, and what crosses to other ranks."""

from __future__ import annotations

from collections.abc import Iterator

from pyrl_ext.plan.forecast.compute_time import Spent
from pyrl_ext.plan.forecast.encoder import encoder_parameters
from pyrl_ext.plan.forecast.hardware import BROADCAST, TCP, Gpu
from pyrl_ext.plan.forecast.lora import published_numbers
from pyrl_ext.plan.forecast.parts import reached
from pyrl_ext.plan.forecast.units import DTYPE_BYTES, duration
from pyrl_ext.plan.model.counts import layers, parameters
from pyrl_ext.plan.plan import Plan


def engine_costs(plan: Plan, gpu: Gpu, gathering: float) -> Iterator[Spent]:
    """`rollout.senders` ranks send the weights to all remote engines, which then load them.

    Args:
        gathering: seconds in which a sender gathers its part; it sends a bucket meanwhile
    """
    total = published_numbers(plan) + encoder_parameters(plan)
    senders = plan.rollout.senders
    whole = total * DTYPE_BYTES[plan.model.dtype]
    engines = plan.num_engines
    at_once = min(BROADCAST, gpu.network)
    if plan.rollout.transport == "broadcast":
        sent = whole
        seconds = whole / at_once
        how = f"at once by NCCL, beside gathering; {at_once / 1e9:g} GB/s, assumed"
    else:
        sent = whole / senders * engines
        rate = min(TCP, gpu.network)
        # an engine takes from all of them at once, by the one adapter that its address has
        seconds = max(sent / rate, whole / gpu.network)
        how = (
            f"by TCP, beside gathering; {rate / 1e9:g} GB/s"
            f" of one process, assumed (NCCL would broadcast them in {duration(whole / at_once)})"
        )
    why = (
        f"from {'one rank' if senders == 1 else f'each of {senders} ranks'} to "
        f"{'one engine' if engines == 1 else f'{engines} engines'}, {how}"
    )
    yield Spent("send weights", sent, "byte", max(0.0, seconds - gathering), why)
    taken = total * DTYPE_BYTES[plan.rollout_dtype] / plan.rollout.tp
    rate, why = reached("host", gpu.host, "byte")
    yield Spent.at("load weights", taken, "byte", rate, f"from the engine's host; {why}")


def gathered(plan: Plan) -> tuple[int, int, int]:
    """Bytes of the largest tensor, of a layer's experts, and of the bucket that holds either."""
    sizes = plan.sizes
    each = DTYPE_BYTES[plan.model.dtype]
    largest = each * max(sizes.vocab_size, sizes.intermediate_size) * sizes.hidden_size
    experts = each * max(layer.expert for layer in layers(sizes))
    bucket = max(plan.rollout.bucket_bytes, largest, experts)
    return (
        largest,
        experts,
        min(bucket, each * (parameters(sizes).total + encoder_parameters(plan))),
    )


def uses_buckets(plan: Plan) -> bool:
    """True if a rank of the language model has to put tensors together, or to send them on."""
    sizes = plan.parallel
    split = max(sizes.tp, sizes.pp, sizes.ep, sizes.etp_size) > 1
    return split or len(plan.grids["llm"].ranks) < plan.world_size
