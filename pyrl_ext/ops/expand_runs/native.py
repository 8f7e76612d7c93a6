from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads

from . import reference


def refuse(starts: Tensor, lengths: Tensor, size: int) -> str | None:
    return reference.refuse(starts, lengths, size) or refuse_device(starts, "expand_runs")


def expand_runs(starts: Tensor, lengths: Tensor, size: int, isa: str = "auto") -> Tensor:
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
