"""token_logprob: log-prob and entropy, GLM-4.7-Flash's vocabulary, whole and one of 8 shards."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import peers_logprob as peers
from benchmarks.measure import Case
from pyrl_ext.loss import vocab_parallel

VOCAB = 154880
SHAPES = [(VOCAB, torch.bfloat16), (VOCAB // 8, torch.bfloat16), (VOCAB // 8, torch.float32)]
EXACT_ROWS = 64
ERROR = 1e-5  # of our log-probs and entropies against float64 [nats]

Values = tuple[Tensor | None, ...]  # log-probs, entropies and gradients; None: not what ours is
Method = Callable[[Tensor, Tensor], peers.Pair]


def token_logprob(device: str, shrink: int = 1) -> Iterator[Case]:
    tokens = max((128 if device == "cpu" else 8192) // shrink, 2)
    # a package writes over the logits that it is given
    packages = peers.packages(peers.PACKAGES) if device == "cuda" else {}
    for vocab, dtype in SHAPES:
        g = torch.Generator().manual_seed(0)
        rows = torch.randn(min(tokens, 256), vocab, generator=g).to(device, dtype)
        logits = rows.repeat(-(-tokens // len(rows)), 1)[:tokens]
        targets = torch.randint(vocab, (tokens,), generator=g).to(device)
        grads = torch.randn(2, tokens, generator=g).to(device)
        methods: dict[str, Method] = {
            "eager": peers.eager,
            "several passes": peers.several_passes,
            "torch.compile": peers.compiled("inductor" if shrink == 1 else "eager"),
            "megatron, log-prob only": peers.megatron,
        }
        if dtype != torch.float32:
            methods["eager, bf16"] = peers.eager_as_is
        problem = (logits, targets, grads)
        ours = {n: _inplace(*problem, peers.of_package(n, f)) for n, f in packages.items()}
        writing = {f"{name}, log-prob only": run for name, run in ours.items()}
        yield from _cases(problem, methods, writing, device)


def _cases(
    problem: tuple[Tensor, Tensor, Tensor],
    methods: dict[str, Method],
    writing: dict[str, Callable[[], Values]],
    device: str,
) -> Iterator[Case]:
    logits, targets, _ = problem
    ours = partial(vocab_parallel.logprobs, with_entropy=True)
    size = logits.nbytes
    of_rows = 8 * len(logits)
    name = f"{len(logits)} x {logits.shape[1]} {str(logits.dtype)[6:]}"
    exact = exact_error(peers.eager_as_is(logits[:EXACT_ROWS].double(), targets[:EXACT_ROWS]))
    yield Case(
        f"forward {name}",
        _forward(logits, targets, ours),
        {n: _forward(logits, targets, method) for n, method in methods.items()},
        moved=size,
        written=of_rows,
        at_least={} if device == "cpu" else {"% of floor": 85},
        agree=agree,
        error=exact,
        error_at_most=ERROR,
    )
    held = {n: methods[n] for n in ("eager", "several passes")}  # others free what they keep
    yield Case(
        f"backward {name}",
        _backward(*problem, ours),
        {n: _backward(*problem, method) for n, method in held.items()},
        moved=2 * size,
        written=size,
        agree=agree,
    )
    # against torch.compile for the whole vocabulary, whose temporaries no cache holds; with half
    # the vector width ours takes longer, and their page faults do not
    times = 20 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 10
    cpu = {"several passes": 10} | ({"torch.compile": times} if logits.shape[1] >= VOCAB else {})
    yield Case(
        f"both in place {name}",
        _inplace(*problem, partial(ours, inplace=True)),
        {n: both(*problem, method) for n, method in methods.items()} | writing,
        moved=3 * size,
        written=size,
        at_least=cpu if device == "cpu" else {"% of floor": 80},
        agree=agree,
        error=exact,
        error_at_most=ERROR,
    )


def exact_error(exact: peers.Pair) -> Callable[[Values], float]:
    """The largest error of the first log-probs and entropies."""

    def error(found: Values) -> float:
        pairs = [(a, b) for a, b in zip(found[:2], exact, strict=True) if a is not None and a.ndim]
        return max(
            ((a[: len(b)].double() - b).abs().max().item() for a, b in pairs),  # type: ignore
            default=torch.nan,
        )

    return error


def agree(ours: Values, theirs: Values) -> bool:
    """True if a baseline computes what ours does: log-probs and entropies to 5e-3 or their dtype
    (torch's entropy is off by 1e-4 on processors without AVX-512), gradients to the logits' dtype.
    """

    def close(a: Tensor, b: Tensor) -> bool:
        step = max(torch.finfo(x.dtype).eps for x in (a, b))
        if a.ndim == 1:
            return torch.allclose(a, b.float(), rtol=8 * step, atol=5e-3)
        return torch.allclose(a, b, rtol=4 * step, atol=4 * step * float(a.abs().max()))

    pairs = zip(ours, theirs, strict=True)
    return all(close(a, b) for a, b in pairs if a is not None and b is not None)


def _forward(logits: Tensor, targets: Tensor, method: Method) -> Callable[[], Values]:
    @torch.no_grad()
    def run() -> Values:
        return *method(logits, targets), None

    return run


def both(logits: Tensor, targets: Tensor, grads: Tensor, method: Method) -> Callable[[], Values]:
    def run() -> Values:
        leaf = logits.detach().requires_grad_()
        return gradients(*method(leaf, targets), (leaf,), grads)

    return run


def gradients(
    logprob: Tensor, entropy: Tensor | None, leaves: Sequence[Tensor], grads: Tensor
) -> Values:
    """Log-probs, entropies and gradients; those of log-probs alone are not compared."""
    if entropy is None:
        torch.autograd.grad(logprob, leaves, grads[0] if logprob.ndim else None)
        return logprob.detach(), None, *(None for _ in leaves)
    found = torch.autograd.grad((logprob, entropy), leaves, [*grads.to(entropy.dtype)])
    return logprob.detach(), entropy.detach(), *found


def _inplace(
    logits: Tensor, targets: Tensor, grads: Tensor, method: Method
) -> Callable[[], Values]:
    """On a copy of the logits that ``method`` writes its gradient over: the first call, which is
    the one compared, gets the logits, those timed get what the one before them wrote."""
    copy: list[Tensor] = []

    def run() -> Values:
        if not copy:
            copy.append(logits.clone())
        return both(copy[0], targets, grads, method)()

    return run


def _backward(
    logits: Tensor, targets: Tensor, grads: Tensor, method: Method
) -> Callable[[], Values]:
    leaf = logits.detach().requires_grad_()
    graph: list[Tensor] = []

    def run() -> Values:
        if not graph:
            graph.extend(x for x in method(leaf, targets) if x is not None)
        return None, None, torch.autograd.grad(graph, leaf, [*grads], retain_graph=True)[0]

    return run
