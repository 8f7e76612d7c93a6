"""Divergence from a teacher inside the fused head, against float64 autograd on all logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyrl_ext.loss.fused_head import linear_logprob_loss, tiles
from pyrl_ext.loss.fused_head.divergence import KINDS, Teacher
from tests.helpers.ranks import run_ranks
from tests.helpers.teachers import divergence

pytestmark = pytest.mark.multiprocess

T = 48
H = 16
H_TEACHER = 24
VOCAB = 2400
ROWS = torch.tensor([0, 1, 5, 6, 7, 20, 21, 22, 23, 30, 41, 47])
CHUNK = 20 * VOCAB * 4 * 6  # bytes: 20 tokens of float32 on one rank
# valid columns of the policy and of the teacher; with four ranks the last one holds padding alone
VALID = [(1800, 1800), (1800, 2000), (1800, 1500)]


def problem(dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states and heads of both models, targets, temperatures and coefficients."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    models = [normal(T, H), normal(VOCAB, H), normal(T, H_TEACHER), normal(VOCAB, H_TEACHER)]
    targets = torch.randint(0, 1500, (T,), generator=g)
    temperature = 0.5 + torch.rand(T, generator=g, dtype=torch.float64)
    return [*(x.to(dtype) for x in models), targets, temperature, normal(3, T)]


def exact(dtype: torch.dtype, kind: str, share: float, valid: tuple[int, int], rows: Any) -> Any:
    """(loss, d hidden, d weight) in float64."""
    hidden, weight, hidden_t, weight_t, targets, temperature, coefficients = problem(dtype)
    leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = leaves[0] @ leaves[1].t() / temperature[:, None]
    log_p = logits[:, : valid[0]].log_softmax(-1)
    logprob = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    common = min(valid)
    theirs = hidden_t.double() @ weight_t.double().t() / temperature[:, None]
    found = divergence(
        logits[:, :common].log_softmax(-1), theirs[:, :common].log_softmax(-1), kind, share
    )
    total = (coefficients * torch.stack([logprob, entropy, found]))[:, rows].sum()
    return total.detach(), *torch.autograd.grad(total, leaves)


def fused(
    dtype: torch.dtype, kind: str, share: float, valid: tuple[int, int], rows: Any, **more: Any
) -> Any:
    """(loss, d hidden, d weight) of this rank's shard by the chunks."""
    hidden, weight, hidden_t, weight_t, targets, temperature, coefficients = problem(dtype)
    group = more.get("group")
    ranks = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    columns = VOCAB // ranks
    first = rank * columns
    tokens = slice(None)
    if more.get("sequence_parallel"):
        tokens = slice(rank * T // ranks, (rank + 1) * T // ranks)
    leaves = (
        hidden[tokens].clone().requires_grad_(),
        weight[first : first + columns].clone().requires_grad_(),
    )

    def loss(logprob, entropy, where, divergence):
        parts = torch.stack([logprob, entropy, divergence])
        return (coefficients[:, where].to(parts.dtype) * parts).sum()

    total = linear_logprob_loss(
        *leaves,
        targets,
        loss,
        temperature=temperature,
        valid_vocab=valid[0],
        rows=None if isinstance(rows, slice) else rows,
        chunk_bytes=CHUNK,
        teacher=Teacher(hidden_t, weight_t[first : first + columns], valid[1], kind, share),
        **more,
    )
    return total.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("rows", [slice(None), ROWS])
@pytest.mark.parametrize("valid", VALID)
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_and_gradient_are_those_of_all_logits(kind, valid, rows):
    for share in (0.5, 0.9) if kind == "js" else (0.5,):
        want = exact(torch.float64, kind, share, valid, rows)
        for found, value in zip(fused(torch.float64, kind, share, valid, rows), want, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("valid", VALID)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_the_vocabulary_add_up(kind, valid, monkeypatch):
    """Ten tiles of each head, of which the policy or the teacher may have more than the other."""
    monkeypatch.setattr(tiles, "CPU_TILE", 1)  # the smallest tile has 256 columns
    want = exact(torch.float64, kind, 0.5, valid, ROWS)
    for found, value in zip(fused(torch.float64, kind, 0.5, valid, ROWS), want, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_neither_model_expects_leave_the_numbers_finite(kind):
    """In float32 most probabilities of both models are 0."""
    hidden, weight, hidden_t, weight_t, targets, *_ = problem(torch.float32)
    hidden = (100 * hidden).requires_grad_()
    hidden_t = 100 * hidden_t
    given = (hidden, weight, targets, lambda *values: values[3].sum())
    total = linear_logprob_loss(*given, teacher=Teacher(hidden_t, weight_t, VOCAB, kind))
    (found,) = torch.autograd.grad(total, hidden)
    ours = (hidden.detach().double() @ weight.double().t()).log_softmax(-1)
    theirs = (hidden_t.double() @ weight_t.double().t()).log_softmax(-1)
    assert (ours < -110).float().mean() > 0.9 and (theirs < -110).float().mean() > 0.9
    want = divergence(ours, theirs, kind).sum()
    torch.testing.assert_close(total.detach().double(), want, rtol=1e-4, atol=0)
    assert found.isfinite().all() and found.any()


def test_a_chunk_has_room_for_the_numbers_of_both_models():
    hidden, weight, hidden_t, weight_t, targets, *_ = problem(torch.float32)
    sizes: list[int] = []

    def loss(logprob, entropy, where, divergence):
        sizes.append(len(where))
        return divergence.sum()

    teacher = Teacher(hidden_t, weight_t, VOCAB, "js")
    given = (hidden, weight, targets, loss)
    linear_logprob_loss(*given, chunk_bytes=CHUNK, teacher=teacher)
    assert sizes == [20, 20, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_in_low_precision_sums_are_in_float32(kind, dtype):
    """bfloat16 rounds the gradients of logits once, so a sum of some hundred of them by 1e-3."""
    want = exact(dtype, kind, 0.5, VALID[0], slice(None))
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for found, value in zip(fused(dtype, kind, 0.5, VALID[0], slice(None)), want, strict=True):
        assert (found.double() - value).norm() <= bound * value.norm()


def on_ranks(group: Any) -> None:
    for kind in KINDS:
        for valid in VALID:
            for rows in (slice(None), ROWS):
                for parallel in (False, True):
                    want = exact(torch.float64, kind, 0.7, valid, rows)
                    of = fused(
                        torch.float64,
                        kind,
                        0.7,
                        valid,
                        rows,
                        group=group,
                        sequence_parallel=parallel,
                    )
                    columns = VOCAB // group.size()
                    part = T // group.size()
                    tokens = slice(group.rank() * part, (group.rank() + 1) * part)
                    here = slice(group.rank() * columns, (group.rank() + 1) * columns)
                    mine = want[0], want[1][tokens if parallel else slice(None)], want[2][here]
                    for found, value in zip(of, mine, strict=True):
                        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_share_the_vocabulary_agree_with_one(world_size):
    run_ranks(on_ranks, world_size)


def sum_of_divergences(
    _logprob: torch.Tensor, _entropy: torch.Tensor, _tokens: torch.Tensor, found: torch.Tensor
) -> torch.Tensor:
    return found.sum()


def test_without_a_gradient_the_loss_is_the_same():
    with torch.no_grad():
        hidden, weight, hidden_t, weight_t, targets, temperature, _ = problem(torch.float64)
        teacher = Teacher(hidden_t, weight_t, VOCAB, "reverse")
        settings: Any = {"temperature": temperature, "teacher": teacher}
        total = linear_logprob_loss(hidden, weight, targets, sum_of_divergences, **settings)
    zeros = linear_logprob_loss(hidden_t, weight_t, targets, sum_of_divergences, **settings)
    logits = (hidden @ weight.t(), hidden_t @ weight_t.t())
    ours, theirs = ((x / temperature[:, None]).log_softmax(-1) for x in logits)
    torch.testing.assert_close(total, divergence(ours, theirs, "reverse", 0.5).sum())
    assert abs(zeros) < 1e-12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": torch.zeros(T - 1, H_TEACHER)}, r"expected \[48, H_t\], \[2400, H_t\]"),
        ({"weight": torch.zeros(VOCAB - 1, H_TEACHER)}, r"expected \[48, H_t\], \[2400, H_t\]"),
        ({"hidden": torch.zeros(T, H_TEACHER).double()}, "expected one dtype"),
        ({"kind": "backward"}, "expected one of reverse, forward, js"),
        ({"share": 1.0}, "a share between 0 and 1"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(wrong, message):
    hidden, weight, hidden_t, weight_t, targets, *_ = problem(torch.float32)
    teacher = replace(Teacher(hidden_t, weight_t, VOCAB, "js"), **wrong)
    with pytest.raises(ValueError, match=message):
        linear_logprob_loss(hidden, weight, targets, lambda *v: v[3].sum(), teacher=teacher)
