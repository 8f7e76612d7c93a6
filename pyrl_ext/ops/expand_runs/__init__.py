"""expand_runs: an index vector from a table of runs; a packed layout has a few per sequence.

Backends: native (C++ threads, CPU), reference (torch).
Gradient: none, row numbers are integers.
"""

from torch import Tensor

from pyrl_ext.ops._arguments import INT64, Arguments
from pyrl_ext.ops._op import Op

from . import native, reference

_ARGUMENTS = Arguments("expand_runs", starts=("R", INT64), lengths=("R", INT64))


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
    _ARGUMENTS.check(starts, lengths)
    if size < 0:
        raise ValueError(f"expand_runs: size is {size}, expected >= 0")
    return op(starts, lengths, size)
