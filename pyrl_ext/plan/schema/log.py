"""The section `log` of the YAML: what a run shows and records besides metrics.jsonl."""

from __future__ import annotations

from pydantic import Field

from pyrl_ext.plan.language.fields import Count, Section, Text


class Log(Section):
    """Progress displays in addition to metrics.jsonl."""

    tensorboard: bool = False
    """write tensorboard events into the run folder"""
    wandb: Text | None = None
    """project of Weights & Biases that also gets the metrics"""
    profile: list[Count] = Field(default=[])
    """steps that torch's profiler traces on every rank"""
    progress: bool = True
    """print a line per step on stderr, above a live bar if that is a terminal"""
