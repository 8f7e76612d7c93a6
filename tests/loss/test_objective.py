"""Advantages and losses against plain Python in double precision, and against NaN."""

import math
import random
import statistics
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pyrl_ext.loss.advantages import grpo
from pyrl_ext.loss.grpo import grpo_loss
from pyrl_ext.loss.inputs import LossInputs
from pyrl_ext.loss.registry import build_advantage, build_loss


@dataclass(frozen=True)
class Config:
    """An ``objective`` section."""

    advantage: str = "grpo"
    normalize_std: bool = True
    loss: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    tis_cap: float | None = None


FULL = Config(kl_coef=0.05, entropy_coef=0.01, tis_cap=1.5)


def make_case(n: int = 40, seed: int = 0, scale: float = 0.4) -> tuple[Tensor, Tensor, LossInputs]:
    gen = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(n, generator=gen, dtype=torch.float64)

    logprobs = draw() - 2
    fields = LossInputs(
        old_logprobs=logprobs + scale * draw(),
        rollout_logprobs=logprobs + scale * draw(),
        ref_logprobs=logprobs + scale * draw(),
        advantages=draw(),
        loss_mask=draw() > -0.5,
    )
    return logprobs, draw().abs(), fields


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
def test_loss_equals_the_loop(seed):
    logprobs, entropy, fields = make_case(seed=seed)
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


def test_optional_parts_are_absent_when_off():
    logprobs, _, fields = make_case()
    fields = replace(fields, ref_logprobs=None)
    _, _, sums = grpo_loss(logprobs, None, fields, Config())
    assert sums.keys() == {
        *("policy/ppo_kl", "policy/clip_fraction", "policy/guarded_fraction"),
        *("loss/policy", "loss"),
    }


def test_reference_kl_is_measured_even_when_not_penalised():
    logprobs, entropy, fields = make_case()
    off, _, sums = grpo_loss(logprobs, entropy, fields, Config())
    without, _, _ = grpo_loss(logprobs, None, replace(fields, ref_logprobs=None), Config())
    assert float(off) == float(without)
    wanted = loop(logprobs, entropy, fields, Config(tis_cap=math.inf))[2]
    assert float(sums["policy/ref_kl"][0]) == pytest.approx(wanted["policy/ref_kl"], rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gradient(seed):
    logprobs, entropy, fields = make_case(n=12, seed=seed)
    c = FULL

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return grpo_loss(logprobs, entropy, fields, c)[0]

    inputs = (logprobs.requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


def test_the_importance_weight_has_no_gradient():
    logprobs, entropy, fields = make_case()
    rollout = fields.rollout_logprobs.requires_grad_()
    loss, _, _ = grpo_loss(logprobs.requires_grad_(), entropy, fields, Config(tis_cap=2.0))
    loss.backward()
    assert rollout.grad is None and logprobs.grad is not None


def test_the_cap_bounds_the_weight():
    logprobs, entropy, fields = make_case(scale=2.0)
    for cap in (0.5, 2.0):
        _, count, sums = grpo_loss(logprobs, entropy, fields, Config(tis_cap=cap))
        weights = (fields.old_logprobs - fields.rollout_logprobs).exp().clamp(max=cap)
        mean = float(sums["policy/tis_mean"][0] / count)
        assert mean == pytest.approx(float(weights[fields.loss_mask].mean()))


@pytest.mark.parametrize("seed", range(5))
def test_loss_does_not_depend_on_the_split(seed):
    logprobs, entropy, fields = make_case(n=64, seed=seed)
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
def test_masked_rows_never_leak(poison):
    logprobs, entropy, fields = make_case()
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


def test_nan_under_the_mask_is_not_hidden():
    logprobs, entropy, fields = make_case()
    logprobs[fields.loss_mask.nonzero()[0]] = math.nan
    loss, _, sums = grpo_loss(logprobs, entropy, fields, Config())
    assert loss.isnan() and sums["policy/ppo_kl"][0].isnan()


@pytest.mark.parametrize("gap", [25.0, 1e4, -25.0, -1e4])
def test_huge_ratios_are_clamped_and_counted(gap):
    """Row 0 has a huge policy ratio, row 1 a huge weight, row 2 a huge reference ratio."""
    zero = torch.zeros(4)
    shift = [torch.eye(4)[row] * gap for row in range(3)]
    fields = LossInputs(-shift[0], -shift[1], shift[2], -torch.ones(4), torch.ones(4) > 0)
    fields = replace(fields, rollout_logprobs=fields.old_logprobs - shift[1])
    logprobs = zero.clone().requires_grad_()
    c = Config(kl_coef=0.1, tis_cap=3.0)
    loss, _, sums = grpo_loss(logprobs, None, fields, c)
    loss.backward()
    assert int(sums["policy/guarded_fraction"][0]) == 3
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert logprobs.grad[3] == 1  # an ordinary row: -A * ratio
    assert logprobs.grad[0].abs() < 0.1 + 1e-6  # only the reference term is left
    weight = min(3.0, math.exp(math.copysign(20.0, gap)))
    assert logprobs.grad[1] == pytest.approx(weight)
    assert logprobs.grad[2] == 1  # only the policy term is left


def test_coefficients_need_their_inputs():
    logprobs, entropy, fields = make_case()
    with pytest.raises(ValueError, match=r"kl_coef is 0.1 and ref_logprobs is None"):
        grpo_loss(logprobs, entropy, replace(fields, ref_logprobs=None), Config(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef is 0.1 and entropy is None"):
        grpo_loss(logprobs, None, fields, Config(entropy_coef=0.1))


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_equals_the_loop(normalize_std):
    rng = random.Random(0)
    groups = [rng.choice([3, 8, 5, 90]) for _ in range(30)] + [77]
    rewards = [rng.gauss(0, 3) for _ in groups]
    got = grpo(torch.tensor(rewards), torch.tensor(groups), normalize_std)
    for s, group in enumerate(groups):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        wanted = rewards[s] - statistics.mean(members)
        if normalize_std and len(members) > 1:
            wanted /= statistics.stdev(members) + 1e-6
        assert float(got[s]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert got[-1] == 0 and got.dtype == torch.float32


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(reward):
    rewards = torch.tensor([reward] * 7 + [1.0, 2.0])
    advantages = grpo(rewards, torch.tensor([4] * 7 + [5, 5]))
    assert torch.equal(advantages[:7], torch.zeros(7))
    assert advantages[7] == -advantages[8] != 0


@pytest.fixture
def user_module(monkeypatch):
    module = ModuleType("user_objectives")
    source = """
import torch
def ranks(rewards, groups):
    return rewards.argsort().argsort().float()
def scaled(rewards, groups, config):
    return rewards * config.clip_low
def plain(logprobs, entropy, fields):
    return -(logprobs * fields.advantages).sum(), fields.loss_mask.sum(), {}
def too_few(logprobs):
    return logprobs
number = 3
"""
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "user_objectives", module)


@pytest.mark.usefixtures("user_module")
def test_user_functions():
    rewards, groups = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 0])
    by_rank = build_advantage(Config(advantage="user_objectives:ranks"))
    assert by_rank(rewards, groups).tolist() == [2, 0, 1]
    scaled = build_advantage(Config(advantage="user_objectives:scaled"))
    assert torch.equal(scaled(rewards, groups), rewards * 0.2)
    logprobs, entropy, fields = make_case()
    loss, _, sums = build_loss(Config(loss="user_objectives:plain"))(logprobs, entropy, fields)
    assert loss == -(logprobs * fields.advantages).sum() and sums == {}
    without_std = build_advantage(Config(normalize_std=False))
    assert without_std(rewards, groups).tolist() == [1, -1, 0]


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gpro", r"objective.loss: 'gpro', expected grpo or package.module:function"),
        (":plain", r"expected grpo or package.module:function"),
        ("no_such_module_x:f", r"'no_such_module_x:f': no module 'no_such_module_x'"),
        ("os.no_such:f", r"no module 'os.no_such'"),
        (
            "user_objectives:plane",
            r"no 'plane' in user_objectives, expected one of: number,",
        ),
        ("user_objectives:number", r"a int, expected a function"),
        ("user_objectives:too_few", r"takes \(logprobs\), expected 3 positional arguments"),
    ],
)
def test_wrong_names_are_explained(name, match):
    with pytest.raises(ValueError, match=match):
        build_loss(Config(loss=name))


def test_a_missing_import_inside_the_users_module_is_not_renamed(tmp_path, monkeypatch):
    (tmp_path / "broken_objectives.py").write_text("import no_such_module_y\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="imports 'no_such_module_y', which is missing"):
        build_loss(Config(loss="broken_objectives:f"))
