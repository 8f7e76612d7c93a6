import torch
from torch import Tensor

NEG_INF = -torch.inf


def stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None = None,
) -> Tensor:
    """Textbook softmax sums in the dtype of ``scale``."""
    x = _valid(logits, width, keep_mask).to(scale.dtype)
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


def merge_parts(parts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics [R, 4, T] of R parts of the vocabulary -> the four of all parts, [T] each."""
    tops, sums, weights, targets = parts.unbind(1)
    top = tops.amax(0)
    shift = (tops - _finite(top)) * scale
    factor = shift.exp()
    shift = shift.masked_fill(factor == 0, 0)  # 0 * -inf
    weighted = (factor * (weights + shift * sums)).sum(0)
    return top, (factor * sums).sum(0), weighted, targets.sum(0)


def combine(
    stats: Tensor, targets: Tensor, scale: Tensor, valid_vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    top, total, weighted, target_logit = merge_parts(stats, scale)
    log_sum = total.log()
    logprob = (target_logit - _finite(top)) * scale - log_sum
    logprob = torch.where(total == 0, -torch.inf, logprob)
    entropy = torch.where(total == 0, 0, log_sum - weighted / total)
    inside = (targets >= 0) & (targets < valid_vocab)
    return torch.where(inside, logprob, torch.nan), entropy, top, log_sum


def rows(
    logits: Tensor, targets: Tensor, scale: Tensor, width: int, keep_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = stats(logits, targets, scale, 0, width, keep_mask)
    return combine(found[None], targets, scale, width)


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
    keep_mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    whole = logits.new_zeros(logits.shape, dtype=dtype)
    if width == 0:
        return whole if out is None else out.copy_(whole)
    dead = (max == NEG_INF) | ((grad_logprob == 0) & (grad_entropy == 0))
    x = (_valid(logits, width, keep_mask).to(scale.dtype) - max[:, None]) * scale[:, None]
    log_p = x - log_sum[:, None]
    p = log_p.exp()
    spread = (p * (log_p + entropy[:, None])).masked_fill(log_p == NEG_INF, 0)
    local, mine = _local(targets, first, width)
    if keep_mask is not None:
        mine &= keep_mask.gather(1, local[:, None])[:, 0]
    g = -p * grad_logprob[:, None] - spread * grad_entropy[:, None]
    chosen = grad_logprob.masked_fill(~mine, 0)
    g = g.scatter_add(1, local[:, None], chosen[:, None]) * scale[:, None]
    whole[:, :width] = g.masked_fill(dead[:, None], 0).to(whole.dtype)
    return whole if out is None else out.copy_(whole)


def _finite(top: Tensor) -> Tensor:
    """The maximum, 0 where there is no finite logit at all."""
    return top.masked_fill(top == NEG_INF, 0)


def _valid(logits: Tensor, width: int, keep_mask: Tensor | None) -> Tensor:
    x = logits[:, :width]
    return x if keep_mask is None else x.masked_fill(~keep_mask[:, :width], NEG_INF)


def _local(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this shard (clamped), and whether it is one."""
    local = targets - first
    return local.clamp(0, width - 1), (local >= 0) & (local < width)
