"""token_logprob: log-prob and entropy, GLM-4.7-Flash's vocabulary, whole and one of 8 shards."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.measure import Case
from pyrl_ext.ops import token_logprob_grad, token_logprob_stats


def token_logprob(device: str, shrink: int = 1) -> Iterator[Case]:
    tokens = max((128 if device == "cpu" else 8192) // shrink, 2)
    for vocab, dtype in [
        (154880, torch.bfloat16),
        (19360, torch.bfloat16),
        (19360, torch.float32),
    ]:
        logits = torch.randn(tokens, vocab, device=device).to(dtype)
        targets = torch.randint(vocab, (tokens,), device=device)
        scale = torch.ones(tokens, device=device)
        top, total, weighted, _ = token_logprob_stats(logits, targets, scale, 0, vocab)
        log_sum = total.log()
        of_rows = (top, log_sum, log_sum - weighted / total, scale, scale)
        size, name = logits.nbytes, f"{tokens} x {vocab} {str(dtype)[6:]}"
        yield Case(
            f"forward {name}",
            lambda x=logits, y=targets, s=scale: token_logprob_stats(x, y, s, 0, x.shape[1]),
            {"torch": lambda x=logits, y=targets: logprob_entropy(x, y)},
            moved=size,
            written=4 * 4 * tokens,
            agree=_stats_agree,
        )
        yield Case(
            f"backward {name}",
            lambda x=logits, y=targets, s=scale, r=of_rows: token_logprob_grad(
                x, y, s, 0, x.shape[1], *r
            ),
            {"torch": _torch_backward(logits, targets)},
            moved=2 * size,
            written=size,
            agree=lambda ours, theirs: torch.allclose(ours, theirs, rtol=0.02, atol=1e-4),
        )


def logprob_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _stats_agree(stats: tuple[Tensor, ...], theirs: tuple[Tensor, Tensor]) -> bool:
    top, total, weighted, target = stats
    log_sum = total.log()
    ours = (target - top - log_sum, log_sum - weighted / total)
    return all(torch.allclose(a, b, rtol=0, atol=1e-3) for a, b in zip(ours, theirs, strict=True))


def _torch_backward(logits: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    leaf = logits.detach().requires_grad_()
    logprob, entropy = logprob_entropy(leaf, targets)
    total = logprob.sum() + entropy.sum()
    return lambda: torch.autograd.grad(total, leaf, retain_graph=True)[0]
