"""Memory of the ranks of an encoder, item by item."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pyrl_ext.plan.forecast.encoder import Encoder
from pyrl_ext.plan.forecast.items import PASSES, Item, context, state_items
from pyrl_ext.plan.forecast.publishing import gathered
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.phases import MEMORY_PHASES


def encoder_items(encoder: Encoder, stage: int) -> Iterator[Item]:
    """A stage of an encoder: no optimizer state, gradients or saved activations where it is
    frozen. On ranks of the language model, names of the items tell whose they are."""
    plan = encoder.plan
    module = encoder.module
    of = f" of {encoder.name}" if encoder.shared else ""
    count = encoder.on_rank(stage)
    patches = module.patches_per_microbatch
    yield from state_items(plan, count, count * module.train, encoder.stepped(stage), of)
    if module.train:
        each = encoder.activations(stage)
        flying = encoder.in_flight(stage)
        why = f"{patches:,} patches x {each:,.0f} bytes x {flying} microbatches in flight"
        held = math.ceil(patches * each * flying)
        yield Item(f"activations{of}", held, ("update",), why, exact=False)
    why = "as much as one layer saves for its backward pass"
    yield Item(f"forward pass{of}", math.ceil(patches * encoder.saved), PASSES, why, exact=False)
    if stage == 0:
        width = encoder.tower.patch_width
        read = DTYPE_BYTES[plan.model.dtype]
        why = f"{patches:,} patches x {width} numbers in 8 bits, and as they are read"
        yield Item("patches", patches * width * (1 + read), PASSES, why, exact=False)
        share = math.ceil(encoder.step_patches / encoder.parallel.dp)
        why = f"{share:,} of {encoder.step_patches:,.0f} patches (estimate) x {width} bytes"
        phases = MEMORY_PHASES[1:]  # images come with the samples
        yield Item("patches of the batch", share * width, phases, why, exact=False, host=True)
    if plan.has_rollouts and not encoder.shared:
        largest, _, bucket = gathered(plan)
        why = "a bucket, as every rank receives all tensors, and the largest of them; no engine"
        yield Item("publish", bucket + largest, ("publish",), why, exact=False)
    if not encoder.shared:  # else the language model's rank counts them
        yield from context(plan, plan.grids[encoder.name].rank_of(pp=stage))
