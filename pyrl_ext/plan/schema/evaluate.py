"""``evaluate``: when held-out prompts are answered, how responses are drawn, and further sets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pyrl_ext.plan.language.fields import Count, NonNegative, Positive, RelativePath, Section, Text

DEFAULT_EVERY = 20
HELD_OUT = "held_out"  # name of the set of held-out prompts of data.prompts or data.eval_prompts


class EvalSet(Section):
    """A set of prompts in a file; what is null is as for the held-out prompts."""

    file: Annotated[Text, RelativePath(or_hub_id=True)]
    """.jsonl, .parquet, folder or dataset like data.prompts, relative to this YAML file"""
    subset: Text | None = None
    """configuration of a dataset; null: its only one"""
    split: Text = "test"
    """split of a folder or dataset"""
    prompts: Positive | None = None
    """most prompts that are used; null: all"""
    reward: Annotated[Text, Field(pattern=r"^[\w.]+(:[\w.]+)?$")] | None = None
    """module:function that scores a response, or a name as of data.reward; null: that"""
    samples: Positive | None = None
    """responses for each prompt"""
    temperature: NonNegative | None = None
    """0: greedy"""
    max_new_tokens: Positive | None = None
    """longest response [tokens]"""


class Evaluate(Section):
    """The held-out evaluation."""

    every: Count | None = None
    """steps between evaluations, which also follow the last step; 0: never; null: 20, or never
    where no data is held out or samples are recorded ones"""
    prompts: Count = 64
    """most held-out prompts of an evaluation"""
    samples: Positive = 1
    """responses for each prompt"""
    temperature: NonNegative = 0.0
    """0: greedy"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """nucleus sampling, with a temperature above 0"""
    top_k: Count = 0
    """most likely tokens that are kept, with a temperature above 0; 0: all"""
    max_new_tokens: Positive | None = None
    """longest response [tokens], at most rollout.max_new_tokens; null: that"""
    pass_k: list[Positive] = [1]  # noqa: RUF012  a field of pydantic
    """k of each pass@k, at most the number of samples"""
    pass_reward: float = 1.0
    """smallest reward of a response that passes"""
    sets: dict[str, EvalSet] = Field(default={})
    """further sets by name"""

    def samples_of(self, chosen: EvalSet | None) -> int:
        """Responses for each prompt of a set; None: of the held-out prompts."""
        own = None if chosen is None else chosen.samples
        return self.samples if own is None else own

    def temperature_of(self, chosen: EvalSet | None) -> float:
        """Temperature of a set; None: of the held-out prompts."""
        own = None if chosen is None else chosen.temperature
        return self.temperature if own is None else own
