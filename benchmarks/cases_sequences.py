"""gated_delta_rule: packed sequences in chunks, against transformers' torch form of a batch."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks.measure import Case
from pyrl_ext import ops

# lengths of sequences, value heads, columns of a key and of a value: minibatches of
# configs/tiny_qwen3_next.yaml, of longer responses, and one long response of the 80B's heads
SIZES = [((17,) * 64, 8, 16), ((20, 100, 400, 500), 8, 16), ((100, 924), 4, 128)]


def padded(lengths: tuple[int, ...], *rows: Tensor) -> Tensor:
    """transformers' form, of a batch of sequences that are as long as the longest."""
    batch = [pad_sequence([*each.split(lengths)], batch_first=True) for each in rows]
    out = torch_chunk_gated_delta_rule(*batch)[0]
    return torch.cat([each[:length] for each, length in zip(out, lengths, strict=True)])


def close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """To the rounding of float32 over a sequence."""
    pairs = zip(ours, theirs, strict=True)
    return all((a - b).abs().max() <= 1e-4 * b.abs().max() for a, b in pairs)


def gated_delta_rule(device: str, shrink: int = 1) -> Iterator[Case]:
    """Forward, and forward and backward."""
    for lengths, heads, width in SIZES:
        lengths = tuple(max(length // shrink, 1) for length in lengths)
        shape = sum(lengths), heads
        q, k = (F.normalize(torch.randn(*shape, width, device=device), dim=-1) for _ in range(2))
        v, grad = torch.randn(2, *shape, width, device=device)
        args = q, k, v, -torch.rand(shape, device=device), torch.rand(shape, device=device)
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        packed = partial(ops.gated_delta_rule, cu_seqlens=ends)
        batched = partial(padded, lengths)

        def forward(run: Callable, args: tuple[Tensor, ...] = args) -> list[Tensor]:
            return [run(*args)]

        def both(run: Callable, grad: Tensor = grad, args: tuple = args) -> list[Tensor]:
            leaves = [each.detach().requires_grad_() for each in args]
            return [*torch.autograd.grad(run(*leaves), leaves, grad)]

        name = f"{len(lengths)} sequences, {sum(lengths)} rows, {heads} heads of {width}"
        one = v.numel() * v.itemsize
        for kind, run, moved in (("forward", forward, 4), ("forward and backward", both, 11)):
            yield Case(
                f"{kind}, {name}",
                partial(run, packed),
                {"transformers": partial(run, batched)},
                moved=moved * one,
                written=one,
                at_least={"transformers": 1} if run is both else {},
                agree=close,
            )
