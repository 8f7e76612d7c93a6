"""Metrics of rollouts: the age of samples, turns, and remote engines.

Requests of remote engines are those between the last two publishes, of all ranks; prompts are those
since the process began, evaluation included.
"""

from __future__ import annotations

from pyrl_ext.metrics.metric import Metric
from pyrl_ext.plan.schema import REWARD_REASONS
from pyrl_ext.plan.schema.turns import REASONS

# of `rollout.ahead`
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
        "Groups that were started for the step before, and completed too late for it.",
    ),
    Metric(
        "rollout/stale_groups",
        "groups",
        "Complete groups that were dropped: a loss token is more than rollout.ahead versions old.",
    ),
)

# of each source of prompts
SOURCE_METRICS = (
    Metric(
        "source/<name>/reward",
        "reward",
        "Mean reward of the samples of a source of data.sources, with those that "
        "objective.dynamic_sampling drops.",
    ),
    Metric(
        "source/<name>/solved",
        "1",
        "Fraction of these samples with a reward of at least evaluate.pass_reward.",
    ),
    Metric("source/<name>/response_len", "tokens", "Mean tokens of their responses."),
    Metric("source/<name>/groups", "groups", "Number of their groups."),
    Metric(
        "source/<name>/teacher_kl",
        "nat",
        "policy/teacher_kl over the loss tokens of the samples of a source, with a teacher.",
    ),
    Metric("source/<name>/level", "1", "Level of difficulty of its task, the first one is 1."),
)

# of a reward function in worker processes
SCORING_METRICS = (
    Metric(
        "scoring/calls_per_second",
        "calls/s",
        "Calls of the reward function of all ranks, over the time in which any of them waited or "
        "ran, on the rank where that is longest.",
    ),
    Metric("scoring/call_seconds", "s", "Time of a call that returned a reward, mean."),
    Metric(
        "scoring/wait_seconds",
        "s",
        "Time that a rank waited for rewards after its responses were there, the longest.",
    ),
    Metric("scoring/retries", "calls", "Calls of the reward function that were made again."),
    Metric("scoring/dropped", "responses", "Responses without a reward; they are not trained on."),
    *(
        Metric(f"scoring/dropped/{reason}", "responses", f"Those of them where {meaning}.")
        for reason, meaning in REWARD_REASONS.items()
    ),
)

# of trajectories of several turns
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
        "Time in which an engine was idle, waiting for environments, the largest of all engines.",
    ),
    Metric(
        "eval_dropped",
        "1",
        "Fraction of held-out prompts whose trajectory is dropped.",
        (0, 0.5),
        problem="{share} of held-out prompts dropped",
    ),
)

# step of a publish -> what its seconds are
STEPS = {
    "identity": "to compare a server's model with the trainer's",
    "pause": "to pause a server, with what rollout.pause waits for",
    "start": "until a server expects weights",
    "transfer": "to send and verify all weights",
    "finish": "to load what was verified",
    "reset": "to drop caches",
    "resume": "to resume a server",
    "canary": "of a server's answers to the canary, while it generates",
    "proof": "that the trainer waits for these answers and scores the canary",
}

SERVER_METRICS = (
    Metric("servers/used", "servers", "Servers that have the step's weights."),
    Metric("servers/requests", "requests", "Responses that servers were asked for, a turn each."),
    Metric(
        "servers/resent",
        "requests",
        "Requests that another server took over, because theirs failed.",
        (0, 100),
        problem="requests moved to other servers: {value}",
    ),
    Metric(
        "servers/aborted_parts",
        "requests",
        "Parts of responses that a publish aborted; the next part has the new weights.",
    ),
    Metric("servers/seconds", "s", "Time of a request on servers, mean."),
    Metric("servers/queue_seconds", "s", "Time that a request waited for a server, mean."),
    Metric("servers/queue_max", "requests", "Most requests that waited at once, on any rank."),
    Metric(
        "servers/prompts_asked",
        "prompts",
        "Prompts that servers were asked for: those returned, aborted, failed and in flight.",
    ),
    Metric("servers/prompts_returned", "prompts", "Prompts whose responses all came."),
    Metric(
        "servers/prompts_aborted",
        "prompts",
        "Prompts that were aborted because enough others were complete.",
    ),
    Metric("servers/prompts_failed", "prompts", "Prompts that failed with an error."),
    Metric("servers/prompts_in_flight", "prompts", "Prompts of streams that are open."),
    *(
        Metric(f"publish/{step}_seconds", "s", f"Time {meaning}, the longest of any server.")
        for step, meaning in STEPS.items()
    ),
    Metric("publish/bytes", "bytes", "Sent by all ranks to servers; what servers pass on is not."),
    Metric(
        "publish/saved_bytes",
        "bytes",
        "Bytes that were not sent since they had not changed (rollout.delta_sync).",
    ),
    Metric(
        "publish/again",
        "servers",
        "Servers that got all weights again: another server failed, or changes did not fit.",
    ),
    Metric("publish/seconds", "s", "A publish, from the first question to the last server."),
    Metric(
        "publish/wait_seconds",
        "s",
        "Part of publish/seconds the trainer waits after its passes (rollout.overlap_publish).",
    ),
)
