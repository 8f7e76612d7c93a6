"""token_logprob: what one vocabulary shard adds to the log-prob of a token, and its gradient.

With ``z = logits * scale`` (scale = 1 / temperature) over the columns of all shards::

    stats   of one shard, to be combined over shards: (max, sum, weighted, target)
    combine m = max over shards, S = sum(exp(z - m * scale)), W = sum((z - m * scale) * exp(...))
    logprob = (target - m) * scale - log S           entropy = log S - W / S

``stats`` and the gradient are one pass over the logits each; ``combine`` takes the statistics of
all shards, and ``rows`` is both at once for a vocabulary in one piece.
:mod:`pyrl_ext.loss.vocab_parallel` has the collective between them and the derivative. Differences
to the maximum are formed before anything is scaled or rounded, so large common offsets cost no
accuracy.

Backends: native (C++ threads with AVX-512, AVX2 or portable code chosen at run time; CUDA), triton,
reference (torch; float64 too).
Gradient: not registered; ``token_logprob_grad`` computes it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import FLOATS, INT64, Arguments, Like
from pyrl_ext.ops._op import Op

_ROWS = (
    "Tensor targets, Tensor scale, SymInt first, SymInt width, Tensor max, Tensor log_sum, "
    "Tensor entropy, Tensor grad_logprob, Tensor grad_entropy, Tensor? keep_mask=None"
)
_SHARD = {
    "logits": ("T, V_local", FLOATS),
    "targets": ("T", INT64),
    "scale": ("T", Like("logits", wide=True)),
}
_VECTORS = dict.fromkeys(
    ("max", "log_sum", "entropy", "grad_logprob", "grad_entropy"), ("T", Like("logits", wide=True))
)
_MASK = {"keep_mask": ("T, V_local", (torch.bool,))}
_STATS = Arguments("token_logprob_stats", ValueError, **_SHARD, **_MASK)
_WHOLE = Arguments("token_logprob_rows", ValueError, **_SHARD, **_MASK)
_GRAD = Arguments("token_logprob_grad", ValueError, **_SHARD, **_VECTORS, **_MASK)
_OVER = Arguments("token_logprob_grad_", ValueError, **_SHARD, **_VECTORS, **_MASK)
_COMBINED = Arguments(
    "token_logprob_combine",
    ValueError,
    stats=("R, 4, T", (torch.float32, torch.float64)),
    targets=("T", INT64),
    scale=("T", Like("stats")),
)
_FOUR = "(Tensor logprob, Tensor entropy, Tensor max, Tensor log_sum)"
Rows = tuple[Tensor, Tensor, Tensor, Tensor]  # log-prob, entropy, max, log_sum


def _stats_fake(logits: Tensor, targets: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    return scale.new_empty(4, logits.shape[0])


def _rows_fake(logits: Tensor, targets: Tensor, scale: Tensor, *rest: Any) -> Rows:
    logprob, entropy, top, log_sum = (scale.new_empty(targets.shape) for _ in range(4))
    return logprob, entropy, top, log_sum


def _grad_fake(logits: Tensor, *rest: Any) -> Tensor:
    dtype = rest[-1] if isinstance(rest[-1], torch.dtype) else logits.dtype
    return torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)


def _over(grad: Callable[..., Tensor]) -> Callable[..., None]:
    def run(logits: Tensor, *rest: Any) -> None:
        grad(logits, *rest, out=logits)
        if not logits.is_inference():  # what is written by address is seen by nobody else
            torch.autograd.graph.increment_version(logits)

    return run


stats_op = Op(
    "token_logprob_stats(Tensor logits, Tensor targets, Tensor scale, SymInt first, SymInt width, "
    "Tensor? keep_mask=None) -> Tensor",
    fake=_stats_fake,
)
stats_op.serve(__name__, "native", "triton", "reference", function="stats")

rows_op = Op(
    "token_logprob_rows(Tensor logits, Tensor targets, Tensor scale, SymInt width, "
    f"Tensor? keep_mask=None) -> {_FOUR}",
    fake=_rows_fake,
)
rows_op.serve(__name__, "native", "triton", "reference", function="rows")

combine_op = Op(
    "token_logprob_combine(Tensor stats, Tensor targets, Tensor scale, SymInt valid_vocab) -> "
    f"{_FOUR}",
    fake=_rows_fake,
)
combine_op.serve(__name__, "native", "triton", "reference", function="combine")

grad_op = Op(
    f"token_logprob_grad(Tensor logits, {_ROWS}, ScalarType? dtype=None) -> Tensor",
    fake=_grad_fake,
)
grad_op.serve(__name__, "native", "triton", "reference", function="grad")

over_op = Op(f"token_logprob_grad_(Tensor(a!) logits, {_ROWS}) -> ()", fake=lambda *args: None)
for _each in grad_op.backends:
    over_op.backend(_each.name, _over(_each.run), refuse=_each.refuse)


def token_logprob_stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None = None,
) -> Tensor:
    """One read of a shard's logits: ``[max, sum(e), sum(e * d), logits[target]]`` a token.

    ``d = (logits - max) * scale``, ``e = exp(d)``. A logit of -inf counts 0 in both sums; a shard
    of nothing else has max -inf and sums 0. NaN or +inf in the logits makes the sums NaN. The bits
    of a token depend on its logits and on how its row is aligned in memory, on no other token.

    Args:
        logits:  [T, V_local] float32, bfloat16, float16 or float64.
        targets: [T] int64, global column; 0 is reported for one that another shard holds. None is
            out of range.
        scale:   [T] float32 (float64 for float64 logits), positive, 1 / temperature.
        first:   global column of ``logits[:, 0]``.
        width:   valid columns of this shard; those behind are padding and have no part.
        keep_mask: [T, V_local] bool, False where a logit counts as -inf; None: all are kept.

    Returns:
        [4, T] dtype of ``scale``; max and target in units of ``logits``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(_STATS, width, logits, targets, scale, keep_mask)
    return stats_op(logits, targets, scale, first, width, keep_mask)


def token_logprob_rows(
    logits: Tensor, targets: Tensor, scale: Tensor, width: int, keep_mask: Tensor | None = None
) -> Rows:
    """``token_logprob_combine(token_logprob_stats(...)[None], ...)`` of a vocabulary in one piece.

    Args:
        logits, targets, scale, width, keep_mask: as in :func:`token_logprob_stats`; column 0 is
            the vocabulary's, and ``width`` its size.

    Returns:
        log-prob, entropy, max and log_sum, as :func:`token_logprob_combine`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(_WHOLE, width, logits, targets, scale, keep_mask)
    return rows_op(logits, targets, scale, width, keep_mask)


def token_logprob_combine(stats: Tensor, targets: Tensor, scale: Tensor, valid_vocab: int) -> Rows:
    """Statistics of all shards -> what each token comes to.

    The log-prob is NaN for a target outside ``[0, valid_vocab)``. A token without a finite logit
    has log-prob -inf and entropy 0. Shards are added in their order: equal statistics give equal
    bits on every rank.

    Args:
        stats:   [R, 4, T] of R shards, as :func:`token_logprob_stats` returns them.
        targets: [T] int64, global column.
        scale:   [T] dtype of ``stats``.
        valid_vocab: size of the vocabulary.

    Returns:
        log-prob, entropy, max and log_sum = log(sum(e)), [T] dtype of ``stats`` each.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _COMBINED.check(stats, targets, scale)
    return combine_op(stats, targets, scale, valid_vocab)


def token_logprob_grad(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    keep_mask: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``scale * (gl * ([j == target] - p) - ge * p * (log p + entropy))`` in one pass.

    ``log p = (logits - max) * scale - log_sum``, with ``gl, ge = grad_logprob, grad_entropy``.

    Args:
        logits, targets, scale, first, width, keep_mask: as in :func:`token_logprob_stats`.
        max, log_sum, entropy: [T] dtype of ``scale``, of the whole row, over all shards.
        grad_logprob, grad_entropy: [T] dtype of ``scale``.
        dtype:   of the result, bfloat16 or float16 for float32 logits; None: that of ``logits``.

    Returns:
        [T, V_local] ``dtype``, a new tensor. 0 in padding columns, in columns that are
        not kept, in tokens whose two gradients are 0 (their logits are not read) and in tokens
        without a finite logit.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    vectors = max, log_sum, entropy, grad_logprob, grad_entropy
    _check(_GRAD, width, logits, targets, scale, *vectors, keep_mask)
    halves = (torch.bfloat16, torch.float16) if logits.dtype == torch.float32 else ()
    if dtype not in (None, logits.dtype, *halves):
        raise ValueError(
            f"token_logprob_grad: dtype is {dtype} for {logits.dtype} logits, expected that of the "
            "logits, or torch.bfloat16 or torch.float16 for torch.float32 ones"
        )
    return grad_op(logits, targets, scale, first, width, *vectors, keep_mask, dtype)


def token_logprob_grad_(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    keep_mask: Tensor | None = None,
) -> Tensor:
    """:func:`token_logprob_grad` written over ``logits``, whose version counter it raises.

    Returns:
        ``logits``.

    Raises:
        ValueError: shapes or dtypes do not fit, or the logits are not contiguous.
    """
    vectors = max, log_sum, entropy, grad_logprob, grad_entropy
    _check(_OVER, width, logits, targets, scale, *vectors, keep_mask)
    if not logits.is_contiguous():
        raise ValueError(
            f"token_logprob_grad_: logits {list(logits.shape)} has strides "
            f"{list(logits.stride())}, expected contiguous ones. Use token_logprob_grad"
        )
    over_op(logits, targets, scale, first, width, *vectors, keep_mask)
    return logits


def _check(arguments: Arguments, width: int, logits: Tensor, *others: Tensor | None) -> None:
    arguments.check(logits, *others)
    if not 0 <= width <= logits.shape[1]:
        raise ValueError(
            f"{arguments.where}: width is {width}, expected one in [0, {logits.shape[1]}]"
        )
