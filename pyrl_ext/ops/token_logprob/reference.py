import torch
from torch import Tensor

NEG_INF = -torch.inf


def stats(logits: Tensor, targets: Tensor, scale: Tensor, first: int, width: int) -> Tensor:
    """Textbook softmax sums in the dtype of ``scale``."""
    x = logits[:, :width].to(scale.dtype)
    if width == 0:
        empty = scale.new_zeros(4, len(scale))
        empty[0] = NEG_INF
        return empty
    top = x.amax(-1)
    base = top.masked_fill(top == NEG_INF, 0)  # -inf - -inf is not a number
    d = (x - base[:, None]) * scale[:, None]
    e = d.exp()
    weighted = (e * d).masked_fill(d == NEG_INF, 0)
    local, mine = _local(targets, first, width)
    target = x.gather(1, local[:, None])[:, 0].masked_fill(~mine, 0)
    return torch.stack([top, e.sum(-1), weighted.sum(-1), target])


def grad(
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
) -> Tensor:
    out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    if width == 0:
        return out
    dead = (max == NEG_INF) | ((grad_logprob == 0) & (grad_entropy == 0))
    x = (logits[:, :width].to(scale.dtype) - max[:, None]) * scale[:, None]
    log_p = x - log_sum[:, None]
    p = log_p.exp()
    spread = (p * (log_p + entropy[:, None])).masked_fill(log_p == NEG_INF, 0)
    local, mine = _local(targets, first, width)
    g = -p * grad_logprob[:, None] - spread * grad_entropy[:, None]
    chosen = grad_logprob.masked_fill(~mine, 0)
    g = g.scatter_add(1, local[:, None], chosen[:, None]) * scale[:, None]
    out[:, :width] = g.masked_fill(dead[:, None], 0).to(logits.dtype)
    return out


def _local(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this shard (clamped), and whether it is one."""
    local = targets - first
    return local.clamp(0, width - 1), (local >= 0) & (local < width)
