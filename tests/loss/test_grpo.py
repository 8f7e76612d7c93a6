"""The loss of GRPO against plain Python in double precision, and against NaN."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyrl_ext.loss.grpo import grpo_loss
from pyrl_ext.loss.inputs import LossInputs
from pyrl_ext.loss.registry import build_loss
from tests.helpers.objective import Objective, loss_case

FULL = Objective(kl_coef=0.05, entropy_coef=0.01, tis_cap=1.5)


def loop(logprobs, entropy, f: LossInputs, c) -> tuple[float, int, dict[str, float]]:
    """The definition, a token at a time, in Python floats."""
    total, count, sums = 0.0, 0, dict.fromkeys(NAMES, 0.0)
    for t in range(len(logprobs)):
        if not f.loss_mask[t]:
            continue
        assert f.ref_logprobs is not None
        logp, old, ref = float(logprobs[t]), float(f.old_logprobs[t]), float(f.ref_logprobs[t])
        adv, ent = float(f.advantages[t]), float(entropy[t])
        ratio = math.exp(logp - old)
        clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
        weight = min(math.exp(old - float(f.rollout_logprobs[t])), c.tis_cap)
        policy = -min(ratio * adv, clipped * adv) * weight
        ref_kl = math.exp(ref - logp) - 1 - (ref - logp)
        loss = policy + c.kl_coef * ref_kl - c.entropy_coef * ent
        total, count = total + loss, count + 1
        is_clipped = ratio * adv > clipped * adv
        values = (old - logp, is_clipped, ent, ref_kl, weight, 0.0)
        parts = (policy, c.kl_coef * ref_kl, -c.entropy_coef * ent, loss)
        for name, value in zip(NAMES, values + parts, strict=True):
            sums[name] += value
    return total, count, sums


NAMES = (
    *("policy/ppo_kl", "policy/clip_fraction", "policy/entropy", "policy/ref_kl"),
    *("policy/tis_mean", "policy/guarded_fraction"),
    *("loss/policy", "loss/ref_kl", "loss/entropy", "loss"),
)


@pytest.mark.parametrize("seed", range(4))
def test_grpo_loss_equals_the_loop(seed):
    logprobs, entropy, fields = loss_case(seed=seed)
    c = FULL
    loss, count, sums = build_loss(c)(logprobs, entropy, fields)
    wanted, wanted_count, wanted_sums = loop(logprobs, entropy, fields, c)
    assert loss.dtype == torch.float64 and count.dtype == torch.int64
    assert (float(loss), int(count)) == (pytest.approx(wanted, rel=1e-12), wanted_count)
    assert sums.keys() == wanted_sums.keys()
    for name, (value, n) in sums.items():
        assert float(value) == pytest.approx(wanted_sums[name], rel=1e-12), name
        assert int(n) == wanted_count
    assert 0 < wanted_sums["policy/clip_fraction"] < wanted_count


def test_grpo_loss_leaves_out_parts_that_are_off():
    logprobs, _, fields = loss_case()
    fields = replace(fields, ref_logprobs=None)
    _, _, sums = grpo_loss(logprobs, None, fields, Objective())
    assert sums.keys() == {
        *("policy/ppo_kl", "policy/clip_fraction", "policy/guarded_fraction"),
        *("loss/policy", "loss"),
    }


def test_grpo_loss_measures_the_reference_kl_without_penalty():
    logprobs, entropy, fields = loss_case()
    off, _, sums = grpo_loss(logprobs, entropy, fields, Objective())
    without, _, _ = grpo_loss(logprobs, None, replace(fields, ref_logprobs=None), Objective())
    assert float(off) == float(without)
    wanted = loop(logprobs, entropy, fields, Objective(tis_cap=math.inf))[2]
    assert float(sums["policy/ref_kl"][0]) == pytest.approx(wanted["policy/ref_kl"], rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_grpo_loss_passes_gradcheck(seed):
    logprobs, entropy, fields = loss_case(n=12, seed=seed)
    c = FULL

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return grpo_loss(logprobs, entropy, fields, c)[0]

    inputs = (logprobs.requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


def test_grpo_loss_gives_the_importance_weight_no_gradient():
    logprobs, entropy, fields = loss_case()
    rollout = fields.rollout_logprobs.requires_grad_()
    loss, _, _ = grpo_loss(logprobs.requires_grad_(), entropy, fields, Objective(tis_cap=2.0))
    loss.backward()
    assert rollout.grad is None and logprobs.grad is not None


def test_grpo_loss_caps_the_importance_weight():
    logprobs, entropy, fields = loss_case(scale=2.0)
    for cap in (0.5, 2.0):
        _, count, sums = grpo_loss(logprobs, entropy, fields, Objective(tis_cap=cap))
        weights = (fields.old_logprobs - fields.rollout_logprobs).exp().clamp(max=cap)
        mean = float(sums["policy/tis_mean"][0] / count)
        assert mean == pytest.approx(float(weights[fields.loss_mask].mean()))


@pytest.mark.parametrize("seed", range(5))
def test_grpo_loss_does_not_depend_on_the_split(seed):
    logprobs, entropy, fields = loss_case(n=64, seed=seed)
    loss_fn = build_loss(FULL)
    whole, count, sums = loss_fn(logprobs, entropy, fields)
    cuts = sorted(random.Random(seed).sample(range(1, 64), 5))
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, 64], strict=True):
        rows = slice(start, stop)
        part = LossInputs(*(getattr(fields, name)[rows] for name in LossInputs.__slots__))
        pieces.append(loss_fn(logprobs[rows], entropy[rows], part))
    assert float(sum(p[0] for p in pieces)) == pytest.approx(float(whole), rel=1e-12)
    assert sum(int(p[1]) for p in pieces) == int(count)
    for name, (value, n) in sums.items():
        parts = [p[2][name] for p in pieces]
        assert float(sum(v for v, _ in parts)) == pytest.approx(float(value), rel=1e-12)
        assert sum(int(m) for _, m in parts) == int(n)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_grpo_loss_never_reads_masked_rows(poison):
    logprobs, entropy, fields = loss_case()
    loss_fn = build_loss(FULL)

    def run(logprobs: Tensor, entropy: Tensor, fields: LossInputs):
        leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
        loss, count, sums = loss_fn(*leaves, fields)
        loss.backward()
        return [loss, count, *(x.grad for x in leaves), *(v for v, _ in sums.values())]

    def poisoned(x: Tensor) -> Tensor:
        return x.where(fields.loss_mask, poison)

    assert fields.ref_logprobs is not None
    bad = LossInputs(
        poisoned(fields.old_logprobs),
        poisoned(fields.rollout_logprobs),
        poisoned(fields.ref_logprobs),
        poisoned(fields.advantages),
        fields.loss_mask,
    )
    clean = run(logprobs, entropy, fields)
    for a, b in zip(clean, run(poisoned(logprobs), poisoned(entropy), bad), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


def test_grpo_loss_shows_nan_under_the_mask():
    logprobs, entropy, fields = loss_case()
    logprobs[fields.loss_mask.nonzero()[0]] = math.nan
    loss, _, sums = grpo_loss(logprobs, entropy, fields, Objective())
    assert loss.isnan() and sums["policy/ppo_kl"][0].isnan()


@pytest.mark.parametrize("gap", [25.0, 1e4, -25.0, -1e4])
def test_grpo_loss_clamps_and_counts_huge_ratios(gap):
    """Row 0 has a huge policy ratio, row 1 a huge weight, row 2 a huge reference ratio."""
    zero = torch.zeros(4)
    shift = [torch.eye(4)[row] * gap for row in range(3)]
    fields = LossInputs(-shift[0], -shift[1], shift[2], -torch.ones(4), torch.ones(4) > 0)
    fields = replace(fields, rollout_logprobs=fields.old_logprobs - shift[1])
    logprobs = zero.clone().requires_grad_()
    c = Objective(kl_coef=0.1, tis_cap=3.0)
    loss, _, sums = grpo_loss(logprobs, None, fields, c)
    loss.backward()
    assert int(sums["policy/guarded_fraction"][0]) == 3
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert logprobs.grad[3] == 1  # an ordinary row: -A * ratio
    assert logprobs.grad[0].abs() < 0.1 + 1e-6  # only the reference term is left
    weight = min(3.0, math.exp(math.copysign(20.0, gap)))
    assert logprobs.grad[1] == pytest.approx(weight)
    assert logprobs.grad[2] == 1  # only the policy term is left


def test_grpo_loss_refuses_coefficients_without_inputs():
    logprobs, entropy, fields = loss_case()
    with pytest.raises(ValueError, match=r"kl_coef is 0.1 and ref_logprobs is None"):
        grpo_loss(logprobs, entropy, replace(fields, ref_logprobs=None), Objective(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef is 0.1 and entropy is None"):
        grpo_loss(logprobs, None, fields, Objective(entropy_coef=0.1))
