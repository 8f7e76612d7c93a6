"""Grouped experts against megatron's experts one after the other."""

from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases_experts import both_ways, build_pair, inputs
from pyrl_ext.megatron import cpu
from pyrl_ext.megatron.grouped_experts import grouped_linear
from pyrl_ext.parallel import topology
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess

ALL_BUT_PROBS = "all but probs"
COUNTS = {"all": [3, 9, 1, 5], "some": [0, 7, 0, 11], "one": [0, 0, 0, 4], "none": [0, 0, 0, 0]}


@pytest.fixture(scope="module")
def groups():
    cpu.install()
    with topology.start(tiny_plan()) as topo:
        yield topo.groups


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("counts", [*COUNTS])
def test_grouped_experts_are_experts_one_after_the_other(groups, counts, gated):
    """Output and gradients of rows, probabilities and weights, with experts that get no rows."""
    torch.manual_seed(0)
    ours, theirs = build_pair(groups, 4, 16, 8, gated=gated)
    given = inputs(torch.tensor(COUNTS[counts]), 16)
    for got, want in zip(both_ways(ours, *given), both_ways(theirs, *given), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("counts", [*COUNTS])
@pytest.mark.parametrize(
    "frozen", ["nothing", "weights", "linear_fc1", "linear_fc2", "rows", ALL_BUT_PROBS]
)
def test_grouped_experts_recompute_what_they_do_not_keep(groups, counts, gated, frozen):
    """With moe_act: the same output and gradients, bit for bit, and fewer tensors kept."""
    torch.manual_seed(0)
    ours, _ = build_pair(groups, 4, 16, 8, gated=gated)
    for name, weight in ours.named_parameters():
        weight.requires_grad_(frozen not in ("weights", ALL_BUT_PROBS, name))
    rows, per_expert, probs, *_ = inputs(torch.tensor(COUNTS[counts]), 16)
    number = int(per_expert.sum())
    found = []
    for recomputed in (False, True):
        ours.recomputes_unit = recomputed
        given = [
            rows.detach().requires_grad_(frozen not in ("rows", ALL_BUT_PROBS)),
            probs.detach().requires_grad_(),
        ]
        kept = list[torch.Size]()

        def keep(tensor: torch.Tensor, kept: list[torch.Size] = kept) -> torch.Tensor:
            kept.append(tensor.shape)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = ours(given[0], per_expert, given[1])
        (out**2).sum().backward()
        leaves = [*given, *ours.parameters()]
        found.append([out, *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
        if number:  # without gates the unit's input has the same shape
            inner = kept.count(torch.Size((number, 8))) - (not gated)
            assert inner == (
                not recomputed and frozen not in ("weights", ALL_BUT_PROBS, "linear_fc2")
            )
    for plain, again in zip(*found, strict=True):
        assert (plain is None) == (again is None)
        assert plain is None or torch.equal(plain, again)


@pytest.mark.parametrize("counts", [*COUNTS])
def test_recomputing_experts_take_the_gradient_of_the_last_weight_alone(groups, counts):
    torch.manual_seed(0)
    ours, _ = build_pair(groups, 4, 16, 8, gated=True)
    ours.linear_fc1.requires_grad_(False)
    rows, per_expert, probs, *_ = inputs(torch.tensor(COUNTS[counts]), 16)
    found = []
    for ours.recomputes_unit in (False, True):
        out, _ = ours(rows.detach(), per_expert, probs.detach())
        found += torch.autograd.grad((out**2).sum(), ours.linear_fc2)
    assert torch.equal(*found)


def test_recomputing_experts_refuse_a_second_derivative(groups):
    ours, _ = build_pair(groups, 4, 16, 8, gated=True)
    ours.recomputes_unit = True
    rows, per_expert, probs, *_ = inputs(torch.tensor(COUNTS["all"]), 16)
    out, _ = ours(rows, per_expert, probs)
    (grad,) = torch.autograd.grad((out**2).sum(), probs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad**2).sum().backward()


@pytest.mark.parametrize("rows", [0, 5])
def test_grouped_linear_takes_the_gradient_of_a_sum(rows):
    """It is one number, expanded: its strides are 0, with and without rows."""
    x = torch.randn(rows, 8).requires_grad_()
    weight = torch.randn(2, 16, 8).requires_grad_()
    ends = torch.tensor([0, rows], dtype=torch.int32)
    found = torch.autograd.grad(grouped_linear(x, weight, ends).sum(), (x, weight))
    want = torch.autograd.grad((x @ weight[1].T).sum(), (x, weight))
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got, exact)


class NoEmptyProducts(TorchDispatchMode):
    """Raises at a grouped product without rows, and counts those with some."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in func.name():
            assert all(matrix.numel() for matrix in args[:2]), f"{func.name()} without rows"
            self.products += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_grouped_experts_call_no_product_without_rows(groups, gated, frozen):
    """Forward or backward; the gradients of the weights are zeros of their shapes."""
    ours, _ = build_pair(groups, 4, 16, 8, gated=gated)
    ours.requires_grad_(not frozen)
    rows = torch.empty(0, 16, requires_grad=True)
    probs = torch.empty(0, requires_grad=True)
    with NoEmptyProducts() as called:
        out, _ = ours(rows, torch.zeros(4, dtype=torch.int64), probs)
        out.sum().backward()
    assert called.products == 0
    assert out.shape == (0, 16)
    assert rows.grad is not None
    assert probs.grad is not None
    for weight in ours.parameters():
        assert (weight.grad is None) == frozen
        assert weight.grad is None or not weight.grad.any()


def test_grouped_experts_add_to_main_grad_what_they_return_without_one(groups):
    """And mark it as added, as megatron's DistributedDataParallel asks; groups without rows too."""
    torch.manual_seed(0)
    ours, _ = build_pair(groups, 4, 16, 8)
    given = inputs(torch.tensor(COUNTS["some"]), 16)
    *_, fc1, fc2 = both_ways(ours, *given)
    weights: list[Any] = [*ours.parameters()]
    before = [torch.randn_like(p) for p in weights]
    for p, start in zip(weights, before, strict=True):
        p.main_grad = start.clone()
        p.grad_added_to_main_grad = False
    for _ in range(2):  # two microbatches
        both_ways(ours, *given)
    for p, start, grad in zip(weights, before, (fc1, fc2), strict=True):
        assert p.grad_added_to_main_grad
        torch.testing.assert_close(p.main_grad, start + 2 * grad, atol=1e-5, rtol=1e-5)
        assert torch.equal(p.main_grad[0], start[0])  # no rows


def test_grouped_experts_round_in_bfloat16_where_megatron_does(groups):
    torch.manual_seed(0)
    ours, theirs = build_pair(groups, 4, 16, 8, torch.bfloat16)
    given = inputs(torch.tensor(COUNTS["all"]), 16, torch.bfloat16)
    for got, want in zip(both_ways(ours, *given), both_ways(theirs, *given), strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("saved", "gated"), [(0, True), (1, True), (0, False), (1, False)])
def test_sharded_state_dict_loads_what_megatron_saved_and_the_reverse(
    groups, tmp_path, saved, gated
):
    torch.manual_seed(0)
    pair = build_pair(groups, 4, 16, 8, gated=gated)
    other = build_pair(groups, 4, 16, 8, gated=gated)
    target = other[1 - saved]

    def tensors(experts):
        state = experts.sharded_state_dict("m.", (), {"dp_cp_group": groups.dp_cp})
        return {name: each for name, each in state.items() if "_extra_state" not in name}

    dist_checkpointing.save(tensors(pair[saved]), tmp_path)
    loaded: Any = dist_checkpointing.load(tensors(target), tmp_path)
    target.load_state_dict({n.removeprefix("m."): t for n, t in loaded.items()}, strict=False)
    for got, want in zip(target.parameters(), pair[1 - saved].parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (
            {"params_dtype": torch.bfloat16, "hidden_size": 20},
            "hidden 20, width 8, expected multiples of 8 in torch.bfloat16",
        ),
        ({"moe_ffn_hidden_size": 6}, "width 6, expected multiples of 4 in torch.float32"),
    ],
)
def test_grouped_experts_refuse_other_experts(groups, setting, found):
    config = build_pair(groups, 2, 16, 8)[0].config
    for name, value in setting.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=found):
        type(build_pair(groups, 2, 16, 8)[0])(2, config, groups)
