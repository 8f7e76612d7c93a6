"""The norm over all heads, against transformers' and against a formula in float64; its weights in
checkpoints of other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

from pyrl_ext.megatron.normed_attention import AllHeadsNorm
from pyrl_ext.schedule import plan_microbatches
from tests.helpers import passes
from tests.helpers.models import MINIMAX, plan_of, write_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SIZES = (1, 2, 4)  # of the tensor-parallel group
NEAR = {  # atol, rtol
    torch.float32: (2e-6, 5e-6),
    torch.float64: (1e-14, 1e-13),
    torch.bfloat16: (1e-2, 2**-8),
}
ROWS = 13
HEADS = 8
WIDTH = 5
EPS = 1e-3  # as large as some of the mean squares


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, 1, heads, D] of very unequal size, their weight [heads * D], and a gradient."""
    g = torch.Generator().manual_seed(0)
    rows, grad = torch.randn(2, ROWS, 1, HEADS, WIDTH, dtype=torch.float64, generator=g)
    rows = rows * torch.logspace(-3, 1, ROWS, dtype=torch.float64)[:, None, None, None]
    rows[:, :, HEADS // 2 :] *= 3  # the heads of ranks differ in length
    weight = 1 + 0.3 * torch.randn(HEADS * WIDTH, dtype=torch.float64, generator=g)
    return rows.to(dtype), weight.to(dtype), grad.to(dtype)


def on_rank(group: dist.ProcessGroup) -> dict:
    """(size, dtype) -> (rank in its group, output, gradients of rows and weight)."""
    found = {}
    for size in SIZES:
        firsts = range(0, group.size(), size)
        groups = [dist.new_group([*range(first, first + size)]) for first in firsts]
        mine = groups[group.rank() // size]
        place = group.rank() % size
        for dtype in NEAR:
            config = TransformerConfig(
                num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS
            )
            config.params_dtype = dtype
            rows, weight, grad = drawn(dtype)
            heads, grad = (x.chunk(size, 2)[place] for x in (rows, grad))
            norm = AllHeadsNorm(config, HEADS // size * WIDTH, EPS, mine)
            norm.weight.data = weight.chunk(size)[place].clone()
            heads = heads.requires_grad_()  # a slice: its rows are not next to each other
            out = norm(heads)
            out.backward(grad)
            assert heads.grad is not None and norm.weight.grad is not None
            found[size, dtype] = place, out.detach(), heads.grad, norm.weight.grad
    return found


def exact(dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of rows and weight, in float64 of the numbers as they are."""
    rows, weight, grad = (x.double() for x in drawn(dtype))
    rows.requires_grad_()
    weight.requires_grad_()
    flat = rows.flatten(-2)
    out = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS) * weight
    out.backward(grad.flatten(-2))
    assert rows.grad is not None and weight.grad is not None
    return [out.detach().view_as(rows), rows.grad, weight.grad]


def test_AllHeadsNorm_is_that_of_one_process():
    results = run_ranks(on_rank, 4)
    for dtype, (atol, rtol) in NEAR.items():
        want = exact(dtype)
        for size in SIZES:
            for found in results:
                place, *tensors = found[size, dtype]
                for tensor, whole in zip(tensors, want, strict=True):
                    part = whole.chunk(size, 2 if whole.dim() == 4 else 0)[place]
                    assert tensor.dtype == dtype
                    torch.testing.assert_close(tensor.double(), part, atol=atol, rtol=rtol)


def test_AllHeadsNorm_is_that_of_transformers():
    rows, weight, grad = drawn(torch.float32)
    theirs = MiniMaxM2RMSNorm(HEADS * WIDTH, EPS)
    theirs.weight.data = weight
    rows.requires_grad_()
    out = theirs(rows.flatten(-2))
    out.backward(grad.flatten(-2))
    want = [out.view_as(rows), rows.grad, theirs.weight.grad]
    for found, whole in zip(want, exact(torch.float32), strict=True):
        assert found is not None
        torch.testing.assert_close(found.detach().double(), whole, atol=2e-6, rtol=5e-6)


def gone_on(folder: Path, source: str | None, target: str, *overrides: str) -> list[dict]:
    """The weights that come from the checkpoint `source`, and those that go to `target` after a
    step."""
    with passes.built(plan_of(folder, "replay=off", *overrides)) as policy:
        if source:
            policy.load(folder / source)
        first = {name: tensor.clone() for name, tensor in policy.weights()}
        batch = random_batch()
        sizes = policy.topo.dp_size, 128, policy.plan.row_alignment, policy.topo.cp_size
        passes.step(policy, batch, plan_microbatches(batch.seqlens, *sizes), replay=False)
        policy.save(folder / target)
        return [first, {name: tensor.clone() for name, tensor in policy.weights()}]


def gone_on_split(group: dist.ProcessGroup, folder: Path) -> list[dict]:
    return gone_on(folder, "one", "two", "parallel.tp=2")


def test_weights_of_AllHeadsNorm_go_from_layout_to_layout(tmp_path: Path):
    write_model(tmp_path, MINIMAX)
    _, saved = gone_on(tmp_path, None, "one")
    (loaded, changed), (also_loaded, _) = run_ranks(gone_on_split, 2, tmp_path)
    assert_equal(loaded, saved)
    assert_equal(also_loaded, saved)
    assert_equal(gone_on(tmp_path, "two", "three")[0], changed)
    norm = "model.layers.0.self_attn.q_norm.weight"
    assert not torch.equal(saved[norm], changed[norm])


def assert_equal(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
