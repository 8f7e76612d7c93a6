"""Metrics of what a step costs: time, bytes moved, memory. A part of the glossary."""

from __future__ import annotations

from pyrl_ext.metrics.metric import Metric

COSTS = (
    # time
    Metric(
        "time/data",
        "s",
        "Wall time of reading and encoding the step's records.",
        phase="ours",
    ),
    Metric("time/rollout", "s", "Wall time of generating and scoring samples.", phase="model"),
    Metric(
        "time/old_logprobs",
        "s",
        "Wall time of log-probs under the policy before the update.",
        phase="model",
    ),
    Metric(
        "time/ref_logprobs",
        "s",
        "Wall time of log-probs under the reference policy.",
        phase="model",
    ),
    Metric(
        "time/teacher_logprobs",
        "s",
        "Wall time of log-probs under the teacher.",
        phase="model",
    ),
    Metric(
        "time/update",
        "s",
        "Wall time of forward, backward and optimizer over all updates.",
        phase="model",
    ),
    Metric(
        "time/replay",
        "s",
        "Host time that routes, forcing and agreement counts add to the phases above.",
    ),
    Metric(
        "time/exchange",
        "s",
        "Wall time of checking samples and of waiting for the rows of other ranks, in passes too.",
        phase="ours",
    ),
    Metric(
        "time/publish", "s", "Wall time of sending the weights to the rollout engine.", phase="ours"
    ),
    Metric(
        "time/offload",
        "s",
        "Part of time/publish: offloading gradients, optimizer state and weights to the host.",
    ),
    Metric(
        "time/onload",
        "s",
        "Wall time of putting the engine to sleep and onloading the trainer.",
        phase="ours",
    ),
    Metric(
        "batch/moved_bytes",
        "bytes",
        "Rows of samples that all ranks together received from ranks of other hosts.",
    ),
    Metric("batch/moved_bytes/tokens", "bytes", "The part that is tokens, targets and masks."),
    Metric(
        "batch/moved_bytes/logprobs",
        "bytes",
        "The part of them that is log-probs and advantages.",
    ),
    Metric("batch/moved_bytes/routes", "bytes", "The part of them that is routed experts."),
    Metric("batch/moved_bytes/images", "bytes", "The part of them that is patches of images."),
    Metric("batch/moved_bytes/kept", "bytes", "The part of them that is kept sets."),
    Metric(
        "batch/shared_bytes",
        "bytes",
        "Rows of samples that all ranks together read in the memory of other ranks of their host.",
    ),
    Metric(
        "memory/peak",
        "bytes",
        "Most memory that one of the ranks held: on a GPU what torch allocated there in the step, "
        "on a CPU the resident set since the process started, with Python and libraries.",
    ),
    Metric(
        "memory/offloaded", "bytes", "Device memory that rank 0's trainer freed for the rollout."
    ),
    Metric(
        "memory/engine_slept",
        "bytes",
        "Device memory that rank 0's engine freed when it went to sleep.",
    ),
    Metric(
        "publish/tensor_bytes",
        "bytes",
        "Bytes of the tensors that rank 0 sent to the engine: all of them, or those that changed.",
    ),
    Metric(
        "publish/move_seen",
        "1",
        "With LoRA adapters that are merged into what is published: the share of the policy's move "
        "that is left in the engine's dtype, sum of d * (round(W + d) - round(W)) / sum of d ** 2 "
        "over all numbers of the weights W with an adapter, d = alpha / rank * B A in float32.",
        band=(0.9, 0.5),
        problem="{share} of the policy's move reaches the engine",
    ),
    Metric(
        "publish/checked",
        "tensors",
        "Tensors whose digest in the engine was compared with the trainer's and equal.",
    ),
    Metric("time/eval", "s", "Wall time of the held-out evaluation.", phase="model"),
    Metric("time/checkpoint", "s", "Wall time of saving a checkpoint.", phase="ours"),
    Metric(
        "time/step",
        "s",
        "Wall time of the step: all phases above except the checkpoint, and the time between them.",
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "Model inputs of the batch (the tokens of its samples without the last ones) / time/step.",
    ),
)
