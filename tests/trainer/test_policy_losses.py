"""Losses of an update: the MTP loss is a mean over depths; what is not finite is refused."""

from dataclasses import replace

import pytest
import torch

from benchmarks.end_to_end import loss_tokens
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.schedule import plan_microbatches
from tests.helpers import passes
from tests.helpers.tiny import random_batch, tiny_plan
from tests.parity import batches, compiled

pytestmark = pytest.mark.multiprocess


def test_accumulate_averages_the_mtp_loss_over_depths(tmp_path):
    """The last depth's final norm sees its own loss alone: ``mtp_coef / depths`` of its mean."""
    plan = compiled("glm mtp 2", tmp_path)
    batch = batches(plan, mtp_routes=True)[0]
    batch = replace(batch, old_logprobs=torch.zeros(len(batch.tokens)))
    schedule = plan_microbatches(batch.seqlens, 1, 128)
    tokens = [int(loss_tokens(batch, depth).sum()) for depth in (1, 2)]
    with passes.built(plan) as policy:
        loss = build_loss(plan.objective)
        (norm,) = (
            p for n, p in policy.llm.chunks[0].named_parameters() if "1.final_layernorm" in n
        )
        passes.accumulate(policy, batch, schedule, loss)
        grad = dict(policy.gradients())["model.layers.5.shared_head.norm.weight"].clone()
        sums = []
        step = 0.05 * grad / grad.norm()
        for moved in (step, -step):
            policy.llm.load_initial_weights()  # the pass before moved the routers' bias
            with torch.no_grad():
                norm += moved
            sums.append(passes.accumulate(policy, batch, schedule, loss)["mtp_loss"] * sum(tokens))
    slope = (sums[0] - sums[1]) / 0.1 / tokens[1]  # of the mean of depth 2
    assert grad.norm().item() == pytest.approx(plan.objective.mtp_coef / 2 * slope, rel=0.02)


def tiny_update(loss):
    """An update of the tiny model with ``loss``; (error, whether weights moved, finished ones)."""
    plan = tiny_plan()
    batch = random_batch(6)
    batch = replace(batch, old_logprobs=torch.zeros(len(batch.tokens)))
    with passes.built(plan) as policy:
        before = {name: tensor.clone() for name, tensor in policy.weights()}
        with pytest.raises(FloatingPointError) as error:
            passes.update(policy, batch, plan_microbatches(batch.seqlens, 1, 128), loss)
        moved = [n for n, t in policy.weights() if not torch.equal(t, before[n])]
        return str(error.value), moved, policy.updates


def total_of(logprobs, inputs):
    return torch.where(inputs.loss_mask, logprobs, 0).sum()  # other rows are not scored


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_update_refuses_a_loss_that_is_not_finite(value):
    def loss(logprobs, entropy, inputs):
        return total_of(logprobs, inputs) * value, inputs.loss_mask.sum(), {}

    message, moved, updates = tiny_update(loss)
    assert "the loss of update 0 is " in message
    # the routers' selection bias is moved by counts, in the backward pass
    assert not [name for name in moved if not name.endswith("e_score_correction_bias")]
    assert updates == 0


def test_update_refuses_a_gradient_norm_that_is_not_finite():
    def loss(logprobs, entropy, inputs):
        logprobs.register_hook(lambda grad: grad * float("nan"))
        return total_of(logprobs, inputs), inputs.loss_mask.sum(), {}

    message, _, updates = tiny_update(loss)
    assert "the gradient norm of update 0 is nan" in message
    assert updates == 0
