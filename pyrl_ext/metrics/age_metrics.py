"""Metrics of runs that generate ahead of the trainer (``rollout.ahead``)."""

from __future__ import annotations

from pyrl_ext.metrics.metric import Metric

AGE_METRICS = (
    Metric(
        "age/mean",
        "versions",
        "Mean age of the loss tokens: the trainer's version less the one that generated the token.",
    ),
    Metric("age/max", "versions", "Largest age of a loss token."),
    Metric("age/share_<id>", "1", "Fraction of the loss tokens that have this age."),
    Metric(
        "age/mismatch_<id>",
        "nat",
        "mismatch/abs_mean of the tokens of this age; at 0 the engine's.",
    ),
    Metric("age/clip_fraction_<id>", "1", "policy/clip_fraction of the tokens of this age."),
    Metric(
        "age/agree_topk_<id>",
        "1",
        "route/agree_topk of the samples whose oldest token has this age.",
    ),
    Metric(
        "age/reward_<id>",
        "reward",
        "Mean reward of the trajectories whose oldest token has this age.",
    ),
    Metric(
        "rollout/ready",
        "1",
        "Fraction of the step's groups that were complete when the trainer asked for them; 1: the "
        "trainer is the slower one, 0: the engines are.",
    ),
    Metric(
        "rollout/carried_groups",
        "groups",
        "Groups that were begun for the step before, and became complete too late for it.",
    ),
    Metric(
        "rollout/too_old_groups",
        "groups",
        "Complete groups with loss tokens older than rollout.ahead, which are not trained on.",
    ),
)
