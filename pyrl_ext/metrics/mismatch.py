"""Difference between the trainer's and the rollout engine's log-probs of the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pyrl_ext.parallel.reduce import max_over_ranks, sum_over_ranks
from pyrl_ext.parallel.topology import Topology


def mismatch(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, topo: Topology | None = None
) -> dict[str, float]:
    """Distances over d = old - rollout and r = exp(d), as defined in the glossary.

    Nothing is clamped and no NaN is replaced: one NaN under the mask makes every distance NaN,
    and is counted in ``mismatch/nonfinite``. Arithmetic is in float64, since d is often 1e-4 and
    k3 is quadratic in it.

    Args:
        old_logprobs: [T] float, of the target in the trainer's policy before the update [nats].
        rollout_logprobs: [T] float, in the engine's distribution [nats].
        mask: [T] bool, the tokens to compare; the others may hold anything.
        topo: the tokens of all ranks of its last stage are compared, each of which holds a part;
            None: of this process alone.

    Returns:
        ``mismatch/...`` -> value.

    Communicates: with ``topo``, some all-reduces of at most 256 numbers.
    Syncs: yes, it returns Python numbers.

    Raises:
        ValueError: no token under the mask.
    """
    total, largest = _over(topo)
    old = old_logprobs[mask].double()
    rollout = rollout_logprobs[mask].double()
    d = old - rollout
    size = d.abs()
    counts = torch.stack([torch.ones_like(d), ~d.isfinite(), d.isnan()])
    n, nonfinite, nan = map(int, total(counts.sum(1)).tolist())
    if not n:
        raise ValueError("mismatch: 0 tokens under the mask, expected at least 1")
    if nan:  # comparisons, ranks and maxima would swallow it
        values = dict.fromkeys(_DISTANCES, math.nan)
        return {f"mismatch/{x}": value for x, value in (values | {"nonfinite": nonfinite}).items()}
    top, most = largest(torch.stack([_max(d), _max(size)])).tolist()
    scaled = (d - top).exp()  # the effective sample size does not depend on a factor
    terms = {
        "k3": d.expm1() - d,
        "abs_mean": size,
        "prob_abs_mean": (old.exp() - rollout.exp()).abs(),
        "f2": (size > math.log(2)).double(),
        "f5": (size > math.log(5)).double(),
        "chi2": (2 * d).expm1(),
    }
    sums = total(torch.stack([*terms.values(), d, scaled, scaled.square()]).sum(1)).tolist()
    *means, mean, weight, squares = (x / n for x in sums)
    values = dict(zip(terms, means, strict=True))
    values |= {"max": most, "p99": _smallest(size, math.ceil(0.99 * n), total)}
    values |= {"ess": weight**2 / squares, "ppl_ratio": _exp(-mean), "nonfinite": nonfinite}
    return {f"mismatch/{name}": values[name] for name in (*_DISTANCES, "nonfinite")}


_DISTANCES = (
    "k3",
    "abs_mean",
    "p99",
    "max",
    "prob_abs_mean",
    "f2",
    "f5",
    "ess",
    "chi2",
    "ppl_ratio",
)

Reduce = Callable[[Tensor], Tensor]


def _over(topo: Topology | None) -> tuple[Reduce, Reduce]:
    """Sum and maximum over the ranks of ``topo``."""
    if topo is None:
        return (lambda x: x), (lambda x: x)
    return partial(sum_over_ranks, topo=topo), partial(max_over_ranks, topo=topo)


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else torch.tensor(-math.inf, dtype=values.dtype)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _smallest(values: Tensor, k: int, total: Reduce) -> float:
    """The k-th smallest of all ranks' values [M] float64 >= 0, exactly.

    Their bits order as they do. Eight rounds count how many values have each next byte of the
    bits, so that ranks exchange counts instead of values.
    """
    bits = values.view(torch.int64)
    chosen = 0
    for shift in range(56, -1, -8):
        byte = (bits >> shift) & 255
        below = total(torch.bincount(byte, minlength=256).double()).cumsum(0)
        digit = int(torch.searchsorted(below, torch.tensor(float(k), dtype=below.dtype)))
        k -= int(below[digit - 1]) if digit else 0
        bits = bits[byte == digit]
        chosen = chosen | digit << shift
    return float(torch.tensor(chosen).view(torch.float64))
