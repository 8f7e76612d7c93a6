"""The objective as a loss: splits, masked rows, NaN, huge ratios, missing inputs."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.loss.inputs import LossInputs, Sequences
from pyrl_ext.loss.objective import policy_loss
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.plan.schema.objective import LOSSES, Objective
from tests.helpers.objective import loss_case

FULL = Objective(kl_coef=0.05, entropy_coef=0.01, clip_high=0.28)
COLUMNS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "loss_mask")


def part_of(fields: LossInputs, rows: slice) -> LossInputs:
    return replace(fields, **{name: getattr(fields, name)[rows] for name in COLUMNS})


def test_policy_loss_leaves_out_parts_that_are_off():
    logprobs, _, fields = loss_case()
    fields = replace(fields, ref_logprobs=None)
    _, _, sums = policy_loss(logprobs, None, fields, Objective())
    assert sums.keys() == {
        "policy/ppo_kl",
        "policy/clip_fraction",
        "policy/guarded_fraction",
        "loss/policy",
        "loss",
    }


def test_policy_loss_measures_the_reference_kl_without_penalty():
    logprobs, entropy, fields = loss_case()
    off, _, sums = policy_loss(logprobs, entropy, fields, Objective())
    without, _, _ = policy_loss(logprobs, None, replace(fields, ref_logprobs=None), Objective())
    assert float(off) == float(without)
    assert fields.ref_logprobs is not None
    k = (logprobs - fields.ref_logprobs)[fields.loss_mask]
    assert float(sums["policy/ref_kl"][0]) == pytest.approx(float((torch.expm1(-k) + k).sum()))


def test_policy_loss_counts_clipped_tokens_of_each_age():
    logprobs, _, fields = loss_case(n=300, scale=1.0)
    age = torch.arange(300) % 3
    ages = age[:, None] == torch.arange(4)
    loss, _, sums = policy_loss(logprobs, None, replace(fields, ages=ages), Objective())
    assert loss == policy_loss(logprobs, None, fields, Objective())[0]
    for each in range(4):
        alone = replace(fields, loss_mask=fields.loss_mask & (age == each))
        expected = policy_loss(logprobs, None, alone, Objective())[2]["policy/clip_fraction"]
        assert [*map(float, sums[f"age/clip_fraction_{each}"])] == [*map(float, expected)]
        assert 0 < expected[0] < expected[1] if each < 3 else expected[1] == 0


@pytest.mark.parametrize("seed", range(5))
def test_policy_loss_does_not_depend_on_the_split(seed):
    logprobs, entropy, fields = loss_case(n=64, seed=seed)
    loss_fn = build_loss(FULL)
    whole, count, sums = loss_fn(logprobs, entropy, fields)
    cuts = sorted(random.Random(seed).sample(range(1, 64), 5))
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, 64], strict=True):
        rows = slice(start, stop)
        pieces.append(loss_fn(logprobs[rows], entropy[rows], part_of(fields, rows)))
    assert float(sum(p[0] for p in pieces)) == pytest.approx(float(whole), rel=1e-12)
    assert sum(int(p[1]) for p in pieces) == int(count)
    for name, (value, n) in sums.items():
        parts = [p[2][name] for p in pieces]
        assert float(sum(v for v, _ in parts)) == pytest.approx(float(value), rel=1e-12)
        assert sum(int(m) for _, m in parts) == int(n)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "sft"])
def test_policy_loss_never_reads_masked_rows(loss: str, poison: float):
    logprobs, entropy, fields = loss_case()
    mask = fields.loss_mask
    ratio: Any = "sequence" if loss in ("ppo", "cispo", "sapo") else "token"
    config = FULL.model_copy(update={"loss": loss, "ratio": ratio, "opsm": 0.1})
    ids = torch.arange(40) // 10
    shares = torch.where(mask, 0.1, 0)
    ones = torch.ones(40, dtype=torch.float64)
    fields = replace(
        fields, weights=ones, corrections=ones, sequences=Sequences(ids, 4, shares.double())
    )

    def run(logprobs: Tensor, entropy: Tensor, fields: LossInputs):
        leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
        loss, count, sums = policy_loss(*leaves, fields, config)
        loss.backward()
        return [loss, count, *(x.grad for x in leaves), *(v for v, _ in sums.values())]

    def poisoned(x: Tensor) -> Tensor:
        return x.where(mask, poison)

    names = {*COLUMNS, "weights", "corrections"} - {"loss_mask"}
    bad = replace(fields, **{name: poisoned(getattr(fields, name)) for name in names})
    clean = run(logprobs, entropy, fields)
    for a, b in zip(clean, run(poisoned(logprobs), poisoned(entropy), bad), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


def test_policy_loss_shows_nan_under_the_mask():
    logprobs, entropy, fields = loss_case()
    logprobs[fields.loss_mask.nonzero()[0]] = math.nan
    loss, _, sums = policy_loss(logprobs, entropy, fields, Objective())
    assert loss.isnan() and sums["policy/ppo_kl"][0].isnan()


@pytest.mark.parametrize("gap", [25.0, 1e4, -25.0, -1e4])
def test_policy_loss_clamps_and_counts_huge_ratios(gap: float):
    """Row 0 has a huge policy ratio, row 1 a huge reference ratio."""
    shift = [torch.eye(3)[row] * gap for row in range(2)]
    fields = LossInputs(-shift[0], -shift[0], shift[1], -torch.ones(3), torch.ones(3) > 0)
    logprobs = torch.zeros(3, requires_grad=True)
    config = Objective(kl_coef=0.1, kl_gradient="direct", kl_weight="none")
    loss, _, sums = policy_loss(logprobs, None, fields, config)
    loss.backward()
    assert int(sums["policy/guarded_fraction"][0]) == 2
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert logprobs.grad.tolist() == [0, 1, 1]  # an ordinary row: -A * ratio


def test_policy_loss_refuses_parts_without_inputs():
    logprobs, entropy, fields = loss_case()
    with pytest.raises(ValueError, match=r"kl_coef is 0.1 and ref_logprobs is None"):
        policy_loss(logprobs, entropy, replace(fields, ref_logprobs=None), Objective(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef is 0.1 and entropy is None"):
        policy_loss(logprobs, None, fields, Objective(entropy_coef=0.1))
    with pytest.raises(ValueError, match=r"sequences is None, expected it; call weigh_tokens"):
        policy_loss(logprobs, entropy, fields, Objective(ratio="sequence"))
