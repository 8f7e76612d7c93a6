"""The objective's parts, alone and in presets, against formulas evaluated token by token."""

import itertools
import math
from typing import Any

import pytest
import torch

from pyrl_ext.loss.evaluation import evaluate
from pyrl_ext.plan.schema.objective import Objective, presets, with_preset
from tests.helpers import objective_loops as loops

KL = itertools.product(
    ("k1", "k2", "k3"), ("direct", "reverse"), ("none", "detached", "ratio"), ("old", "rollout")
)
WIDE = {"clip_low": 0.3, "clip_high": 0.35}
CASES = {
    **{name: {"preset": name, "reduction_constant": 5} for name in presets()},
    **{f"preset {n}, defaults": {"preset": n} for n in presets() if n != "dr_grpo"},
    **{
        f"{loss} {ratio} {anchor}": {"loss": loss, "ratio": ratio, "anchor": anchor, **WIDE}
        for loss in ("ppo", "cispo", "sapo")
        for ratio in ("token", "sequence", "sequence_token")
        for anchor in ("old", "rollout")
    },
    **{f"{loss} rollout": {"loss": loss, "anchor": "rollout"} for loss in ("gmpo", "dppo")},
    # weights that vary inside a sample: only then do gradients of a mean and of its tokens differ
    **{
        f"{loss} {ratio} tis": {"loss": loss, "ratio": ratio, "tis_cap": 1.4, **WIDE}
        for loss in ("ppo", "sapo")
        for ratio in ("sequence", "sequence_token")
    },
    "dual clip": {"dual_clip": 1.2},
    "sapo sharp": {"loss": "sapo", "sapo_tau": [3.0, 0.4]},
    "dppo low": {"loss": "dppo", "clip_low": 0.02, "clip_high": 0.3},
    "dppo high": {"loss": "dppo", "clip_low": 0.3, "clip_high": 0.02},
    **{
        f"{v} {g} {w} {a}": {"kl_coef": 0.7, "kl": v, "kl_gradient": g, "kl_weight": w, "anchor": a}
        for v, g, w, a in KL
    },
    "entropy": {"entropy_coef": 0.3},
    "divergence": {"distill": "forward", "distill_coef": 0.7, "kl_coef": 0.1},
    "tis": {"tis_cap": 1.1},
    "tis both sides": {"tis_cap": 1.1, "tis_floor": 0.9},
    "tis sequence": {"tis": "sequence", "tis_cap": 1.5},
    "icepop": {"mask_ratio": [0.7, 1.3]},
    "geometric": {"sequence_bounds": [0.9, 1.1]},
    "product": {"sequence_bounds": [0.5, 1.5], "mask_sequence": "product"},
    "veto": {"veto": 0.6},
    "opsm": {"opsm": 0.02},
    "all": {"tis_cap": 1.4, "mask_ratio": [0.5, 2.0], "veto": 0.4, "kl_coef": 0.1, "opsm": 0.1},
    **{f"reduction {r}": {"reduction": r, "reduction_constant": 7} for r in ("sequence", "prompt")},
}


def flat[T](rows: list[list[T]]) -> list[T]:
    return [x for row in rows for x in row]


def run(section: Any, now: list[list[float]], m: loops.Minibatch):
    return evaluate(
        section,
        logprobs=flat(now),
        old_logprobs=flat(m.old),
        rollout_logprobs=flat(m.rollout),
        ref_logprobs=flat(m.ref),
        entropy=flat(m.entropy),
        divergence=flat(m.divergence),
        advantages=m.advantages,
        loss_mask=flat(m.mask),
        lengths=[len(row) for row in now],
        groups=m.groups,
        trajectories=m.trajectories,
    )


@pytest.mark.parametrize("name", CASES)
def test_evaluate_equals_the_formulas(name):
    section = CASES[name]
    objective = Objective.model_validate(with_preset(section))
    if objective.reduction_constant is None:
        objective = objective.model_copy(update={"reduction_constant": 5})
    for seed in range(3):
        now, m = loops.draw(seed)
        value, gradient, metrics = run(section, now, m)
        assert value == pytest.approx(loops.loss(objective, now, now, m), rel=1e-10, abs=1e-12)
        want = loops.gradient(objective, now, m)
        assert gradient.tolist() == pytest.approx(want, rel=1e-6, abs=1e-8)
        assert metrics["loss"] == pytest.approx(value)


PARTS = {
    **{f"reduction {r}": {"reduction": r} for r in ("sequence", "sequence_sum", "prompt")},
    "tis sequence": {"tis": "sequence", "tis_cap": 1.5, "tis_floor": 0.8},
    "geometric": {"sequence_bounds": [0.9, 1.1], "reduction": "sequence"},
    "product": {"sequence_bounds": [0.5, 1.5], "mask_sequence": "product"},
    "veto": {"veto": 0.6},
    "gspo": {"preset": "gspo", "clip_low": 0.3, "clip_high": 0.3},  # its sequence is the sample
}


@pytest.mark.parametrize("name", PARTS)
def test_evaluate_counts_a_trajectory_as_a_sequence(name):
    """Six samples of four trajectories, which need not lie next to each other."""
    section = {"reduction_constant": 5} | PARTS[name]
    objective = Objective.model_validate(with_preset(section))
    for seed in range(3):
        now, m = loops.draw(seed)
        m.trajectories = [7, 3, 3, 9, 7, 4]
        m.groups = [0, 1, 1, 1, 0, 0]
        value, gradient, _ = run(section, now, m)
        assert value == pytest.approx(loops.loss(objective, now, now, m), rel=1e-10, abs=1e-12)
        want = loops.gradient(objective, now, m)
        assert gradient.tolist() == pytest.approx(want, rel=1e-6, abs=1e-8)


# (section, ratios, advantages, the mean that trainers' own tests have), one sample, all loss tokens
PUBLISHED = [
    ({"dual_clip": 3.0}, [0.5, 1, 10], [1, -1, -4], [-0.5, 1, 12]),
    ({"dual_clip": 1.5}, [2, 2, 0.5], [2, -2, 2], [-2.4, 3, -1]),
    ({}, [0.5, 1, 1.5], [1, -1, 2], [-0.5, 1, -2.4]),
]


@pytest.mark.parametrize(("section", "ratios", "advantages", "losses"), PUBLISHED)
def test_evaluate_equals_published_numbers(section, ratios, advantages, losses):
    logprobs = [math.log(r) - 5 for r in ratios]
    rest: dict[str, Any] = {"old_logprobs": [-5.0] * 3, "rollout_logprobs": [-5.0] * 3}
    value, _, _ = evaluate(
        section, logprobs=logprobs, advantages=advantages, loss_mask=[True] * 3, lengths=[3], **rest
    )
    assert value == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_evaluate_equals_published_clamps():
    """CISPO's weights are slopes: d loss / d logp = -clip(r) A / tokens."""
    ratios = [1, 1.14, 1.56, 0.4]
    want = [1, 1.14, 1.28, 0.8]
    _, gradient, metrics = evaluate(
        {"loss": "cispo", "clip_low": 0.2, "clip_high": 0.28},
        logprobs=[math.log(r) - 5 for r in ratios],
        old_logprobs=[-5.0] * 4,
        rollout_logprobs=[-5.0] * 4,
        advantages=[-1.0],
        loss_mask=[True] * 4,
        lengths=[4],
    )
    assert (4 * gradient).tolist() == pytest.approx(want)
    assert metrics["policy/clip_fraction"] == 0.5


def test_evaluate_counts_loss_tokens_that_opsm_drops():
    """Sample 0 fell and has a negative advantage, sample 1 has a positive one: of six loss tokens
    three are dropped, whatever the masked ones are."""
    _, gradient, metrics = evaluate(
        {"opsm": 0.1},
        logprobs=[-3.0] * 8,
        old_logprobs=[-1.0] * 8,
        rollout_logprobs=[-1.0] * 8,
        advantages=[-1.0, 1.0],
        loss_mask=[True, True, True, False] * 2,
        lengths=[4, 4],
    )
    assert metrics["policy/opsm_fraction"] == pytest.approx(0.5)
    assert (gradient != 0).tolist() == [False] * 4 + [True] * 3 + [False]


def test_evaluate_equals_published_reductions():
    """Losses [[1, 2, 30], [4, 50, 6]] under the mask [[1, 1, 0], [1, 0, 1]]."""
    losses = [1, 2, 30, 4, 50, 6]
    mask = [True, True, False, True, False, True]
    for reduction, constant, want in (
        ("token", None, 3.25),
        ("sequence", None, 3.25),
        ("sequence_sum", 1, 6.5),
        ("sequence_sum", 3, 2.166667),
        ("prompt", None, 3.25),
    ):
        section = {"loss": "reinforce", "reduction": reduction}
        section |= {"reduction_constant": constant} if constant else {}
        value, _, _ = evaluate(
            section,
            logprobs=[-1.0] * 6,
            old_logprobs=[-1.0] * 6,
            rollout_logprobs=[-1.0] * 6,
            advantages=losses,
            loss_mask=mask,
            lengths=[3, 3],
        )
        assert value == pytest.approx(want, rel=1e-6)


def test_evaluate_counts_what_is_rejected_once():
    now, m = loops.draw(5)
    section = {"mask_ratio": [0.8, 1.25], "sequence_bounds": [0.95, 1.05], "veto": 0.7}
    _, gradient, metrics = run(section, now, m)
    counts = [metrics[f"policy/rejected/{cause}"] for cause in ("token", "sequence", "veto")]
    tokens = sum(flat(m.mask))
    kept = sum(
        loops.correction(Objective(**section), m, i, t) > 0
        for i in range(len(now))
        for t in m.tokens(i)
    )
    assert round(sum(counts) * tokens) == tokens - kept and counts[0] > 0
    assert int((gradient != 0).sum()) <= kept


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"objective": "dpao"}, "'dpao', expected grpo, dapo"),
        ({"objective": {"ratio": "tokens"}}, "ratio"),
        ({"advantages": [1.0, 2.0, 3.0]}, r"advantages \[3\], expected \[6\]"),
        ({"loss_mask": [True]}, r"loss_mask \[1\], expected \[6\]"),
        ({"objective": {"kl_coef": 1.0}}, "kl_coef is 1.0 and ref_logprobs is None"),
    ],
)
def test_evaluate_refuses_what_does_not_fit(change, match):
    given = {name: [-1.0] * 6 for name in ("logprobs", "old_logprobs", "rollout_logprobs")}
    given |= {"advantages": [1.0] * 6, "loss_mask": [True] * 6, "lengths": [3, 3]}
    given |= {"objective": "grpo"} | change
    with pytest.raises(ValueError, match=match):
        evaluate(given.pop("objective"), **given)


def test_evaluate_takes_tensors():
    now, m = loops.draw(1)
    value, gradient, _ = run("gspo", now, m)
    again, same, _ = evaluate(
        "gspo",
        logprobs=torch.tensor(flat(now), dtype=torch.float64),
        old_logprobs=torch.tensor(flat(m.old), dtype=torch.float64),
        rollout_logprobs=torch.tensor(flat(m.rollout), dtype=torch.float64),
        advantages=torch.tensor(m.advantages, dtype=torch.float64),
        loss_mask=torch.tensor(flat(m.mask)),
        lengths=[len(row) for row in now],
    )
    assert again == value and torch.equal(same, gradient)
