"""The section that defines what is optimized: named parts, each one choice."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from pyrl_ext.plan.language.fields import Count, NonNegative, Positive, Rate, Section

LOSSES = ("ppo", "cispo", "sapo", "gmpo", "dppo", "reinforce", "sft")
ADVANTAGES = ("grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "none")
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")]
Bounds = Annotated[tuple[NonNegative, Rate], Field(strict=False)]


class Objective(Section):
    """The objective of the optimization, made of named parts."""

    preset: Name | None = None
    """a method by its name, such as dapo: the keys below that are left out come from it"""
    loss: Name = "ppo"
    """policy term of a token: ppo, cispo, sapo, gmpo, dppo or reinforce; sft (without rollouts, on
    data.path); or module:function, the whole loss, which gets the weights of the other parts"""
    loss_is_token_wise: bool = False
    """the module:function adds up losses of single loss tokens; other rows are not scored for it"""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """probability ratio: of a token; of its sequence (geometric mean); the latter's value with the
    token's gradient"""
    anchor: Literal["old", "rollout"] = "old"
    """log-probs that the ratio compares with: the policy's before the update, or the engine's"""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """the ratio is clipped below 1 - clip_low; gmpo: its logarithm below -clip_low; dppo: a token
    is dropped when its probability fell by more"""
    clip_high: Rate = 0.2
    """the ratio is clipped above 1 + clip_high; gmpo and dppo: as clip_low"""
    dual_clip: Annotated[float, Field(gt=1, le=1e30)] | None = None
    """most that a token with a negative advantage costs, times its advantage (ppo); null: any"""
    sapo_tau: Annotated[tuple[Rate, Rate], Field(strict=False)] = (1.0, 1.05)
    """sharpness of sapo's gate for positive and for negative advantages, as a list of two"""
    reduction: Literal["token", "sequence", "sequence_sum", "prompt"] = "token"
    """mean over tokens; over sequences of their token means; over sequences of their sums over
    reduction_constant; over prompts of their token means"""
    reduction_constant: Positive | None = None
    """divides the sum of a sequence (sequence_sum); null: the most that a trajectory may sample,
    rollout.max_new_tokens, with turns the total of all turns [tokens]"""
    kl_coef: NonNegative = 0.0
    """weight of the KL to the reference, the policy of model.weights; above 0 keeps a copy of its
    weights"""
    reference_refresh: Count = 0
    """steps after which the reference takes the policy's weights, again and again; checkpoints hold
    them; 0: it stays the policy of model.weights [steps]"""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """estimate of the KL at a token"""
    kl_gradient: Literal["direct", "reverse"] = "reverse"
    """gradient of the estimate itself; or that of the reverse KL, for any estimate"""
    kl_weight: Literal["none", "detached", "ratio"] = "ratio"
    """the KL of a token is weighted by the ratio to `anchor`, without its gradient or with it"""
    kl_in: Literal["loss", "reward"] = "loss"
    """added to the loss; or subtracted, summed over the sequence, from the reward"""
    distill_coef: NonNegative = 0.0
    """weight of the teacher: of `distill` in the advantage or in the loss"""
    distill: Literal["sampled", "reverse", "forward", "js"] = "sampled"
    """sampled: to the advantage of a token its log-prob under the teacher is added, less that under
    the policy before the update; the gradient is that of the reverse KL at the sampled token. Or
    to the loss of a token the divergence of the two distributions over the whole vocabulary is
    added: reverse KL(policy || teacher), forward KL(teacher || policy), or js, Jensen-Shannon"""
    distill_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """of the teacher in the mixture that js compares both with (with distill: js)"""
    distill_clip: Rate | None = None
    """largest difference of these log-probs, of either sign (with distill: sampled) [nats]; null:
    any"""
    entropy_coef: NonNegative = 0.0
    """weight of the entropy bonus"""
    tis: Literal["token", "sequence"] = "token"
    """trainer/engine probability ratio that weights a token: the token's, or its sequence's"""
    tis_cap: Rate | None = None
    """cap of the trainer/engine weight; null: no weight"""
    tis_floor: Rate | None = None
    """least value of the trainer/engine weight (with tis_cap); null: none"""
    mask_ratio: Bounds | None = None
    """tokens whose trainer/engine ratio is outside these bounds are rejected; null: none"""
    mask_sequence: Literal["geometric", "product"] = "geometric"
    """trainer/engine ratio of a sequence for sequence_bounds: geometric mean or product"""
    sequence_bounds: Bounds | None = None
    """sequences whose ratio is outside these bounds are rejected; null: none"""
    veto: Rate | None = None
    """a sequence with a token whose trainer/engine ratio is below this is rejected; null: none"""
    opsm: NonNegative | None = None
    """tokens with a negative advantage are dropped where their sequence's mean log-prob fell by
    more than this since the batch was scored [nats]; null: none"""
    overlong_buffer: Count = 0
    """range below the most that a trajectory may sample in which its reward is reduced; 0: none
    [tokens]"""
    overlong_penalty: NonNegative = 1.0
    """lost by a trajectory of the maximum length (with overlong_buffer) [reward]"""
    overlong_filter: bool = False
    """responses cut off at the maximum length have no loss tokens; their rewards still count"""
    dynamic_sampling: Count = 0
    """most rounds of further prompts that replace groups with equal rewards; 0: no replacement"""
    dynamic_sampling_shortage: Literal["keep_flat", "fail"] = "keep_flat"
    """if too few groups have unequal rewards after all rounds: train this step on groups with equal
    rewards too; or stop the run"""
    advantage: Name = "grpo"
    """grpo, rloo, opo, reinforce_pp, reinforce_pp_baseline, maxrl, or module:function; none:
    rewards are measured and not trained on (with distill_coef)"""
    normalize_std: bool = True
    """divide advantages by the group's standard deviation (grpo)"""
    leave_one_out: bool = False
    """the mean of a group leaves the trajectory itself out (grpo)"""
    mtp_coef: NonNegative = 0.1
    """weight of the multi-token-prediction layers' cross entropy (with model.mtp)"""
    mtp_detach: bool = True
    """its gradient reaches those layers only, not what they share with the policy"""

    @property
    def needs_sequences(self) -> bool:
        """True if the pass may add up numbers of current log-probs over whole sequences."""
        if ":" in self.loss:
            return not self.loss_is_token_wise
        return self.ratio != "token" or self.loss == "gmpo" or self.opsm is not None

    @property
    def teaches_sampled(self) -> bool:
        """True if a teacher's log-probs of the sampled tokens are in the advantages."""
        return self.distill_coef > 0 and self.distill == "sampled"

    @property
    def compares_distributions(self) -> bool:
        """True if a teacher's distributions over the whole vocabulary are in the loss."""
        return self.distill_coef > 0 and self.distill != "sampled"

    @property
    def is_token_wise(self) -> bool:
        """The loss is a sum over loss tokens, each seen by itself."""
        return not self.needs_sequences

    @property
    def corrects(self) -> bool:
        """True if tokens are weighed or rejected by their trainer/engine ratio."""
        given = (self.tis_cap, self.mask_ratio, self.sequence_bounds, self.veto)
        return any(each is not None for each in given)

    @property
    def corrects_sequences(self) -> bool:
        """True if tokens are weighed or rejected by numbers of their whole sequences."""
        by_sequence = self.tis_cap is not None and self.tis == "sequence"
        return by_sequence or self.sequence_bounds is not None or self.veto is not None


@cache
def presets() -> dict[str, dict[str, Any]]:
    """``plan/presets.yaml``: name -> the values that it sets."""
    path = Path(__file__).parents[1] / "presets.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def with_preset(section: dict[str, Any]) -> dict[str, Any]:
    """`section` above the values of the preset that it names. Raises: ValueError, unknown name."""
    if not isinstance(name := section.get("preset"), str):
        return section  # nothing, or no name: the schema says so
    if name not in presets():
        raise ValueError(
            f"{name!r}, expected {', '.join(presets())}. For your own, write a file with a section "
            "objective, and name it as the last parent: extends: [base.yaml, mine.yaml]"
        )
    return presets()[name] | section
