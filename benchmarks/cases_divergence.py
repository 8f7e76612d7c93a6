"""The divergence from a teacher, and its gradients, from hidden states and heads of both models.

A result is the mean divergence and the gradients of the policy's hidden states and head. The
floor's operations are 6 T V H of the policy's head and 2 T V H_t of the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import Case
from pyrl_ext.loss.fused_head import linear_logprob_loss
from pyrl_ext.loss.fused_head.divergence import KINDS, Teacher

ERROR = 1e-5  # of our mean divergence and of the norm of its gradients against float64


class Problem(NamedTuple):
    hidden: Tensor  # [T, H], with a gradient, as the next
    weight: Tensor  # [V, H]
    hidden_t: Tensor  # [T, H_t]
    weight_t: Tensor  # [V, H_t]
    targets: Tensor  # [T]


Values = tuple[Tensor, Tensor, Tensor]


def divergence(device: str, shrink: int = 1) -> Iterator[Case]:
    """Both models have one width, as Liger's kernel requires."""
    tokens, size, vocab = (256, 512, 32768) if device == "cpu" else (8192, 2048, 154880)
    vocab //= shrink
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    scale = size**-0.5
    problem = Problem(
        normal(tokens, size).requires_grad_(),
        normal(vocab, size).mul_(scale).requires_grad_(),
        normal(tokens, size),
        normal(vocab, size).mul_(scale),
        torch.randint(vocab, (tokens,), generator=g).to(device),
    )
    written = sum(4 * x.numel() for x in problem[:2])
    for kind in KINDS:
        baselines: dict[str, Callable[[], Values]] = {
            "all logits": lambda kind=kind: _all_logits(problem, kind)
        }
        if kind == "js" and find_spec("liger_kernel"):
            baselines["liger_kernel"] = lambda: _liger(problem)
        yield Case(
            f"{kind} {tokens} x {size} x {vocab} {str(dtype)[6:]}",
            lambda kind=kind: _chunks(problem, kind),
            baselines,
            moved=2 * sum(x.nbytes for x in problem[:4]),
            written=written,
            agree=_agree,
            error=_error(problem, kind) if device == "cpu" else None,
            error_at_most=ERROR,
            flops=8 * tokens * vocab * size,
            product=(lambda: _product(problem), 2 * tokens * vocab * size),
        )


def _chunks(problem: Problem, kind: str) -> Values:
    hidden, weight, hidden_t, weight_t, targets = problem
    teacher = Teacher(hidden_t, weight_t, len(weight_t), kind)
    tokens = len(hidden)

    def mean(_logprob: Tensor, _entropy: Tensor, _tokens: Tensor, values: Tensor) -> Tensor:
        return values.sum() / tokens

    total = linear_logprob_loss(hidden, weight, targets, mean, teacher=teacher)
    return _with_gradients(total, hidden, weight)


def _all_logits(problem: Problem, kind: str) -> Values:
    hidden, weight, hidden_t, weight_t, _ = problem
    policy = (hidden @ weight.t()).log_softmax(-1)
    teacher = (hidden_t @ weight_t.t()).log_softmax(-1)
    return _with_gradients(_mean_divergence(policy, teacher, kind), hidden, weight)


def _mean_divergence(policy: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """From log-probs [T, V]; js with both models' weights 0.5."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1).mean()

    if kind == "reverse":
        return kl(policy, teacher)
    if kind == "forward":
        return kl(teacher, policy)
    mixed = torch.logaddexp(policy, teacher) - torch.tensor(2.0).log()
    return (kl(policy, mixed) + kl(teacher, mixed)) / 2


def _liger(problem: Problem) -> Values:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # pyright: ignore

    hidden, weight, hidden_t, weight_t, targets = problem
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False, chunk_size=len(hidden)
    )
    return _with_gradients(loss(hidden, weight, hidden_t, weight_t, targets), hidden, weight)


def _with_gradients(total: Tensor, hidden: Tensor, weight: Tensor) -> Values:
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    return total.detach(), of_hidden, of_weight


def _product(problem: Problem) -> Tensor:
    return torch.mm(problem.hidden.detach(), problem.weight.detach().t())


def _agree(ours: Values, theirs: Values) -> bool:
    bound = 1e-3 if ours[1].dtype == torch.float32 else 5e-2
    pairs = zip(ours, theirs, strict=True)
    return all((a.double() - b.double()).norm() <= bound * b.double().norm() for a, b in pairs)


def _error(problem: Problem, kind: str) -> Callable[[Values], float]:
    exact: list[Tensor] = []

    def error(found: Values) -> float:
        if not exact:
            hidden, weight, hidden_t, weight_t = (x.detach().double() for x in problem[:4])
            leaves = hidden.requires_grad_(), weight.requires_grad_()
            wide = Problem(*leaves, hidden_t, weight_t, problem.targets)
            exact.extend(_all_logits(wide, kind))
        return max(
            float((x.double() - want).norm() / want.norm())
            for x, want in zip(found, exact, strict=True)
        )

    return error
