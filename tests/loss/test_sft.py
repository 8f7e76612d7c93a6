"""The loss of fine-tuning against torch's cross entropy in double precision."""

from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.plan.schema.objective import Objective
from tests.helpers.objective import loss_case


def test_sft_loss_equals_torch_cross_entropy_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (40,), generator=generator)
    _, _, fields = loss_case()
    mask = fields.loss_mask
    assert 0 < mask.sum() < 40
    every = logits.log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    logprobs = every.gather(-1, targets[:, None])[:, 0]
    loss, count, sums = build_loss(Objective(loss="sft"))(logprobs, entropy, fields)
    labels = torch.where(mask, targets, -100)
    wanted = cross_entropy(logits, labels, reduction="mean", ignore_index=-100)
    torch.testing.assert_close(loss / count, wanted, rtol=1e-14, atol=0)
    (found,) = torch.autograd.grad(loss / count, logits, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, logits)[0])
    assert int(count) == int(mask.sum()) and count.dtype == torch.int64
    assert sums.keys() == {"loss", "policy/entropy"}
    for name, mean in (("loss", wanted), ("policy/entropy", entropy[mask].mean())):
        torch.testing.assert_close(sums[name][0] / sums[name][1], mean.detach())


def test_sft_loss_ignores_rows_outside_the_mask():
    logprobs, _, fields = loss_case()
    spoilt = torch.where(fields.loss_mask, logprobs, torch.nan).requires_grad_()
    loss, _, sums = build_loss(Objective(loss="sft"))(spoilt, None, fields)
    assert float(loss.detach()) == -float(logprobs[fields.loss_mask].sum())
    assert sums.keys() == {"loss"}
    loss.backward()
    assert spoilt.grad is not None
    assert spoilt.grad.tolist() == (-fields.loss_mask.double()).tolist()
    nothing = replace(fields, loss_mask=torch.zeros_like(fields.loss_mask))
    loss, count, _ = build_loss(Objective(loss="sft"))(spoilt, None, nothing)
    assert float(loss.detach()) == int(count) == 0
