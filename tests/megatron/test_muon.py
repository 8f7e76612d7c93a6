"""Muon's updates against its formulas in float64, and which parameters it steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.megatron.muon import mark_whole, matrices
from pyrl_ext.megatron.optimizer import name_of, state_bytes, state_tensors
from pyrl_ext.plan import Plan
from tests.helpers import passes
from tests.helpers.tiny import CONFIG, QWEN3, tiny_plan
from tests.parity import apart

pytestmark = pytest.mark.multiprocess

NEXT = CONFIG.with_name("tiny_qwen3_next.yaml")
NEMOTRON = CONFIG.with_name("tiny_nemotron.yaml")
LR = 1.0  # updates are larger than weights, and than their rounding
DECAY = 0.1
MOMENTUM = 0.9
RMS = 0.3
OPTIONS = (
    "optimizer.name=muon",
    f"optimizer.lr={LR}",
    f"optimizer.weight_decay={DECAY}",
    f"optimizer.muon_momentum={MOMENTUM}",
    f"optimizer.muon_rms={RMS}",
    "optimizer.clip_grad=0",
)
# of the five iterations, as emerging-optimizers has them under "quintic"
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton and Schulz's iteration: x becomes a x + b (x x^T) x + c (x x^T)^2 x."""
    x = matrix.double()
    if wide := x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm()
    for a, b, c in COEFFICIENTS:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.T if wide else x


def scaled(matrix: Tensor) -> Tensor:
    return orthogonal(matrix) * RMS * max(matrix.shape) ** 0.5


def update_of(name: str, momentum: Tensor, plan: Plan) -> Tensor:
    """The update of one parameter; queries, keys and values are matrices for themselves."""
    if not name.endswith("linear_qkv.weight"):
        return scaled(momentum)
    sizes: Any = plan.sizes
    groups = sizes.num_key_value_heads
    queries = sizes.num_attention_heads // groups * sizes.head_width
    rows = [queries, sizes.head_width, sizes.head_width]
    if sizes.has_output_gate:
        rows.insert(0, queries)
    updates = []
    for part in momentum.unflatten(0, (groups, -1)).split(rows, dim=1):
        updates.append(scaled(part.flatten(0, 1)).unflatten(0, (groups, -1)))
    return torch.cat(updates, dim=1).flatten(0, 1)


def is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and name.split(".")[0] not in ("embedding", "output_layer")


@pytest.mark.parametrize(
    ("config", "dtype", "bound"),
    [
        (CONFIG, "float32", 1e-5),
        (QWEN3, "float32", 1e-5),
        (NEXT, "float32", 1e-5),
        (NEMOTRON, "float32", 1e-5),
        (QWEN3, "bfloat16", 0.03),  # so are the iterations
    ],
    ids=lambda each: each.stem if isinstance(each, Path) else str(each),
)
def test_updates_are_those_of_the_formulas(config: Path, dtype: str, bound: float):
    """Two steps, so that momentum has a past; of latent attention, of stacked experts one by one,
    of fused queries, keys, values and gates, and of layers with states. AdamW steps the rest."""
    plan = tiny_plan(*OPTIONS, f"model.dtype={dtype}", config=config)
    options = plan.optimizer
    g = torch.Generator().manual_seed(0)
    with passes.built(plan) as policy, torch.no_grad():
        module = policy.llm
        live = module.named_parameters()
        live = {name: p for name, p in live.items() if not name.endswith("expert_bias")}  # a buffer
        before = {name: tensor.double() for name, tensor in live.items()}
        want = {name: tensor.clone() for name, tensor in before.items()}
        momenta = {n: torch.zeros_like(w) for n, w in want.items() if is_matrix(n, w)}
        rest = [w for name, w in want.items() if name not in momenta]
        adam = torch.optim.AdamW(rest, LR, options.betas, options.eps, DECAY)
        assert len(momenta) > 20 and len(rest) > 10
        for _ in range(2):
            module.zero_grad()
            buffers = module.gradients()
            for name, weight in want.items():
                grad = torch.randn(weight.shape, generator=g)
                buffers[name].copy_(grad)
                weight.grad = grad.double()
                if name not in momenta:
                    continue
                momenta[name].lerp_(weight.grad, 1 - MOMENTUM)
                ahead = weight.grad.lerp(momenta[name], MOMENTUM)
                weight *= 1 - LR * DECAY
                weight -= LR * update_of(name, ahead, plan)
            adam.step()
            module.optimizer.step()
        off = {n: apart(p.double() - before[n], want[n] - before[n]) for n, p in live.items()}
        worst = max(off, key=off.__getitem__)
        print(worst, off[worst])
        assert off[worst] < bound, worst


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_bytes_are_those_of_the_optimizer(dtype: str):
    """One moment of a matrix, two of what AdamW steps; and masters in bfloat16."""
    plan = tiny_plan("optimizer.name=muon", f"model.dtype={dtype}")
    with passes.built(plan) as policy:
        module = policy.llm
        assert name_of(module.optimizer) == "pyrl_ext.Muon, torch.AdamW"
        module.zero_grad()
        module.optimizer.step()
        weights = {t.data_ptr() for t in module.named_parameters().values()}
        held = [t for t in state_tensors(module.optimizer) if t.data_ptr() not in weights]
        assert state_bytes(plan, module.chunks) == sum(t.nbytes for t in held)
        number = sum(p.numel() for p in module.chunks[0].parameters())
        assert sum(t.nbytes for t in held) < (5 if dtype == "float32" else 9) * number


def test_mark_whole_takes_back_that_a_copied_matrix_is_split():
    """Marks as TransformerEngine and megatron leave them on a linear that every rank holds whole,
    and on one whose rows are split."""
    chunk = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("whole", "split")})
    marks: dict[str, Any] = {name: linear.weight for name, linear in chunk.items()}
    for name, weight in marks.items():
        weight.tensor_model_parallel = name == "split"
        weight.partition_dim = 0
    assert [id(p) for p in matrices([chunk])] == [id(weight) for weight in marks.values()]
    mark_whole([chunk])
    assert {name: weight.partition_dim for name, weight in marks.items()} == {
        "whole": -1,
        "split": 0,
    }
