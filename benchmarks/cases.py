"""What is measured: each function gives the cases of one kernel on a device."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Case
from pyrl_ext.layout import TokenLayout
from pyrl_ext.ops import gather_routes as routes_op
from pyrl_ext.ops import gather_rows as rows_op
from pyrl_ext.ops import token_logprob_grad, token_logprob_stats
from pyrl_ext.ops.gather_routes import reference as routes_reference
from pyrl_ext.ops.gather_rows import reference as rows_reference


def _lengths(count: int, longest: int) -> tuple[int, ...]:
    draw = np.random.default_rng(0).integers(longest // 16, longest, count, endpoint=True)
    return tuple(draw.tolist())


def gather_rows(device: str) -> Iterator[Case]:
    """Ragged rows of one CP rank of two."""
    layout = TokenLayout(_lengths(64, 4096), cp_size=2)
    rows = layout.rows(0).to(device)
    for name, width, dtype in [
        ("token ids, 8 B", 1, torch.int64),
        ("routes, 188 B", 188, torch.uint8),
        ("hidden 2048 bf16, 4 KiB", 2048, torch.bfloat16),
    ]:
        src = torch.ones(layout.num_tokens, width, dtype=dtype, device=device)
        fill = torch.zeros(width, dtype=dtype, device=device)
        size = width * src.element_size()
        yield Case(
            f"{name} x {len(rows)}",
            lambda src=src, fill=fill: rows_op(src, rows, fill),
            lambda src=src, fill=fill: rows_reference.gather_rows(src, rows, fill),
            len(rows) * (2 * size + 8),
        )


def gather_routes(device: str) -> Iterator[Case]:
    """The routes of one rank of TP4 CP2, all layers."""
    for longest, layers, top_k, experts in [(32768, 46, 4, 64), (8192, 89, 8, 160)]:
        layout = TokenLayout(_lengths(64, longest), cp_size=2, tp_size=4)
        rows = layout.rows(0, 0).to(device)
        routes = torch.randint(experts, (layout.num_tokens, layers, top_k), device=device)
        routes = routes.to(torch.uint8)
        slots = torch.arange(layers)
        for dtype in (torch.uint8, torch.int32):
            each = layers * top_k
            yield Case(
                f"{layers} x {top_k} to {str(dtype)[6:]} x {len(rows)}",
                lambda r=routes, s=slots, i=rows, e=experts, d=dtype: routes_op(r, i, s, e, d),
                lambda r=routes, s=slots, i=rows, e=experts, d=dtype: (
                    routes_reference.gather_routes(r, i, s, e, d)
                ),
                len(rows) * (each + each * dtype.itemsize + 8),
            )


def _torch_logprob(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(1, targets[:, None]), -(log_p.exp() * log_p).sum(-1)


def _torch_backward(logits: Tensor, targets: Tensor) -> Callable[[], object]:
    leaf = logits.detach().requires_grad_()
    logprob, entropy = _torch_logprob(leaf, targets)
    total = logprob.sum() + entropy.sum()
    return lambda: torch.autograd.grad(total, leaf, retain_graph=True)


def token_logprob(device: str) -> Iterator[Case]:
    """Log-prob and entropy, GLM-4.7-Flash's vocabulary, whole and one of eight shards."""
    tokens = 128 if device == "cpu" else 8192
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
            lambda x=logits, y=targets: _torch_logprob(x, y),
            size,
        )
        yield Case(
            f"backward {name}",
            lambda x=logits, y=targets, s=scale, r=of_rows: token_logprob_grad(
                x, y, s, 0, x.shape[1], *r
            ),
            _torch_backward(logits, targets),
            2 * size,
        )


def _per_sequence(lengths: tuple[int, ...], cp_size: int) -> Tensor:
    """Rows of rank 0, built a sequence at a time."""
    parts, start = [], 0
    for n in lengths:
        chunk = -(-n // (2 * cp_size))
        at = torch.arange(2 * cp_size * chunk)
        at = torch.cat([at[:chunk], at[-chunk:]])
        parts.append(torch.where(at < n, start + at, -1))
        start += n
    return torch.cat(parts)


def layout(device: str) -> Iterator[Case]:
    """The row index of one CP rank of two, from lengths (always on the host)."""
    for sequences, longest in [(64, 4096), (512, 16384), (4096, 512)]:
        lengths = _lengths(sequences, longest)
        yield Case(
            f"rows of {sequences} sequences up to {longest}",
            lambda n=lengths: TokenLayout(n, cp_size=2).rows(0),
            lambda n=lengths: _per_sequence(n, 2),
            8 * TokenLayout(lengths, cp_size=2).num_local,
        )


CASES = {
    "gather_rows": gather_rows,
    "gather_routes": gather_routes,
    "token_logprob": token_logprob,
    "layout": layout,
}
