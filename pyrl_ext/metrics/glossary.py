"""One definition for each metric: its unit, its formula, and the values that are alarming.

``python -m pyrl_ext.metrics.glossary`` prints them as a page of Markdown.

Notation: d = old_logprob - rollout_logprob of a token and r = exp(d), where old is the trainer's
policy before the update. Means run over the tokens under the loss mask: for ``mismatch/`` those of
the whole rollout batch, for ``policy/`` and ``loss`` those of each minibatch, averaged over the
updates of the step. ``<id>`` in a name stands for a number, ``<name>`` for that of a component, a
set or a source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pyrl_ext.metrics.costs import COSTS
from pyrl_ext.metrics.metric import Metric
from pyrl_ext.metrics.rollout_metrics import (
    AGE_METRICS,
    SCORING_METRICS,
    SERVER_METRICS,
    SOURCE_METRICS,
    TURN_METRICS,
)

_R3 = "Stabilizing MoE RL by aligning training and inference routers, arXiv:2510.11370"
_K3 = "http://joschu.net/blog/kl-approx.html"
_VERL = "verl documentation, rollout correction"
_DISAGREE = "trainer and engine disagree"

SYMBOLS = (
    "d = old - rollout is a token's log-prob by the trainer before the update (old) minus the "
    "engine's (rollout), and r = exp(d)."
)

_METRICS = (
    # the run
    Metric("step", "1", "Rollout steps finished before this one, from 0."),
    Metric("reward", "reward", "Mean reward of the step's samples."),
    Metric(
        "reward/overlong",
        "reward",
        "Mean over trajectories of what objective.overlong_buffer added to the reward, at most 0.",
    ),
    Metric(
        "reward/<name>",
        "reward",
        "Mean of a component that the reward function names, over trajectories that have it.",
    ),
    Metric("reward/kl", "nat", "Mean over trajectories of the KL subtracted from the reward."),
    Metric(
        "eval_reward", "reward", "Mean reward on the held-out prompts before the step's update."
    ),
    Metric(
        "eval/<name>/reward",
        "reward",
        "Mean reward on a set of evaluate.sets, or on the held-out prompts of a source of "
        "data.sources: over prompts, of the mean over their responses.",
    ),
    Metric("eval/<name>/reward_error", "reward", "Standard error of that mean, over prompts."),
    Metric(
        "eval/<name>/pass@<id>",
        "1",
        "pass@k: mean over prompts of 1 - C(n - c, k) / C(n, k), where c of n responses have a "
        "reward of at least evaluate.pass_reward; held_out are the held-out prompts.",
        source="Chen et al. 2021, arXiv 2107.03374",
    ),
    Metric("eval/<name>/pass@<id>_error", "1", "Standard error of pass@k, over prompts."),
    Metric("eval/<name>/truncated", "1", "Fraction of responses that ran out of room."),
    Metric("eval/<name>/response_len", "tokens", "Mean number of tokens of a response."),
    Metric(
        "eval/<name>/dropped",
        "1",
        "Fraction of prompts without a response.",
        (0, 0.5),
        problem="{share} of evaluated prompts dropped",
    ),
    Metric(
        "eval_loss",
        "nat",
        "Mean of -log p over the loss tokens of the records held out, before the step's update.",
    ),
    Metric(
        "loss",
        "1",
        "Sum of the token losses over the loss tokens of all ranks, divided by their number, "
        "averaged over the step's updates.",
    ),
    Metric("loss/policy", "1", "Part of loss from the policy term."),
    Metric("loss/ref_kl", "1", "Part of loss from the reference: kl_coef * the KL term."),
    Metric("loss/distill", "1", "Part of loss from the teacher: distill_coef * the divergence."),
    Metric("loss/entropy", "1", "Part of loss from the bonus: -entropy_coef * policy/entropy."),
    Metric(
        "mtp_loss",
        "nat",
        "Mean of -log p over the loss tokens that the MTP layers predict.",
    ),
    Metric("grad_norm", "1", "L2 norm of the whole gradient before clipping."),
    Metric("lr", "1", "Learning rate, averaged over the step's updates."),
    # rollout and trainer disagree
    Metric(
        "mismatch/k3",
        "nat",
        "mean(r - 1 - d), an estimate of KL(rollout || old).",
        (2e-3, 2e-2),
        _K3,
        problem=_DISAGREE,
    ),
    Metric("mismatch/abs_mean", "nat", "mean(|d|).", (0.03, 0.1), problem=_DISAGREE),
    Metric("mismatch/p99", "nat", "Smallest |d| that at least 99 % of the tokens do not exceed."),
    Metric("mismatch/max", "nat", "max(|d|)."),
    Metric(
        "mismatch/prob_abs_mean",
        "1",
        "mean(|exp(old) - exp(rollout)|).",
        (0.005, 0.01),
        _VERL,
        problem=_DISAGREE,
    ),
    Metric(
        "mismatch/f2",
        "1",
        "Fraction of tokens with max(r, 1/r) > 2.",
        (1e-2, 0.1),
        _R3,
        problem=_DISAGREE,
    ),
    Metric(
        "mismatch/f5",
        "1",
        "Fraction of tokens with max(r, 1/r) > 5.",
        (1e-3, 1e-2),
        _R3,
        problem=_DISAGREE,
    ),
    Metric(
        "mismatch/ess",
        "1",
        "Effective sample size (sum r)^2 / (n sum r^2), r unclamped.",
        (0.9, 0.5),
        problem=_DISAGREE,
    ),
    Metric(
        "mismatch/chi2",
        "1",
        "mean(r^2) - 1, an estimate of chi2(old || rollout).",
        (0.1, 1.0),
        _VERL,
        problem=_DISAGREE,
    ),
    Metric(
        "mismatch/ppl_ratio",
        "1",
        "exp(-mean(d)), perplexity in the trainer over that in the engine.",
    ),
    Metric(
        "mismatch/nonfinite",
        "tokens",
        "Tokens whose d is NaN or infinite.",
        (0, 0.5),
        problem="log-probs that are not finite: {value}",
    ),
    # the update
    Metric("policy/ppo_kl", "nat", "mean(old_logprob - logprob), 0 with one update a step."),
    Metric(
        "policy/clip_fraction",
        "1",
        "Fraction of tokens whose policy term has no gradient because the clip is active.",
        (0.2, 0.5),
        problem="{share} of tokens clipped",
    ),
    Metric(
        "policy/last_epoch/ppo_kl",
        "nat",
        "policy/ppo_kl in the last of several batching.epochs.",
    ),
    Metric(
        "policy/last_epoch/clip_fraction",
        "1",
        "policy/clip_fraction in the last of several batching.epochs.",
    ),
    Metric(
        "policy/entropy", "nat", "Mean exact entropy of the policy's distribution, -sum p log p."
    ),
    Metric(
        "policy/ref_kl",
        "nat",
        "Mean of the estimate objective.kl, of k = logprob - ref_logprob.",
        None,
        _K3,
    ),
    Metric(
        "policy/divergence",
        "nat",
        "Mean divergence from the teacher's distribution (objective.distill), in the update.",
    ),
    Metric(
        "policy/teacher_kl",
        "nat",
        "Mean of old_logprob - teacher_logprob, an estimate of the reverse KL to the teacher.",
        None,
        "https://thinkingmachines.ai/blog/on-policy-distillation/",
    ),
    Metric(
        "policy/teacher_clip_fraction",
        "1",
        "Fraction of tokens whose difference to the teacher objective.distill_clip cuts.",
    ),
    Metric(
        "policy/tis_mean",
        "1",
        "Mean weight (objective.tis_cap) of the policy term, before tokens are rejected.",
        None,
        "https://fengyao.notion.site/off-policy-rl",
    ),
    Metric("policy/rejected/token", "1", "Fraction of tokens outside objective.mask_ratio."),
    Metric(
        "policy/rejected/sequence",
        "1",
        "Fraction of tokens in samples outside objective.sequence_bounds, but not counted before.",
    ),
    Metric(
        "policy/rejected/veto",
        "1",
        "Fraction of tokens in samples below objective.veto, but not counted before.",
    ),
    Metric("policy/opsm_fraction", "1", "Fraction of tokens dropped by objective.opsm."),
    Metric(
        "policy/guarded_fraction",
        "1",
        "Fraction of tokens with a log-ratio beyond +-20, which was clamped before exp.",
        (0, 1e-3),
        problem="{share} of log-ratios clamped",
    ),
    Metric(
        "policy/skipped_updates",
        "updates",
        "Minibatches without any loss token, counted in each epoch, which update nothing; other "
        "metrics of the update are means over the rest.",
        (0, 0.5),
        problem="minibatches without loss tokens: {value}",
    ),
    # routing: the engine's experts against the trainer's own choice
    Metric(
        "route/agree_topk",
        "1",
        "Mean over tokens and layers of |engine's experts and trainer's own| / K.",
        (0.9, 0.7),
        _R3,
        problem="routers agree on {share} of experts",
    ),
    Metric(
        "route/agree_topk/layer_<id>", "1", "route/agree_topk of one layer, its global id from 0."
    ),
    Metric(
        "route/exact_set", "1", "Fraction of (token, layer) with the same set of experts in both."
    ),
    Metric(
        "route/coverage",
        "1",
        "Fraction of rows for which the engine gave a route.",
        (1, 0.99),
        problem="rows without routes",
    ),
    Metric(
        "route/fallback_rows",
        "rows",
        "Rows that the trainer's router decides even in replay: the engine gave no route, or it is "
        "masked.",
    ),
    Metric(
        "route/masked",
        "rows",
        "Rows whose routes came from the engine and are left out: they are of weights before an "
        "update within the sample (rollout.second_span_routes).",
    ),
    Metric(
        "route/changed_rows",
        "rows",
        "Rows whose routes differ in a later turn of the trajectory; turns.routes selects which "
        "are trained.",
    ),
    *SOURCE_METRICS,
    *SCORING_METRICS,
    *TURN_METRICS,
    # the rollout
    Metric("rollout/tokens", "tokens", "Prompt and response tokens of the step's samples."),
    Metric("rollout/response_len", "tokens", "Mean tokens of a response."),
    Metric(
        "rollout/truncated",
        "1",
        "Fraction of trajectories cut off at their budget.",
        (0.3, 0.8),
        problem="{share} truncated",
    ),
    Metric("rollout/samples_per_trajectory", "1", "Samples that a trajectory was cut into, mean."),
    Metric("rollout/reward_std", "reward", "Standard deviation of the rewards over all samples."),
    Metric(
        "rollout/tokens_per_pass",
        "tokens",
        "Mean tokens that a forward pass of the engine sampled for a response; 1: no drafted token "
        "was accepted (rollout.speculation).",
    ),
    Metric("rollout/kept_tokens", "tokens", "Mean size of a set that top-p and top-k kept."),
    Metric(
        "rollout/flat_groups",
        "1",
        "Fraction of the generated groups whose samples have equal rewards, which give no "
        "gradient; not with objective.advantage none.",
        (0.8, 0.99),
        problem="{share} flat groups",
    ),
    Metric(
        "rollout/flat_groups_kept",
        "groups",
        "Such groups that are trained on, because objective.dynamic_sampling found too few others.",
    ),
    Metric(
        "rollout/single_groups",
        "groups",
        "Groups of one trajectory, whose advantage is 0 wherever it compares with the group.",
    ),
    Metric(
        "rollout/refills",
        "rounds",
        "Rounds of further prompts that objective.dynamic_sampling took to replace such groups.",
    ),
    Metric(
        "rollout/dropped_groups",
        "groups",
        "Groups that objective.dynamic_sampling generated and did not train on.",
    ),
    Metric("rollout/dropped_tokens", "tokens", "Response tokens of these groups."),
    Metric(
        "rollout/reward_all",
        "reward",
        "Mean reward of all samples that objective.dynamic_sampling generated, trained on or not.",
    ),
    Metric(
        "rollout/aborted_groups",
        "groups",
        "Groups that rollout.oversample added, aborted once enough others were complete.",
    ),
    Metric(
        "rollout/aborted_tokens",
        "tokens",
        "Tokens of complete responses in aborted groups, without responses that were cut off.",
    ),
    *SERVER_METRICS,
    *AGE_METRICS,
    # records, of a run without rollouts
    Metric("data/epoch", "1", "Times the run has gone through its records, after this step."),
    Metric("data/tokens", "tokens", "Tokens of the step's records."),
    Metric("data/loss_tokens", "tokens", "Number of them under the loss mask."),
    Metric("data/longest", "tokens", "Tokens of the step's longest record."),
    Metric("data/truncated", "1", "Fraction of the step's records that were cut to max_tokens."),
    Metric("data/padding", "1", "Fraction of the rows that all ranks compute that is padding."),
    *COSTS,
)

GLOSSARY: dict[str, Metric] = {metric.name: metric for metric in _METRICS}

RENAMED = {  # names in the metrics.jsonl of earlier versions
    "time/make_room": "time/offload",
    "time/take_back": "time/onload",
    "memory/put_aside": "memory/offloaded",
}


def lookup(name: str) -> Metric | None:
    """The metric called ``name``, today or in an earlier version; None if there is none.

    Numbers in the name match ``<id>``; names of reward components, sets and sources ``<name>``.
    """
    name = RENAMED.get(name, name)
    general = re.sub(r"^reward/.*", "reward/<name>", re.sub(r"_\d+$", "_<id>", name))
    if match := re.fullmatch(r"eval/[^/]+/(.*)", name):
        general = "eval/<name>/" + re.sub(r"@\d+", "@<id>", match[1])
    if match := re.fullmatch(r"source/[^/]+/(.*)", name):
        general = f"source/<name>/{match[1]}"
    return GLOSSARY.get(name) or GLOSSARY.get(general)


def described(name: str) -> Metric:
    """The metric called ``name``; one without words and levels if the glossary has none."""
    return lookup(name) or Metric(name, "1", "")


def explained(name: str) -> str:
    """The definition of a metric, and of the symbols in it."""
    definition = described(name).definition
    if re.search(r"\b(d|r|old|rollout)\b", definition) and name.startswith("mismatch/"):
        return f"{definition} {SYMBOLS}"
    return definition


def check_names(names: Iterable[str]) -> None:
    """Refuse names that have no definition.

    Raises:
        ValueError: naming all of them.
    """
    unknown = sorted({name for name in names if lookup(name) is None})
    if unknown:
        raise ValueError(
            f"check_names: metrics {unknown} have no definition, expected each in the glossary. "
            "Add them to pyrl_ext/metrics/glossary.py"
        )


def page() -> str:
    """All metrics as a page of Markdown: docs/metrics.md."""
    return "\n".join([*_HEAD, *map(_line, GLOSSARY.values()), ""])


_HEAD = (
    "# Metrics",
    "",
    "What a run logs to `metrics.jsonl`: the unit, the formula, and the levels at which a value is",
    "worth a look (warn) or wrong (alarm). Written by `python -m pyrl_ext.metrics.glossary`.",
    "`<id>` stands for a number, `<name>` for the name of a component, a set or a source.",
    "",
    "In the formulas d = old_logprob - rollout_logprob of a token and r = exp(d), where old is the",
    "trainer's policy before the update. Means run over the tokens under the loss mask: of the",
    "whole rollout batch in mismatch metrics, of each minibatch in policy metrics and losses,",
    "which are then averaged over the step's updates.",
    "",
    "| metric | unit | definition | warn, alarm |",
    "| --- | --- | --- | --- |",
)


def _line(metric: Metric) -> str:
    band = "" if metric.band is None else ", ".join(f"{level:g}" for level in metric.band)
    definition = metric.definition.replace("|", "\\|")
    return f"| `{metric.name}` | {metric.unit} | {definition} | {band} |"


if __name__ == "__main__":
    print(page(), end="")
