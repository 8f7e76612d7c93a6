"""The section `teacher`: a frozen model that scores what the policy samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pyrl_ext.plan.language.fields import Dtype, Folder, Rate, RelativePath, Section, Text
from pyrl_ext.plan.schema.servers import Address


class Teacher(Section):
    """A frozen model whose log-probs of the sampled tokens train the policy
    (objective.distill_coef). It has the policy's tokenizer, and runs on the trainer's ranks, or on
    servers."""

    model: Folder | None = None
    """folder of a Hugging Face model, relative to this YAML file, or a hub id; null: no teacher"""
    dtype: Dtype | None = None
    """of its weights and activations; null: model.dtype"""
    servers: list[Address] = Field(default=[])
    """addresses of vLLM's servers of the model, http://host:port each; empty: it runs on the
    trainer's ranks"""
    key: Annotated[Text, RelativePath()] | None = None
    """file with the API key that the servers require (--api-key), relative to this YAML file; null:
    none"""
    request_timeout: Rate = 600.0
    """a server that does not answer a request within this time is not asked again in the step
    [seconds]"""
