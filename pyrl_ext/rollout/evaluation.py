"""What the responses to a set of held-out prompts come to: mean reward, pass@k, length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pyrl_ext.data.prompt_dataset import PromptDataset
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema.evaluate import HELD_OUT
from pyrl_ext.rollout.build import sampling_of
from pyrl_ext.samples import Prompt, Sampling

_SHORT = {(HELD_OUT, "reward"): "eval_reward", (HELD_OUT, "dropped"): "eval_dropped"}


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its standard error; NaN where there are too few prompts."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean of one value a prompt."""
        count = len(values)
        mean = float(np.mean(values)) if count else math.nan
        error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(mean, error)


@dataclass(frozen=True)
class Evaluation:
    """Results of one set.

    Args:
        prompts:   number of prompts with at least one response.
        dropped:   share of prompts whose trajectories were all dropped.
        samples:   responses for each prompt.
        temperature: of sampling; 0: greedy.
        reward:    mean reward, n responses a prompt (mean@n).
        passes:    k -> pass@k, over the prompts with at least k responses.
        truncated: share of responses that ran out of room.
        length:    mean tokens of a response.
    """

    prompts: int
    dropped: float
    samples: int
    temperature: float
    reward: Estimate
    passes: Mapping[int, Estimate]
    truncated: float
    length: float

    @classmethod
    def of(
        cls,
        index: BatchIndex,
        asked: int,
        sampling: Sampling,
        ks: Sequence[int] = (),
        pass_reward: float = 1.0,
    ) -> Evaluation:
        """The results of the trajectories of ``index``, responses to ``asked`` prompts."""
        rewards = index.rewards[index.firsts]
        groups = index.groups[index.firsts]
        of_prompt = [rewards[groups == prompt] for prompt in np.unique(groups)]
        passes: dict[int, Estimate] = {}
        for k in ks:
            shares = [
                pass_at_k(len(own), int((own >= pass_reward).sum()), k)
                for own in of_prompt
                if len(own) >= k
            ]
            passes[k] = Estimate.of(shares)
        number = len(index.firsts) or math.nan
        return cls(
            prompts=len(of_prompt),
            dropped=1 - len(of_prompt) / asked,
            samples=sampling.samples_per_prompt,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            reward=Estimate.of([float(own.mean()) for own in of_prompt]),
            passes=passes,
            truncated=float(index.truncated.sum()) / number,
            length=float(index.sampled.sum()) / number,
        )

    def to_json(self) -> dict[str, Any]:
        """For a file of JSON, in which null stands for a number that is not defined."""
        found = asdict(self)
        for each in (found, found["reward"], *found["passes"].values()):
            for key, value in each.items():
                if isinstance(value, float) and math.isnan(value):
                    each[key] = None
        return found

    def metrics(self, name: str) -> dict[str, float]:
        """The numbers that are defined, under their glossary names; `name` is that of the set."""
        found = {
            "reward": self.reward.mean,
            "reward_error": self.reward.error,
            "truncated": self.truncated,
            "response_len": self.length,
        }
        if self.dropped:
            found["dropped"] = self.dropped
        for k, estimate in self.passes.items():
            found[f"pass@{k}"] = estimate.mean
            found[f"pass@{k}_error"] = estimate.error
        metrics = {}
        for key, value in found.items():
            if not math.isnan(value):
                metrics[_SHORT.get((name, key), f"eval/{name}/{key}")] = value
        return metrics


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of ``k`` of the ``samples`` responses, drawn without
    replacement, is correct: the unbiased estimator 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374.
    Raises: ValueError unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass_at_k: {correct} of {samples} correct, k {k}, expected 0 <= correct <= samples "
            "and 1 <= k <= samples"
        )
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def eval_sets(plan: Plan, source: PromptDataset) -> dict[str, Sequence[Prompt]]:
    """Name -> prompts, the held-out prompts first."""
    held_out = source.prompts.held_out(plan.evaluate.prompts)
    sets: dict[str, Sequence[Prompt]] = {HELD_OUT: held_out} if held_out else {}
    return sets | {name: each.prompts for name, each in source.sets.items()}


def by_source(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Name of each source -> ids of its prompts; empty if there is only one source."""
    ids: dict[str, list[int]] = {}
    for prompt in prompts:
        if prompt.source:
            ids.setdefault(prompt.source, []).append(prompt.id)
    return ids


def eval_sampling(plan: Plan, source: PromptDataset, name: str) -> Sampling:
    """How responses to the prompts of a set are drawn; the same at every step, so that two
    evaluations differ by the weights alone."""
    base = plan.evaluate
    own = base.sets.get(name)
    temperature = base.temperature_of(own)
    longest = None if own is None else own.max_new_tokens
    limit = longest or base.max_new_tokens or plan.rollout.max_new_tokens
    return replace(
        sampling_of(plan, source, 0),
        max_new_tokens=limit,
        samples_per_prompt=base.samples_of(own),
        greedy=temperature == 0,
        temperature=temperature or 1.0,
        top_p=base.top_p,
        top_k=base.top_k,
        sampling_mask=False,
        step=None,
    )
