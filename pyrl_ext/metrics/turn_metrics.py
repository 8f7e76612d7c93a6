"""Metrics of trajectories of several turns."""

from __future__ import annotations

from pyrl_ext.metrics.metric import Metric
from pyrl_ext.plan.schema.turns import REASONS

TURN_METRICS = (
    Metric("turns/mean", "turns", "Mean number of turns of the trajectories that are trained on."),
    Metric("turns/max", "turns", "Most turns of such a trajectory."),
    Metric(
        "turns/forks",
        "turns",
        "Turns whose context did not begin with the tokens of the turn before.",
    ),
    Metric(
        "turns/dropped", "trajectories", "Trajectories that are not trained on, for any reason."
    ),
    *(
        Metric(f"turns/dropped/{reason}", "trajectories", f"Those of them where {meaning}.")
        for reason, meaning in REASONS.items()
    ),
    Metric(
        "turns/close_failed",
        "trajectories",
        "Trajectories, trained on or not, whose environment failed when it was closed.",
    ),
    Metric("turns/retries", "calls", "Calls of environments that were made again."),
    Metric(
        "turns/environment_seconds",
        "s",
        "Time of a trajectory in calls of its environment, mean.",
    ),
    Metric(
        "turns/waited_seconds",
        "s",
        "Time in which an engine had nothing to do but to wait for environments, the largest of "
        "all engines.",
    ),
    Metric(
        "eval_dropped", "1", "Fraction of held-out prompts whose trajectory is dropped.", (0, 0.5)
    ),
)
