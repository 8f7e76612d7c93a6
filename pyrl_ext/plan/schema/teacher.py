"""The section `teacher`: a frozen model that scores what the policy samples."""

from __future__ import annotations

from pyrl_ext.plan.language.fields import Dtype, Folder, Section


class Teacher(Section):
    """A frozen model whose log-probs of the sampled tokens train the policy
    (objective.distill_coef). It has the policy's tokenizer, and runs on the trainer's ranks."""

    model: Folder | None = None
    """folder of a Hugging Face model, relative to this YAML file, or a hub id; null: no teacher"""
    dtype: Dtype | None = None
    """of its weights and activations; null: model.dtype"""
