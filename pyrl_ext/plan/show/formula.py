"""The formula that the parts of an objective make."""

from __future__ import annotations

from collections.abc import Iterator

from pyrl_ext.plan.schema.objective import Objective

_MEANS = {
    "token": "mean over tokens",
    "sequence": "mean over trajectories of their token means",
    "sequence_sum": "mean over trajectories of their token sums / {constant}",
    "prompt": "mean over prompts of their token means",
}
_TERMS = {
    "ppo": "max(-A r, -A clip(r, {low:g}, {high:g}))",
    "cispo": "-stop(clip(r, {low:g}, {high:g})) A logp",
    "sapo": "-A sigmoid(t (r - 1)) 4 / t, t = {tau[0]:g} where A > 0, else {tau[1]:g}",
    "gmpo": "-A exp(mean over the sample of log r, at most {lo_hi[1]:g} where A > 0, at least "
    "-{lo_hi[0]:g} where A < 0)",
    "dppo": "-A r, 0 where A > 0 and p rose by more than {lo_hi[1]:g}, or A < 0 and p fell by more "
    "than {lo_hi[0]:g}",
    "reinforce": "-A logp",
}
_RATIOS = {
    "token": "r = exp(logp - {anchor})",
    "sequence": "r = exp(mean over the sample of logp - {anchor})",
    "sequence_token": "r = stop(exp(mean over the sample of logp - {anchor})) logp's gradient",
}
_VALUES = {"k1": "k", "k2": "k^2 / 2", "k3": "exp(-k) - 1 + k"}
_ADVANTAGES = {
    "grpo": "reward - mean of its group",
    "rloo": "reward - mean of the others in its group",
    "opo": "reward - mean of its group, weighted by tokens",
    "reinforce_pp": "(reward - mean) / std, over all tokens of the batch",
    "reinforce_pp_baseline": "(x - mean) / std over all tokens, x = reward - mean of its group",
    "maxrl": "(reward - mean of its group) / that mean",
}


def formula(objective: Objective, constant: int) -> list[str]:
    """Lines of text: the loss, then what its symbols stand for.

    Args:
        constant: what divides the sum of a trajectory where the objective names nothing.
    """
    if objective.loss == "sft":
        return ["loss = mean over tokens of -logp"]
    if (term := _TERMS.get(objective.loss)) is None:
        return [f"loss = {objective.loss}", *_weights(objective), _advantage(objective)]
    words = {
        "low": 1 - objective.clip_low,
        "high": 1 + objective.clip_high,
        "lo_hi": (objective.clip_low, objective.clip_high),
        "tau": objective.sapo_tau,
    }
    policy = term.format(**words)
    if objective.dual_clip is not None:
        policy += f", at most -{objective.dual_clip:g} A where A < 0"
    mean = _MEANS[objective.reduction].format(constant=objective.reduction_constant or constant)
    terms = [f"c ({policy})" if objective.corrects or objective.opsm is not None else policy]
    if objective.kl_coef and objective.kl_in == "loss":
        terms.append(f"{objective.kl_coef:g} K")
    loss = " + ".join(terms)
    if objective.entropy_coef:
        loss += f" - {objective.entropy_coef:g} entropy"
    lines = [f"loss = {mean} of {loss}"]
    if objective.loss != "reinforce":
        lines.append(_RATIOS[objective.ratio].format(anchor=_anchor(objective)))
    lines += [*_weights(objective), *_kl(objective), _advantage(objective)]
    if rounds := objective.dynamic_sampling:
        lines.append(f"groups with equal rewards are replaced, in at most {rounds} further rounds")
    return lines


def _anchor(objective: Objective) -> str:
    return "old" if objective.anchor == "old" else "rollout"


def _weights(objective: Objective) -> Iterator[str]:
    """Lines about weights and rejected tokens, in the order in which they apply."""
    if objective.tis_cap is not None:
        of = "" if objective.tis == "token" else "sum over the trajectory of "
        low = f"{objective.tis_floor:g}" if objective.tis_floor is not None else "0"
        yield f"c = exp({of}old - rollout) within {low} and {objective.tis_cap:g}"
    if objective.mask_ratio:
        low, high = objective.mask_ratio
        yield f"c = 0 where exp(old - rollout) is outside {low:g} and {high:g}"
    if objective.sequence_bounds:
        low, high = objective.sequence_bounds
        of = "mean" if objective.mask_sequence == "geometric" else "sum"
        of = f"exp({of} of old - rollout)"
        yield f"c = 0 in trajectories whose {of} is outside {low:g} and {high:g}"
    if objective.veto is not None:
        yield f"c = 0 in trajectories with any exp(old - rollout) below {objective.veto:g}"
    if objective.opsm is not None:
        yield f"c = 0 where A < 0 and the sample's mean of old - logp is above {objective.opsm:g}"


def _kl(objective: Objective) -> Iterator[str]:
    if not objective.kl_coef:
        return
    value = _VALUES[objective.kl]
    if objective.kl_in == "reward":
        less = f"{objective.kl_coef:g} sum over the trajectory of {value}"
        yield f"reward = reward - {less}, k = old - ref"
        return
    weight = {"none": "", "detached": "stop(ratio) ", "ratio": "ratio "}[objective.kl_weight]
    text = f"K = {weight}({value}), k = logp - ref"
    if weight:
        text += f", ratio = exp(logp - {_anchor(objective)})"
    reverse = f"; its gradient is {weight}k, that of the reverse KL"
    yield text + (reverse if objective.kl_gradient == "reverse" else "")


def _advantage(objective: Objective) -> str:
    text = _ADVANTAGES.get(objective.advantage, objective.advantage)
    if objective.advantage == "grpo":
        text = _ADVANTAGES["rloo"] if objective.leave_one_out else text
        text = f"({text}) / std of its group" if objective.normalize_std else text
    return f"A = {text}"
