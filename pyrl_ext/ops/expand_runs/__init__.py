"""expand_runs: an index vector from a table of runs; a packed layout has a few per sequence.

Backends: native (C++ threads, CPU), reference (torch).
Gradient: none, row numbers are integers.
"""

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import INT64, Arguments
from pyrl_ext.ops._native import C, refuse_device, threads
from pyrl_ext.ops._op import Op

_ARGUMENTS = Arguments("expand_runs", starts=("R", INT64), lengths=("R", INT64))


def _fake(starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    return starts.new_empty(size)


def _refuse(starts: Tensor, *_: object) -> str | None:
    if starts.device.type != "cpu":
        return f"starts is on {starts.device}, expected cpu; copy what it returns"
    return None


def _refuse_native(starts: Tensor, *_: object) -> str | None:
    return _refuse(starts) or refuse_device(starts, "expand_runs")


def native(starts: Tensor, lengths: Tensor, size: int, isa: str = "auto") -> Tensor:
    starts = starts.contiguous()
    lengths = lengths.contiguous()
    out = starts.new_empty(size)
    C.expand_runs_cpu(
        starts=starts.data_ptr(),
        lengths=lengths.data_ptr(),
        num_runs=len(starts),
        out=out.data_ptr(),
        size=size,
        isa=isa,
        threads=threads(),
    )
    return out


def reference(starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Find the run and the offset of every entry; entries behind the last run stay -1."""
    ends = lengths.clamp(max=size + 1).cumsum(0)
    before = ends - lengths.clamp(max=size + 1)
    wrong = (lengths < 0) | (ends > size)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"expand_runs: lengths[{i}] is {int(lengths[i])}, expected one in "
            f"[0, {size - int(before[i])}], what is left of size {size}"
        )
    run = torch.repeat_interleave(lengths)
    place = torch.arange(len(run)) - before[run]
    out = starts.new_full((size,), -1)
    out[: len(run)] = torch.where(starts[run] < 0, -1, starts[run] + place)
    return out


op = Op("expand_runs(Tensor starts, Tensor lengths, SymInt size) -> Tensor", fake=_fake)
op.backend("native", native, refuse=_refuse_native)
op.backend("reference", reference, refuse=_refuse)


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
