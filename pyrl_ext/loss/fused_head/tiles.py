"""The LM head on one rank: products with float32 sums, statistics and gradients tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from pyrl_ext.loss.fused_head.chunking import CallPlan
from pyrl_ext.loss.vocab_parallel import shard_columns
from pyrl_ext.ops import token_logprob_grad, token_logprob_grad_, token_logprob_stats
from pyrl_ext.ops.tensors import accum_dtype, on_gpu
from pyrl_ext.ops.token_logprob.reference import merge_parts

CachedLogits = list[tuple[Tensor, Tensor | float]]  # (logits - offset, offset [c]) of every tile

CPU_TILE = 1 << 19  # logits of a tile, few enough to be read from the processor's cache


@contextmanager
def _products(dtype: torch.dtype) -> Generator[None]:
    """On a CPU, multiply float32 tensors that hold ``dtype`` values with ``dtype`` instructions.

    bfloat16 instructions multiply bfloat16 values exactly and add them up in float32, two to four
    times as fast as float32 ones. Lower precision is exact here except for logit gradients, which
    are rounded as on a GPU.
    """
    matmul = cast(Any, torch.backends.mkldnn).matmul
    before: str = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def operand(x: Tensor) -> Tensor:
    """``x`` in the dtype that products take: a CPU has no half-precision product with a float32
    result."""
    return x if on_gpu(x) else x.to(accum_dtype(x.dtype))


def by_onednn(x: Tensor) -> bool:
    """True if products of ``x`` use oneDNN's kernels instead of the BLAS behind ``torch.mm``.

    They do for float32 on a CPU if torch has oneDNN and it is enabled. oneDNN compiles a kernel for
    the instructions of the processor, while MKL uses AVX-512 on Intel's only (on an AMD EPYC of
    2025, oneDNN takes 0.45 times as long). Both multiply and add in float32; oneDNN adds longer
    chains, so that the rounding error of a logit is 1.7 to 2.3 times MKL's (rms).
    """
    available = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    float32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return float32_on_cpu and available and x.numel() > 0  # it has no kernel for empty tensors


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, added up and returned in float32 (float64 for float64)."""
    if by_onednn(a):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    if a.dtype == accum_dtype(a.dtype):
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` without rounding the sum to the dtype of ``b``."""
    if by_onednn(a):
        total.add_(_mm(a, b))
    elif b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def no_more(number: int, *_: Tensor) -> None:
    """Nothing is added to the gradient of a tile."""


class HeadTiles:
    """This rank's rows of the LM head, tile by tile."""

    def __init__(self, weight: Tensor, call: CallPlan):
        columns = weight.shape[0]
        self.weight = weight
        self.call = call
        self.first, self.width = shard_columns(columns, call.valid_vocab, call.group)
        tokens = max((chunk.part.stop - chunk.part.start for chunk in call.chunks), default=1)
        self.tile = columns if on_gpu(weight) else max(256, CPU_TILE // max(tokens, 1))

    def _tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, number of valid rows, rows) of each tile of the head."""
        for first in range(0, self.width, self.tile):
            rows = self.weight[first : first + self.tile]
            yield first, min(self.width - first, len(rows)), operand(rows)

    def _mask(self, part: slice, column: int, columns: int) -> Tensor | None:
        masks = self.call.masks
        return None if masks is None else masks.tile(part, column, columns)

    def logits(self, x: Tensor) -> list[Tensor]:
        """Logits [c, columns] of the tokens with hidden states ``x``, of each tile's valid
        columns."""
        with _products(self.weight.dtype):
            return [_mm(x, rows.t())[:, :width] for _, width, rows in self._tiles()]

    def stats(
        self,
        x: Tensor,
        targets: Tensor,
        scale: Tensor,
        part: slice,
        cache: CachedLogits | None = None,
        narrow: bool = False,
    ) -> Tensor:
        """Statistics [4, c] of the tokens with hidden states ``x``.

        Args:
            part: these tokens in chunk order.
            cache: the logits are appended to it.
            narrow: in bfloat16.
        """
        parts: list[Tensor] = []
        with _products(self.weight.dtype):
            for first, width, rows in self._tiles():
                logits = _mm(x, rows.t())
                column = self.first + first
                keep = self._mask(part, column, len(rows))
                parts.append(token_logprob_stats(logits, targets, scale, column, width, keep))
                if cache is not None:
                    cache.append(_narrowed(logits, parts[-1][0]) if narrow else (logits, 0.0))
        if not parts:  # this rank holds nothing but padding
            empty = scale.new_zeros(4, len(scale))
            empty[0] = -torch.inf
            return empty
        if len(parts) == 1:
            return parts[0]
        return torch.stack(merge_parts(torch.stack(parts), scale))

    def gradients(
        self,
        x: Tensor,
        vectors: list[Tensor],
        weight_grad: Tensor | None,
        part: slice,
        cache: CachedLogits | None = None,
        more: Callable[..., Tensor | None] = no_more,
    ) -> Tensor:
        """d(hidden) [c, H] of this shard; d(weight) is added to ``weight_grad``.

        Args:
            vectors: targets, scale, max, log_sum, entropy, the gradients of log-prob and entropy,
                and those that ``more`` takes, [c] each.
            part: these tokens in chunk order.
            cache: the logits, removed as they are used; None: they are computed again.
            more: (number of a tile, further gradients) -> what is added to the gradient of its
                first columns, or None.
        """
        targets, scale, top, log_sum, entropy, *grads = vectors
        hidden_grad = scale.new_zeros(x.shape)
        with _products(self.weight.dtype):
            for number, (first, width, rows) in enumerate(self._tiles()):
                logits, offset = (_mm(x, rows.t()), 0.0) if cache is None else cache.pop(0)
                if self.weight.dtype == scale.dtype:
                    logits = logits.to(scale.dtype)
                column = self.first + first
                keep = self._mask(part, column, len(rows))
                statistics = top - offset, log_sum, entropy, grads[0], grads[1]
                args = logits, targets, scale, column, width, *statistics, keep
                added = more(number, *grads[2:])  # reads the logits, which the gradient overwrites
                # in place, except for logits cached in bfloat16, which a second backward reads, and
                # for products of halves, which take half as much to write
                wide = logits.dtype == scale.dtype
                if wide and logits.dtype == rows.dtype:
                    grad = token_logprob_grad_(*args)
                else:
                    grad = token_logprob_grad(*args, dtype=rows.dtype if wide else None)
                if added is not None:
                    grad[:, : added.shape[1]].add_(added)
                grad = grad.to(rows.dtype)
                del logits, args  # before those of the next tile are allocated
                _add_mm(hidden_grad, grad, rows)
                if weight_grad is not None:
                    _add_mm(weight_grad[first : first + len(rows)], grad.t(), x)
        return hidden_grad


def _narrowed(logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """(logits minus their maximum in bfloat16, the maximum [c]).

    Likely tokens are rounded least: no probability is off by more than 2^-9 / e.
    """
    base = top.masked_fill(top == -torch.inf, 0)
    out = torch.empty_like(logits, dtype=torch.bfloat16)
    return torch.sub(logits, base[:, None], out=out), base
