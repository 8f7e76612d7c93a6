"""Metrics of engines that run apart. Requests are those between the last two publishes, of all
ranks; prompts are those since the process began, evaluation included."""

from __future__ import annotations

from pyrl_ext.metrics.metric import Metric

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
        "Requests that another server went on with, because theirs failed.",
        (0, 100),
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
        "Prompts that were given up since enough others were complete.",
    ),
    Metric("servers/prompts_failed", "prompts", "Prompts that were given up because of an error."),
    Metric("servers/prompts_in_flight", "prompts", "Prompts of streams that are open."),
    *(
        Metric(f"publish/{step}_seconds", "s", f"Time {meaning}, the longest of any server.")
        for step, meaning in STEPS.items()
    ),
    Metric("publish/bytes", "bytes", "Sent by all ranks to servers; what servers pass on is not."),
    Metric(
        "publish/again",
        "servers",
        "Servers that got the weights a second time, since the one before them failed.",
    ),
    Metric("publish/seconds", "s", "A publish, from the first question to the last server."),
    Metric(
        "publish/wait_seconds",
        "s",
        "Of it, what the trainer waited for after its passes (rollout.publish_beside).",
    ),
)
