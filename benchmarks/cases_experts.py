"""experts: a layer's routed experts forward and backward, and megatron's, one after the other."""

import tempfile
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from benchmarks.configs import TINY
from benchmarks.measure import Case, near
from pyrl_ext.megatron.grouped_experts import GroupedExperts
from pyrl_ext.ops import squared
from pyrl_ext.parallel import topology
from pyrl_ext.plan import compile_plan

# experts, hidden, width, rows: of the demo's update, of a wider model, of GLM-4.7-Flash
SIZES = [(8, 64, 32, 2048), (64, 512, 256, 32768)]
SIZES_CUDA = [*SIZES, (64, 2048, 1536, 32768)]


def build_pair(
    groups: Any,
    experts: int,
    hidden: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    gated: bool = True,
) -> tuple[GroupedExperts, Any]:
    """Ours and megatron's ``SequentialMLP``, with the same random weights; of squared ReLUs where
    they are not gated."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_ffn_hidden_size=width,
        activation_func=F.silu if gated else squared,
        gated_linear_unit=gated,
        add_bias_linear=False,
        bias_activation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=device == "cpu",
        params_dtype=dtype,
        calculate_per_token_loss=True,
    )
    ours = GroupedExperts(experts, config, groups)
    build: Any = LocalSpecProvider().grouped_mlp_modules(False)
    theirs = build(num_local_experts=experts, config=config, pg_collection=groups)
    with torch.no_grad():
        for weight in (ours.linear_fc1, ours.linear_fc2):
            weight.normal_(std=weight.shape[-1] ** -0.5)
        fill(theirs, ours)
    return ours, theirs


def fill(theirs: Any, ours: Any) -> None:
    """megatron's experts get our weights."""
    for expert, fc1, fc2 in zip(
        theirs.local_experts, ours.linear_fc1, ours.linear_fc2, strict=True
    ):
        expert.linear_fc1.weight.copy_(fc1)
        expert.linear_fc2.weight.copy_(fc2)


def inputs(
    counts: Tensor, hidden: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, how many each expert gets, their weights, and a gradient of the output."""
    rows = int(counts.sum())
    x, grad = torch.randn(2, rows, hidden, dtype=dtype, device=device)
    return x.requires_grad_(), counts, torch.rand(rows, device=device).requires_grad_(), grad


def both_ways(
    experts: Any, rows: Tensor, counts: Tensor, probs: Tensor, grad: Tensor
) -> list[Tensor]:
    """The output; the gradients of rows and weights of rows; those of all gates and ups, stacked,
    and of all downs."""
    parameters = [*experts.parameters()]
    output, _ = experts(rows, counts, probs)
    found = torch.autograd.grad(output, [rows, probs, *parameters], grad, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(found[2:], parameters)]
    if not isinstance(experts, GroupedExperts):
        grads = [torch.stack(grads[::2]), torch.stack(grads[1::2])]
    return [output.detach(), *found[:2], *grads]


def experts(device: str, shrink: int = 1) -> Iterator[Case]:
    """Forward and backward of one layer's experts, whose rows are drawn evenly; on cuda in bf16."""
    device = "cpu" if device == "meta" else device  # groups are on one or the other
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plan = compile_plan(TINY, [f"device={device}", f"run={tempfile.gettempdir()}/experts"])
    with topology.start(plan) as topo:
        groups = SimpleNamespace(ep=topo.groups.ep, expt_tp=topo.groups.expt_tp)
        groups.expt_dp = topo.groups.expt_dp
        for count, hidden, width, rows in SIZES_CUDA if device == "cuda" else SIZES:
            rows //= shrink
            pair = build_pair(groups, count, hidden, width, dtype, device)
            chosen = torch.randint(count, (rows,)).bincount(minlength=count)
            rows_in, _, probs, grad = inputs(chosen, hidden, dtype, device)
            there = chosen.to(device)  # ours needs no counts on the host

            weights = 3 * count * hidden * width
            yield Case(
                f"experts forward and backward, {count} of {hidden} x {width}, {rows} rows",
                partial(both_ways, pair[0], rows_in, there, probs, grad),
                {"SequentialMLP": partial(both_ways, pair[1], rows_in, chosen, probs, grad)},
                moved=dtype.itemsize * (3 * weights + rows * (4 * hidden + 8 * width)),
                written=dtype.itemsize * (weights + 2 * rows * hidden),
                agree=partial(near, bound=1e-5 if dtype == torch.float32 else 2e-2),
                flops=18 * rows * hidden * width,
                product=_product(rows // count, hidden, 2 * width, dtype, device),
                at_least={"SequentialMLP": 2} if hidden < 512 else {},
            )


def _product(rows: int, hidden: int, width: int, dtype: torch.dtype, device: str) -> tuple:
    """One expert's first product, and its floating-point operations."""
    x, weight = (torch.randn(n, hidden, dtype=dtype, device=device) for n in (rows, width))
    return lambda: x @ weight.T, 2 * rows * hidden * width
