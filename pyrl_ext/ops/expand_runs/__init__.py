"""expand_runs: an index vector from a table of runs; a packed layout has a few per sequence.

Backends: native (C++ threads, CPU), reference (torch).
Gradient: none, row numbers are integers.
"""

import torch
from torch import Tensor

from pyrl_ext.ops._op import Op

from . import native, reference


def _fake(starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    return starts.new_empty(size)


op = Op("expand_runs(Tensor starts, Tensor lengths, SymInt size) -> Tensor", fake=_fake)
op.serve(native, reference)


def expand_runs(starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    """``cat([s + arange(n) for s, n in zip(starts, lengths)])``, then -1 up to ``size``.

    Args:
        starts:  [R] int64 on the host, first number of each run; below 0: a run of -1.
        lengths: [R] int64 on the host, numbers in each run, 0 allowed.
        size:    entries of the result, at least the sum of ``lengths``.

    Returns:
        [size] int64 on the host.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit, a length is negative, or the runs are
            longer than ``size``.
        NotImplementedError: ``starts`` is on a device; every backend runs on the host.
    """
    if starts.ndim != 1 or lengths.shape != starts.shape or lengths.device != starts.device:
        raise ValueError(
            f"expand_runs: starts {list(starts.shape)} on {starts.device}, lengths "
            f"{list(lengths.shape)} on {lengths.device}, expected [R] both, on the host"
        )
    if starts.dtype != torch.int64 or lengths.dtype != torch.int64:
        raise TypeError(
            f"expand_runs: starts is {starts.dtype}, lengths {lengths.dtype}, expected torch.int64"
        )
    if size < 0:
        raise ValueError(f"expand_runs: size is {size}, expected >= 0")
    return op(starts, lengths, size)
