"""Steps of the local backend in any process: the class of the optimizer, the bits it leaves."""

import hashlib

from pyrl_ext.megatron.optimizer import name_of
from pyrl_ext.schedule import plan_microbatches
from tests.helpers import passes
from tests.helpers.tiny import random_batch, tiny_plan


def step_digest() -> str:
    """The optimizer's class, and a digest of bfloat16 weights and gradient norms of two steps."""
    batch = random_batch(9)
    schedule = plan_microbatches(batch.seqlens, 1, 64)
    plan = tiny_plan("model.dtype=bfloat16", "optimizer.clip_grad=0.5", "optimizer.lr=1e-2")
    digest = hashlib.sha256()
    with passes.built(plan) as policy:
        for _ in range(2):
            _, metrics = passes.step(policy, batch, schedule)
            digest.update(str(metrics["grad_norm"]).encode())
        for _, tensor in policy.weights():
            digest.update(tensor.float().numpy().tobytes())
        return f"{name_of(policy.llm.optimizer)} {digest.hexdigest()}"
