from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads

from . import reference


def refuse(starts: Tensor, lengths: Tensor, size: int) -> str | None:
    return reference.refuse(starts, lengths, size) or refuse_device(starts, "expand_runs")


def expand_runs(starts: Tensor, lengths: Tensor, size: int, isa: str = "auto") -> Tensor:
    starts, lengths = starts.contiguous(), lengths.contiguous()
    out = starts.new_empty(size)
    starts_, lengths_, out_ = (t.data_ptr() for t in (starts, lengths, out))
    C.expand_runs_cpu(starts_, lengths_, len(starts), out_, size, isa, threads())
    return out
