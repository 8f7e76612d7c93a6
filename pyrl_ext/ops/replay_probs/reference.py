import torch
from torch import Tensor

from pyrl_ext.ops.tensors import accum_dtype


def replay_probs(
    scores: Tensor, ids: Tensor, norm: str, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    ids = _checked(ids, scores.shape[1])
    values = _widened(scores.gather(1, ids))
    if norm == "sum" and ids.shape[1] > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    elif norm == "softmax":
        values = torch.softmax(values, -1)
    if scale:
        values = values * scale
    probs = scores.new_zeros(scores.shape, dtype=out_dtype)
    chosen = scores.new_zeros(scores.shape, dtype=torch.bool)
    return probs.scatter_(1, ids, values.to(out_dtype)), chosen.scatter_(1, ids, True)


def replay_probs_grad(grad: Tensor, scores: Tensor, ids: Tensor, norm: str, scale: float) -> Tensor:
    ids = _checked(ids, scores.shape[1])
    values = _widened(scores.gather(1, ids))
    grads = grad.gather(1, ids).to(values.dtype)
    if scale:
        grads = grads * scale
    if norm == "sum" and ids.shape[1] > 1:
        total = values.sum(-1, keepdim=True) + 1e-20
        grads = grads / total + (-grads * (values / total / total)).sum(-1, keepdim=True)
    elif norm == "softmax":
        probs = torch.softmax(values, -1)
        grads = (grads - (grads * probs).sum(-1, keepdim=True)) * probs
    return scores.new_zeros(scores.shape).scatter_(1, ids, grads.to(scores.dtype))


def _widened(values: Tensor) -> Tensor:
    return values.to(accum_dtype(values.dtype))


def _checked(ids: Tensor, experts: int) -> Tensor:
    """int64, as torch indexes with; on CPU an entry out of range is named."""
    ids = ids.to(torch.int64)
    if ids.device.type == "cpu":
        outside = (ids < 0) | (ids >= experts)
        if outside.any():
            row, j = outside.nonzero()[0].tolist()
            raise IndexError(
                f"replay_probs: ids[{row}, {j}] is {int(ids[row, j])}, expected an expert in "
                f"[0, {experts})"
            )
    return ids
