import torch
from torch import Tensor


def refuse(starts: Tensor, lengths: Tensor, size: int) -> str | None:
    if starts.device.type != "cpu":
        return f"starts is on {starts.device}, expected cpu; copy what it returns"
    return None


def expand_runs(starts: Tensor, lengths: Tensor, size: int) -> Tensor:
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
