"""AdamW with moments of bfloat16 against the formula of AdamW in fp64 with the same rounding."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pyrl_ext.megatron import bf16_moments
from pyrl_ext.megatron.bf16_moments import MOMENTS, Bf16MomentsAdamW

SHAPES = [(37, 5), (), (0,), (2, 3, 4), (300, 7)]
LR = 1e-2
BETAS = (0.9, 0.98)
EPS = 1e-8
DECAY = 0.1
ULP = 2.0**-7  # the largest step between two bfloat16, relative


def groups(mains: list[Tensor]) -> list[dict]:
    """A group with decay and one without, with keys that FusedAdam has."""
    common = {"lr": LR, "betas": BETAS, "eps": EPS, "fused": None, "bias_correction": True}
    first = {"params": mains[:3], "weight_decay": DECAY, "lr_mult": 1.0, **common}
    return [first, {"params": mains[3:], "weight_decay": 0.0, "lr_mult": 1.0, **common}]


def expected(main: Tensor, gradient: Tensor, moments: list[Tensor], step: int, decay: float):
    """Parameter and moments after a step, in fp64, the moments not rounded yet."""
    gradient = gradient.double()
    mean = BETAS[0] * moments[0].double() + (1 - BETAS[0]) * gradient
    square = BETAS[1] * moments[1].double() + (1 - BETAS[1]) * gradient**2
    root = (square / (1 - BETAS[1] ** step)).sqrt()
    update = mean / (1 - BETAS[0] ** step) / (root + EPS)
    return main.double() * (1 - LR * decay) - LR * update, [mean, square]


@pytest.mark.parametrize("most", [1 << 22, 64, 5, 1])
def test_step_is_adamw_with_rounded_moments(most: int):
    torch.manual_seed(0)
    mains = [torch.randn(shape).requires_grad_() for shape in SHAPES]
    adam = Bf16MomentsAdamW(groups(mains))
    adam.init_state()
    for step in range(1, 6):
        for main in mains:
            main.grad = torch.randn_like(main)
        found = []
        for i, main in enumerate(mains):
            before = [adam.state[main][kind].clone() for kind in MOMENTS]
            assert all(each.dtype == torch.bfloat16 for each in before)
            assert main.grad is not None
            decay = DECAY if i < 3 else 0.0
            found.append(expected(main.detach(), main.grad, before, step, decay))
        with patch.object(bf16_moments, "MOST", most):
            adam.step()
        for main, (value, moments) in zip(mains, found, strict=True):
            torch.testing.assert_close(main.detach(), value.float(), rtol=1e-5, atol=1e-6)
            for kind, moment in zip(MOMENTS, moments, strict=True):
                kept = adam.state[main][kind]
                wide = moment.float()
                # a number between two, right at their middle, may go to either
                torch.testing.assert_close(kept.float(), wide, rtol=ULP / 2, atol=1e-12)
                assert (kept != wide.bfloat16()).sum() <= 0.01 * kept.numel()
            assert float(adam.state[main]["step"]) == step


def test_batches_are_as_few_as_their_bound_allows():
    pieces = [[torch.empty(size)] for size in (3, 60, 1, 64, 64, 2, 2, 61, 10)]
    with patch.object(bf16_moments, "MOST", 64):
        found = [
            [len(piece[0]) for piece in batch] for batch in bf16_moments._batches(iter(pieces))
        ]
    assert found == [[3, 60, 1], [64], [64], [2, 2], [61], [10]]


def test_step_leaves_a_parameter_without_a_gradient():
    mains = [torch.ones(4).requires_grad_() for _ in range(4)]
    adam = Bf16MomentsAdamW(groups(mains))
    mains[1].grad = torch.ones(4)
    adam.step()
    assert [bool((main != 1).any()) for main in mains] == [False, True, False, False]
    assert [float(adam.state[main]["step"]) for main in mains] == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="a closure, expected None"):
        adam.step(lambda: None)  # type: ignore


@pytest.mark.parametrize(("decay", "falls"), [(0.992, True), (0.999, False)])
def test_a_moment_falls_with_the_decays_that_plans_allow(decay: float, falls: bool):
    """The rule of optimizer.moments, by each number of bfloat16 between 1 and 2."""
    moment = torch.arange(128, 256).bfloat16() / 128
    after = (moment.float() * decay).bfloat16()
    assert bool((after < moment).all()) == falls
