"""Experts' tensors together, for vLLM."""

import random

import torch

from pyrl_ext.rollout.vllm.stacks import ExpertStacks

PLACES = {1: 2, 3: 0, 4: 1}  # of 6 experts, as a worker may hold them


def test_ExpertStacks_are_what_torch_stacks():
    """In any order; every tensor is overwritten once the next one comes."""
    held = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight": torch.randn(2, 3)
        for layer in range(2)
        for expert in range(6)
        for kind in ("gate", "down")
    }
    names = [*held]
    random.Random(0).shuffle(names)
    stacks = ExpertStacks(PLACES)
    memory = torch.empty(2, 3)
    found = dict[str, torch.Tensor]()
    for name in names:
        stacked = stacks.add(name, memory.copy_(held[name]))
        if stacked is None:
            assert int(name.split(".")[5]) not in PLACES
            continue
        copy, whole = stacked
        assert torch.equal(copy, held[name])
        if whole is not None:
            found |= [whole]
    assert found.keys() == {name for name in names if ".experts.3." in name}  # whose place is 0
    for name, stack in found.items():
        order = [held[name.replace(".experts.3.", f".experts.{e}.")] for e in (3, 4, 1)]
        assert torch.equal(stack, torch.stack(order))


def test_ExpertStacks_leave_what_vllm_does_not_take_together():
    shared = "model.layers.0.mlp.shared_experts.up_proj.weight"
    factor = "model.layers.0.mlp.experts.1.up_proj.lora_A.weight"
    for name in (shared, factor, "model.layers.0.mlp.experts.e_score_correction_bias"):
        assert ExpertStacks(PLACES).add(name, torch.ones(2, 3)) is None
    assert ExpertStacks({}).add("mlp.experts.1.up_proj.weight", torch.ones(2, 3)) is None
