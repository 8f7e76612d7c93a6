"""The optimizer: where its state lives, and its schedule."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule


@rule("optimizer.offload")
def offloading_has_a_device_to_leave_and_copies_that_are_read(plan: Plan) -> Found:
    offload = plan.optimizer.offload
    if offload and plan.device == "cpu":
        return f"{offload:g} with device cpu, expected 0; the state is in host memory already"
    if offload and not plan.optimizer.distributed:
        return (
            f"{offload:g} with optimizer.distributed false, expected 0; only "
            "megatron-core's distributed optimizer hands its master weights to the host, any other "
            "would update copies that nobody reads. Use distributed: true"
        )


@rule("optimizer.warmup_steps")
def warmup_ends(plan: Plan) -> Found:
    updates = plan.steps * plan.batching.minibatches
    if plan.optimizer.warmup_steps > updates:
        return (
            f"{plan.optimizer.warmup_steps}, expected at most {updates}, the optimizer steps of "
            f"the run (steps {plan.steps} * minibatches {plan.batching.minibatches}); lr would not "
            "be reached"
        )
