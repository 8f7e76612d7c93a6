"""linear_logprob: log-probs, entropies and the gradients of both from hidden states and the head.

A result is log-probs, entropies and the gradients of hidden states and weight. ``written`` counts
the gradients and, once more in float32, the sums that the weight's is made of.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import peers_logprob as peers
from benchmarks.cases_logprob import ERROR, EXACT_ROWS, Values, exact_error, gradients
from benchmarks.measure import Case, call_seconds
from pyrl_ext.loss import fused_head as fused
from pyrl_ext.loss.fused_head.chunking import plan_call

# hidden, vocabulary: GLM-4.7-Flash, 355B
FLASH = (2048, 154880)
LARGE = (5120, 151552)
# Most seconds of one product on a CPU: the number of rows follows from it where the instruction set
# has no bfloat16 products.
PRODUCT_SECONDS = 0.5
FEWEST_ROWS = 16
TENSOR_CORE_ERROR = 3e-5  # [nats]: their sums of 2048 products are cut off, not rounded
FITS = 100e9  # bytes that all logits, their softmax and the gradients of both may take on cuda


class Problem(NamedTuple):
    hidden: Tensor  # [T, H], with a gradient, as the next
    weight: Tensor  # [V, H]
    targets: Tensor  # [T]
    grads: Tensor  # [2, T] float32, of log-probs and entropies

    def gradients(self, logprob: Tensor, entropy: Tensor | None) -> Values:
        return gradients(logprob, entropy, (self.hidden, self.weight), self.grads)


def linear_logprob(device: str, shrink: int = 1) -> Iterator[Case]:
    """A vocabulary of which there are 8 shards is one of them, without what ranks exchange."""
    packages = peers.packages(peers.FUSED) if device == "cuda" else {}
    for name, tokens, size, vocab, dtype in _shapes(device):
        vocab //= shrink
        g = torch.Generator("cpu" if device == "meta" else device).manual_seed(0)
        hidden = torch.randn(tokens, size, generator=g, device=device).to(dtype)
        weight = torch.randn(vocab, size, generator=g, device=device).mul_(size**-0.5).to(dtype)
        problem = Problem(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            torch.randint(vocab, (tokens,), generator=g, device=device),
            torch.randn(2, tokens, generator=g, device=device),
        )
        label = f"{name}{tokens} x {size} x {vocab} {str(dtype)[6:]}"
        yield from _cases(label, problem, _others(problem, packages), device)


def _shapes(device: str) -> list[tuple[str, int, int, int, torch.dtype]]:
    """(name, T, H, V, dtype)"""
    if device == "cpu":
        return [("", _rows(512, 32768, d), 512, 32768, d) for d in (torch.float32, torch.bfloat16)]
    return [
        (f"{name} 1/{ranks}, ", tokens, size, vocab // ranks, torch.bfloat16)
        for tokens in (8192, 65536)
        for name, (size, vocab) in {"Flash": FLASH, "355B": LARGE}.items()
        for ranks in (1, 8)
    ]


def _fast(dtype: torch.dtype) -> bool:
    """True if this processor multiplies ``dtype`` about as fast as float32."""
    return dtype == torch.float32 or "AVX512" in torch.backends.cpu.get_cpu_capability()


def _rows(size: int, vocab: int, dtype: torch.dtype) -> int:
    """512 rows, or, where products of ``dtype`` are slow, as many as PRODUCT_SECONDS allow."""
    rows = 512
    if _fast(dtype):
        return rows
    x = torch.ones(FEWEST_ROWS, size, dtype=dtype)
    w = torch.ones(vocab // 8, size, dtype=dtype)
    logits = x @ w.t()
    products = (lambda: x @ w.t(), lambda: logits @ w, lambda: logits.t() @ x)
    slowest = max(min(call_seconds(product, "cpu", 0.0, 2)) for product in products)
    while rows > FEWEST_ROWS and rows * slowest * 8 / FEWEST_ROWS > PRODUCT_SECONDS:
        rows //= 2
    return rows


def _bar(weight: Tensor) -> dict[str, float]:
    """Twice as fast as the loop, whose products are float32 by torch's BLAS.

    For a float32 head that takes a faster matrix library, and 1.25 times where oneDNN, which ours
    uses, is not much faster than the BLAS (MKL on Intel's processors). No bar for a bfloat16 head
    where the processor has no bfloat16 products.
    """
    if not _fast(weight.dtype):
        return {}
    return {"chunks, fp32 logits": 1.25 if weight.dtype == torch.float32 and not _ahead() else 2}


@cache
def _ahead() -> bool:
    """True if oneDNN multiplies float32 at least 1.5 times as fast as torch's BLAS here."""
    x = torch.ones(512, 512)
    w = torch.ones(1024, 512)
    blas, onednn = (
        min(call_seconds(product, "cpu", 0.05, 5))
        for product in (
            lambda: torch.mm(x, w.t()),
            lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
        )
    )
    return blas >= 1.5 * onednn


def _cases(
    name: str, problem: Problem, others: dict[str, Callable[[], Values]], device: str
) -> Iterator[Case]:
    hidden, weight, targets, _ = problem
    tokens, (vocab, size) = len(hidden), weight.shape
    few = hidden[:EXACT_ROWS].detach().double() @ weight.detach().double().t()
    exact = peers.eager_as_is(few, targets[:EXACT_ROWS])
    product = _product(problem)
    on_cpu = device == "cpu"
    cases = []
    for mode, (run, products) in {
        "recompute": (lambda: _outside(problem, 0), 4),
        "cache": (lambda: _outside(problem, 2 * tokens * vocab), 3),
        "callback": (lambda: _inside(problem), 3),
    }.items():
        fast = {} if on_cpu or mode != "callback" else {"% of floor": 70}
        lean = {} if on_cpu or mode != "callback" else {"MB beyond the result": 2000}
        cases.append(
            Case(
                f"{mode} {name}",
                run,
                others,
                moved=hidden.nbytes + weight.nbytes + _written(problem),
                written=_written(problem),
                at_least=_bar(weight) if on_cpu else fast,
                at_most=lean,
                agree=partial(agree, cached=mode == "cache"),
                error=exact_error(exact),
                error_at_most=ERROR if on_cpu else TENSOR_CORE_ERROR,
                flops=2 * products * tokens * vocab * size,
                product=product,
            )
        )
    yield from cases
    if on_cpu:
        yield _half(cases[0], problem, exact)


def _half(whole: Case, problem: Problem, exact: peers.Pair) -> Case:
    """Prompts carry no loss: ours leaves their rows out, a loop over all rows does not."""
    rows = torch.arange(0, len(problem.hidden), 2)
    grads = torch.zeros_like(problem.grads)
    grads[:, rows] = problem.grads[:, rows]
    problem = problem._replace(grads=grads)
    loop = "chunks, fp32 logits"
    error = exact_error(tuple(x[::2] for x in exact if x is not None))  # type: ignore[arg-type]

    def values(found: Values) -> Values:
        return *(x[rows] for x in found[:2] if x is not None), *found[2:]

    return replace(
        whole,
        name=whole.name.replace("recompute", "recompute, half of the rows carry no loss"),
        run=lambda: _outside(problem, 0, rows),
        baselines={loop: _others(problem, {})[loop]},
        agree=lambda a, b: agree(values(a), values(b), cached=False),
        error=lambda found: error(values(found)),
        flops=whole.flops / 2,
    )


def _written(problem: Problem) -> int:
    """Gradients, and a narrow weight's sums in float32."""
    weight = problem.weight
    return problem.hidden.nbytes + weight.nbytes + 4 * weight.numel() * (weight.itemsize < 4)


def agree(ours: Values, theirs: Values, cached: bool) -> bool:
    """True if results differ by no more than float32, bfloat16 products or logits rounded to
    bfloat16 (an error of 0.03) allow.

    Ours in the cache are rounded too, which gradients show. A sum over tokens has their mean's
    error.
    """
    assert ours[0] is not None and ours[2] is not None and theirs[0] is not None
    narrow = ours[2].dtype == torch.bfloat16
    atol, step = (0.1, 0.1) if narrow else (5e-3, 0.01 if cached else 1e-4)
    if theirs[0].ndim == 0:
        return torch.allclose(ours[0].mean(), theirs[0] / len(ours[0]), rtol=0, atol=atol)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return all(
        torch.allclose(a, b, rtol=0, atol=atol if a.ndim == 1 else step * float(a.abs().max()))
        for a, b in pairs
    )


def _product(problem: Problem) -> tuple[Callable[[], Tensor], float]:
    """The product that gives a chunk's logits in the type of the weight, and its operations."""
    hidden, weight, targets, _ = problem
    call = plan_call("linear_logprob", hidden, weight, targets, None, chunk_bytes=None)
    x = hidden.detach()[: call.chunks[0].part.stop]
    rows = weight.detach()
    return lambda: torch.mm(x, rows.t()), 2 * len(x) * weight.numel()


def _outside(problem: Problem, cache_bytes: int, rows: Tensor | None = None) -> Values:
    found = fused.linear_logprob(*problem[:3], cache_bytes=cache_bytes, rows=rows)
    return problem.gradients(*found)


def _inside(problem: Problem) -> Values:
    found = torch.empty_like(problem.grads)

    def loss(logprob: Tensor, entropy: Tensor, tokens: Tensor) -> Tensor:
        values = torch.stack([logprob, entropy])
        found[:, tokens] = values.detach()
        return (problem.grads[:, tokens] * values).sum()

    total = fused.linear_logprob_loss(*problem[:3], loss)
    return *found, *torch.autograd.grad(total, problem[:2])


def _others(
    problem: Problem, packages: dict[str, Callable[..., Tensor]]
) -> dict[str, Callable[[], Values]]:
    """Loops over chunks of tokens that are computed again in the backward; torch with all logits
    where they fit. ``bf16 logits``: the product is rounded to bfloat16, then softmax in float32."""
    hidden, weight, targets, _ = problem
    narrow = weight.dtype == torch.bfloat16
    on_cpu = not weight.is_cuda
    found: dict[str, Callable[[], Values]] = {}
    # products of float32 run at a tenth of the rate on a GPU: there only of the fewer tokens
    if on_cpu or len(hidden) <= 8192:
        found["chunks, fp32 logits"] = lambda: _chunks(problem, torch.float32)
    if narrow:
        found["chunks, bf16 logits"] = lambda: _chunks(problem, torch.bfloat16)
    if on_cpu or 6 * 4 * len(hidden) * len(weight) < FITS:
        name = "all bf16 logits" if narrow else "all logits"
        found[name] = lambda: problem.gradients(*peers.eager(hidden @ weight.t(), targets))
    for name, function in packages.items():
        found[f"{name}, log-prob only"] = lambda n=name, f=function: _package(problem, n, f)
    return found


def _chunks(problem: Problem, dtype: torch.dtype) -> Values:
    """``dtype``: of the products."""
    hidden, weight, targets, _ = problem
    rows = weight.to(dtype)

    def logprobs(x: Tensor, at: Tensor, rows: Tensor) -> peers.Pair:
        return peers.eager(x.to(dtype) @ rows.t(), at)

    step = 1024 if hidden.is_cuda else 128
    parts = [
        checkpoint(logprobs, x, at, rows, use_reentrant=False)
        for x, at in zip(hidden.split(step), targets.split(step), strict=True)
    ]
    logprob, entropy = (torch.cat(part) for part in zip(*parts, strict=True))  # type: ignore
    return problem.gradients(logprob, entropy)


def _package(problem: Problem, name: str, function: Callable[..., Tensor]) -> Values:
    """liger_kernel makes its gradients in the forward, all tokens weighing the same."""
    reduction = "sum" if name == "liger_kernel" else "none"
    loss = function(*problem[:3], reduction=reduction)
    return problem.gradients(-loss, None)
