"""The LM head on one rank: products with float32 sums, statistics and gradients tile by tile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pyrl_ext.loss.fused_head.chunking import Job, wide
from pyrl_ext.ops import token_logprob_grad, token_logprob_grad_, token_logprob_stats

Kept = list[tuple[Tensor, Tensor | float]]  # of every tile, its logits less an offset [c]

CPU_TILE = 1 << 19  # logits in a tile, so that the statistics read them from a cache


@contextmanager
def _products(dtype: torch.dtype) -> Iterator[None]:
    """On a CPU, products of float32 tensors that hold ``dtype`` values.

    With bfloat16 instructions a processor multiplies these exactly and adds them up in float32,
    two to four times as fast as float32; what torch calls a lower precision loses nothing here, but
    for the gradients of logits, which are rounded as they are on a GPU.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def operand(x: Tensor) -> Tensor:
    """``x`` as products take it: a CPU has none of halves with a float32 result."""
    return x if x.is_cuda else x.to(wide(x.dtype))


def by_onednn(x: Tensor) -> bool:
    """Whether products of ``x`` take oneDNN's kernels, not those of the BLAS behind ``torch.mm``.

    Float32 on a CPU, where torch has oneDNN and it is not switched off: it compiles a kernel for
    the instructions there are, while MKL keeps AVX-512 for Intel's processors (on an AMD EPYC of
    2025, oneDNN takes 0.45 times as long). Both multiply and add in float32; oneDNN's chains of
    sums are longer, the rounding error of a logit 1.7 to 2.3 times MKL's (rms).
    """
    there = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    some = x.numel() > 0  # it has no kernel for nothing
    return x.device.type == "cpu" and x.dtype == torch.float32 and there and some


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, added up and returned in float32 (float64 of float64)."""
    if by_onednn(a):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    if a.dtype == wide(a.dtype):
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_mm(to: Tensor, a: Tensor, b: Tensor) -> None:
    """``to += a @ b`` without rounding the sum to the type of ``b``."""
    if by_onednn(a):
        to.add_(_mm(a, b))
    elif b.dtype == to.dtype:
        to.addmm_(a, b)
    else:
        torch.addmm(to, a, b, out_dtype=to.dtype, out=to)


class Head:
    """This rank's rows of the LM head, tile by tile."""

    def __init__(self, weight: Tensor, job: Job):
        rank = 0 if job.group is None else job.group.rank()
        columns = weight.shape[0]
        self.weight, self.first = weight, rank * columns
        self.width = min(max(job.valid_vocab - self.first, 0), columns)
        tokens = max((chunk.at.stop - chunk.at.start for chunk in job.chunks), default=1)
        self.tile = columns if weight.is_cuda else max(256, CPU_TILE // max(tokens, 1))
        self.tiles = len(range(0, self.width, self.tile))

    def _each(self) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, rows that are no padding, rows) of the head."""
        for a in range(0, self.width, self.tile):
            rows = self.weight[a : a + self.tile]
            yield a, min(self.width - a, len(rows)), operand(rows)

    def stats(
        self,
        x: Tensor,
        targets: Tensor,
        scale: Tensor,
        keep: Kept | None = None,
        narrow: bool = False,
    ) -> Tensor:
        """[4, c] statistics of the tokens with hidden states ``x``; ``keep`` gets the logits."""
        found = []
        with _products(self.weight.dtype):
            for a, width, rows in self._each():
                logits = _mm(x, rows.t())
                found.append(token_logprob_stats(logits, targets, scale, self.first + a, width))
                if keep is not None:
                    keep.append(_narrowed(logits, found[-1][0]) if narrow else (logits, 0.0))
        if not found:  # nothing but padding
            empty = scale.new_zeros(4, len(scale))
            empty[0] = -torch.inf
            return empty
        return found[0] if len(found) == 1 else _merge(torch.stack(found), scale)

    def gradients(
        self, x: Tensor, vectors: list[Tensor], to_weight: Tensor | None, kept: Kept | None = None
    ) -> Tensor:
        """d(hidden) [c, H] of this shard; d(weight) is added to ``to_weight``.

        Args:
            vectors: targets, scale, max, log_sum, entropy and the two gradients, [c] each.
            kept: the logits, taken out as they are used; None: they are computed again.
        """
        targets, scale, top, *others = vectors
        to_hidden = scale.new_zeros(x.shape)
        with _products(self.weight.dtype):
            for a, width, rows in self._each():
                logits, offset = (_mm(x, rows.t()), 0.0) if kept is None else kept.pop(0)
                if self.weight.dtype == scale.dtype:
                    logits = logits.to(scale.dtype)
                # over the logits, but for those kept in bfloat16: a second backward reads them
                own = logits.dtype == scale.dtype
                gradient = token_logprob_grad_ if own else token_logprob_grad
                at = (targets, scale, self.first + a, width)
                grad = gradient(logits, *at, top - offset, *others).to(rows.dtype)
                del logits  # before the next tile's
                _add_mm(to_hidden, grad, rows)
                if to_weight is not None:
                    _add_mm(to_weight[a : a + len(rows)], grad.t(), x)
        return to_hidden


def _narrowed(logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """The logits in bfloat16, less their maximum [c]: so the likely ones are rounded least, and no
    probability is off by more than 2^-9 / e."""
    base = top.masked_fill(top == -torch.inf, 0)
    out = torch.empty_like(logits, dtype=torch.bfloat16)
    return torch.sub(logits, base[:, None], out=out), base


def _merge(parts: Tensor, scale: Tensor) -> Tensor:
    """Statistics [R, 4, c] of parts of the columns -> [4, c] of all of them."""
    tops, sums, weights, targets = parts.unbind(1)
    top = tops.amax(0)
    shift = (tops - top.masked_fill(top == -torch.inf, 0)) * scale
    factor = shift.exp()
    shift = shift.masked_fill(factor == 0, 0)  # 0 * -inf
    weighted = (factor * (weights + shift * sums)).sum(0)
    return torch.stack([top, (factor * sums).sum(0), weighted, targets.sum(0)])
