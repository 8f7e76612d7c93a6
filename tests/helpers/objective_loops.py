"""The objective by its formulas, in plain Python floats, a sample and a token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Minibatch:
    """Samples as lists of tokens; numbers of tokens outside the mask are never read."""

    mask: list[list[bool]]
    old: list[list[float]]
    rollout: list[list[float]]
    ref: list[list[float]]
    entropy: list[list[float]]
    advantages: list[float]
    groups: list[int]
    divergence: list[list[float]]
    counts: dict[str, int] = field(default_factory=dict)
    trajectories: list[int] | None = None

    def tokens(self, i: int) -> list[int]:
        return [t for t, inside in enumerate(self.mask[i]) if inside]

    def parts(self, i: int) -> list[int]:
        """The samples of the trajectory of sample ``i``."""
        ids = self.trajectories
        return [i] if ids is None else [j for j, each in enumerate(ids) if each == ids[i]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def loss(c: Any, now: list[list[float]], frozen: list[list[float]], m: Minibatch) -> float:
    """The loss of a minibatch at log-probs ``now``; where a gradient stops, those of ``frozen``."""
    parts = [sample_terms(c, now[i], frozen[i], m, i) for i in range(len(now))]
    live = [i for i in range(len(now)) if m.tokens(i)]
    heads = [i for i in range(len(now)) if m.parts(i)[0] == i]
    whole = [each for i in heads if (each := [x for j in m.parts(i) for x in parts[j]])]
    match c.reduction:
        case "token":
            return mean([x for i in live for x in parts[i]])
        case "sequence":
            return mean([mean(each) for each in whole])
        case "sequence_sum":
            return mean([math.fsum(each) / c.reduction_constant for each in whole])
    prompts = {m.groups[i] for i in live}
    return mean([mean([x for i in live if m.groups[i] == g for x in parts[i]]) for g in prompts])


def correction(c: Any, m: Minibatch, i: int, t: int) -> float:
    gaps = {u: m.old[i][u] - m.rollout[i][u] for u in m.tokens(i)}
    all_gaps = [m.old[j][u] - m.rollout[j][u] for j in m.parts(i) for u in m.tokens(j)]
    weight = 1.0
    if c.tis_cap is not None:
        e = gaps[t] if c.tis == "token" else math.fsum(all_gaps)
        weight = max(c.tis_floor or 0.0, min(math.exp(e), c.tis_cap))
    if c.mask_ratio and not c.mask_ratio[0] <= math.exp(gaps[t]) <= c.mask_ratio[1]:
        return 0.0
    if c.sequence_bounds:
        e = math.fsum(all_gaps)
        e = e / len(all_gaps) if c.mask_sequence == "geometric" else e
        if not c.sequence_bounds[0] <= math.exp(e) <= c.sequence_bounds[1]:
            return 0.0
    if c.veto is not None and min(map(math.exp, all_gaps)) < c.veto:
        return 0.0
    return weight


def sample_terms(
    c: Any, now: list[float], frozen: list[float], m: Minibatch, i: int
) -> list[float]:
    """The loss of each loss token of sample ``i``."""
    at = m.tokens(i)
    adv = m.advantages[i]
    anchor = m.old[i] if c.anchor == "old" else m.rollout[i]
    found = []
    for t in at:
        d = now[t] - anchor[t]
        if c.ratio == "sequence":
            d = mean([now[u] - anchor[u] for u in at])
        if c.ratio == "sequence_token":
            d = mean([frozen[u] - anchor[u] for u in at]) + now[t] - frozen[t]
        r = math.exp(d)
        low = 1 - c.clip_low
        high = 1 + c.clip_high
        if c.loss == "ppo":
            policy = max(-adv * r, -adv * min(max(r, low), high))
            if c.dual_clip is not None and adv < 0:
                policy = min(policy, -c.dual_clip * adv)
        elif c.loss == "cispo":
            own = frozen[t] - anchor[t]
            if c.ratio == "sequence" or c.ratio == "sequence_token":
                own = mean([frozen[u] - anchor[u] for u in at])
            policy = -min(max(math.exp(own), low), high) * adv * now[t]
        elif c.loss == "sapo":
            tau = c.sapo_tau[0] if adv > 0 else c.sapo_tau[1]
            policy = -adv * 4 / tau / (1 + math.exp(-tau * (r - 1)))
        elif c.loss == "gmpo":
            ds = [now[u] - anchor[u] for u in at]
            ds = [min(x, c.clip_high) if adv > 0 else max(x, -c.clip_low) for x in ds]
            policy = -adv * math.exp(mean(ds))
        elif c.loss == "dppo":
            change = math.exp(frozen[t]) - math.exp(anchor[t])
            far = change > c.clip_high if adv > 0 else -change > c.clip_low
            policy = 0.0 if far else -adv * r
        else:
            policy = -adv * now[t]
        if c.opsm is not None and adv < 0:
            policy *= mean([m.old[i][u] - frozen[u] for u in at]) <= c.opsm
        found.append(policy * correction(c, m, i, t) + extras(c, now, frozen, anchor, m, i, t))
    return found


def extras(c: Any, now: Any, frozen: Any, anchor: Any, m: Minibatch, i: int, t: int) -> float:
    """KL, entropy and divergence of a token."""

    def value(k: float) -> float:
        return {"k1": k, "k2": k * k / 2, "k3": math.exp(-k) - 1 + k}[c.kl]

    total = -c.entropy_coef * m.entropy[i][t]
    if c.distill != "sampled":
        total += c.distill_coef * m.divergence[i][t]
    if c.kl_coef and c.kl_in == "loss":
        k = now[t] - m.ref[i][t]
        k0 = frozen[t] - m.ref[i][t]
        r, r0 = (math.exp(x - anchor[t]) for x in (now[t], frozen[t]))
        if c.kl_weight == "none":
            r = r0 = 1.0
        if c.kl_gradient == "direct":
            total += c.kl_coef * (r0 if c.kl_weight == "detached" else r) * value(k)
        else:  # its value, and the slope r k
            total += c.kl_coef * (r0 * value(k0) + r0 * k0 * (now[t] - frozen[t]))
    return total


def draw(seed: int, samples: int = 6, scale: float = 0.4) -> tuple[list[list[float]], Minibatch]:
    """Log-probs of random samples of unlike lengths, one without loss tokens."""
    gen = torch.Generator().manual_seed(seed)
    lengths = [1, *torch.randint(2, 9, (samples - 1,), generator=gen).tolist()]

    def rows(shift: list[list[float]] | None = None) -> list[list[float]]:
        found = []
        for i, n in enumerate(lengths):
            noise = (torch.randn(n, generator=gen, dtype=torch.float64) * scale).tolist()
            base = shift[i] if shift else [-1.5] * n
            found.append([min(b + x, -0.01) for b, x in zip(base, noise, strict=True)])
        return found

    now = rows()
    mask = [[bool(b) for b in (torch.rand(n, generator=gen) > 0.3).tolist()] for n in lengths]
    mask[0], mask[1] = [True], [False] * lengths[1]
    advantages = torch.randn(samples, generator=gen, dtype=torch.float64).tolist()
    old = rows(now)
    groups = [i // 2 for i in range(samples)]
    rest = rows(old), rows(now), rows(), advantages, groups, rows()
    return now, Minibatch(mask, old, *rest)


def gradient(c: Any, now: list[list[float]], m: Minibatch, eps: float = 1e-6) -> list[float]:
    """d loss / d log-prob of every token, by central differences."""
    found = []
    for i, row in enumerate(now):
        for t in range(len(row)):
            ends = []
            for step in (eps, -eps):
                moved = [list(each) for each in now]
                moved[i][t] += step
                ends.append(loss(c, moved, now, m))
            found.append((ends[0] - ends[1]) / (2 * eps))
    return found
