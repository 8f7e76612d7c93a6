"""The advantage and the loss that a plan names."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from pyrl_ext.loss.registry import build_advantage, build_loss
from pyrl_ext.plan.schema.objective import Objective
from tests.helpers.objective import loss_case


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
def detached(logprobs, entropy, fields):
    return -(logprobs.detach() * fields.advantages).sum(), fields.loss_mask.sum(), {}
def constant(logprobs, entropy, fields):
    return torch.zeros(()), fields.loss_mask.sum(), {}
def bare(logprobs, entropy, fields):
    return -logprobs.sum()
def vector(logprobs, entropy, fields):
    return -logprobs, fields.loss_mask.sum(), {}
def no_gradients(logprobs, entropy, fields):
    torch.set_grad_enabled(False)
    return -logprobs.sum(), fields.loss_mask.sum(), {}
number = 3
"""
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "user_objectives", module)


@pytest.mark.usefixtures("user_module")
def test_build_takes_functions_of_the_user():
    rewards = torch.tensor([3.0, 1.0, 2.0])
    groups = torch.tensor([0, 0, 0])
    by_rank = build_advantage(Objective(advantage="user_objectives:ranks"))
    assert by_rank(rewards, groups, groups).tolist() == [2, 0, 1]
    scaled = build_advantage(Objective(advantage="user_objectives:scaled"))
    assert torch.equal(scaled(rewards, groups, groups), rewards * 0.2)
    logprobs, entropy, fields = loss_case()
    loss, _, sums = build_loss(Objective(loss="user_objectives:plain"))(logprobs, entropy, fields)
    assert loss == -(logprobs * fields.advantages).sum() and sums == {}
    without_std = build_advantage(Objective(normalize_std=False))
    assert without_std(rewards, groups, groups).tolist() == [1, -1, 0]


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gpro", r"objective.loss: 'gpro', expected ppo or .* or sft or package.module:function"),
        ("no_such_module_x:f", r"'no_such_module_x:f': no module 'no_such_module_x'"),
        ("os.no_such:f", r"no module 'os.no_such'"),
        (
            "user_objectives:plane",
            r"no 'plane' in user_objectives, expected one of: bare,",
        ),
        ("user_objectives:number", r"a int, expected a function"),
        ("user_objectives:too_few", r"takes \(logprobs\), expected 3 positional arguments"),
    ],
)
def test_build_loss_explains_wrong_names(name, match):
    with pytest.raises(ValueError, match=match):
        build_loss(Objective(loss=name))


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("detached", "returned a sum without a gradient, expected one computed from logprobs"),
        ("constant", "returned a sum without a gradient"),
        ("bare", r"returned Tensor, expected \(sum of the losses: Tensor, count of loss tokens"),
        (
            "vector",
            r"returned a sum of shape \[40\] and a count of shape \[\], expected one number",
        ),
        ("no_gradients", r"changed torch.is_grad_enabled\(\) from True to False"),
    ],
)
def test_build_loss_checks_what_a_loss_returns_and_changes(name, match):
    loss = build_loss(Objective(loss=f"user_objectives:{name}"))
    logprobs, entropy, fields = loss_case()
    with pytest.raises(ValueError, match=rf"objective.loss: 'user_objectives:{name}': {match}"):
        loss(logprobs.requires_grad_(), entropy, fields)
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("user_module")
def test_build_loss_accepts_a_constant_where_no_token_counts():
    loss = build_loss(Objective(loss="user_objectives:constant"))
    logprobs, entropy, fields = loss_case()
    nothing = replace(fields, loss_mask=torch.zeros_like(fields.loss_mask))
    assert loss(logprobs.requires_grad_(), entropy, nothing)[0] == 0
    with torch.no_grad():
        assert loss(logprobs, entropy, fields)[0] == 0
