"""Batch sizes: groups, minibatches, microbatches."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, indivisible, rule
from pyrl_ext.plan.schema.objective import ADVANTAGES
from pyrl_ext.schedule.alignment import alignment


@rule("batching.minibatches")
def whole_groups_in_a_minibatch(plan: Plan) -> Found:
    key = _step_key(plan)
    why = "a minibatch holds whole groups"
    return indivisible(plan.batching.minibatches, {key: getattr(plan.batching, key)}, why)


@rule("batching.minibatches")
def a_sample_for_every_replica(plan: Plan) -> Found:
    samples = plan.samples_per_minibatch
    sizes = plan.parallel
    least = -(-sizes.dp * sizes.cp // (sizes.dynamic_cp or sizes.cp))  # ranks may share samples
    if samples < least:
        return (
            f"{samples} samples a minibatch ({plan.samples} samples / {plan.batching.minibatches}),"
            f" expected at least {least}: dp * cp over the largest cp; a replica would have "
            f"nothing to do. Raise batching.{_step_key(plan)}"
        )


@rule("batching.epochs")
def several_epochs_have_a_ratio(plan: Plan) -> Found:
    if plan.batching.epochs > 1 and plan.objective.loss == "reinforce":
        return (
            f"{plan.batching.epochs} with objective.loss reinforce, expected 1; it has no ratio to "
            "the policy that was scored, so later epochs would train as if nothing had changed. "
            "Use another loss"
        )


@rule("batching.samples_per_prompt")
def groups_have_a_spread(plan: Plan) -> Found:
    each = plan.batching.samples_per_prompt
    name = plan.objective.advantage
    of_groups = name in ADVANTAGES and name not in ("reinforce_pp", "none")
    if plan.has_rollouts and of_groups and each == 1:
        return (
            f"1, expected at least 2 with objective.advantage {name}; an advantage is the distance "
            "from the rewards of its group, which is always 0 for a group of one"
        )


@rule("batching.tokens_per_microbatch")
def longest_sample_fits(plan: Plan) -> Found:
    parallel = plan.parallel
    budget = plan.batching.tokens_per_microbatch
    cp = parallel.dynamic_cp or parallel.cp  # of a microbatch that holds the longest sample
    unit = alignment(parallel.tp, cp, plan.tile_rows)
    rows = -(-plan.longest // unit) * unit
    least = rows // cp
    if budget < least:
        shared = f", shared by {cp} context-parallel ranks" if cp > 1 else ""
        summands, lower = _longest(plan)
        return (
            f"{budget}, expected at least {least}{shared}; the longest sample has {summands} - 1 "
            f"rows, padded to a multiple of {unit}. Raise it, or lower {lower}"
        )


def _step_key(plan: Plan) -> str:
    """The key of `batching` that says how much a step takes."""
    return "prompts" if plan.has_rollouts else "samples"


def _longest(plan: Plan) -> tuple[str, str]:
    """(the tokens of the longest sample as its keys say them, the key that lowers them)."""
    prompt = plan.data.max_prompt_tokens
    response = plan.rollout.max_new_tokens
    if not plan.has_rollouts:
        return f"data.max_tokens {plan.data.max_tokens}", "data.max_tokens"
    if plan.turns.kind is not None:
        return f"turns.max_tokens {plan.turns.max_tokens}", "turns.max_tokens"
    summands = f"data.max_prompt_tokens {prompt} + rollout.max_new_tokens {response}"
    return summands, "rollout.max_new_tokens"


@rule("data.max_tokens")
def positions_suffice_for_records(plan: Plan) -> Found:
    most = plan.sizes.max_position_embeddings
    tokens = plan.data.max_tokens
    if tokens > most:
        return f"{tokens}, expected at most max_position_embeddings {most} {in_config(plan)}"


@rule("rollout.max_new_tokens")
def positions_suffice(plan: Plan) -> Found:
    tokens = plan.data.max_prompt_tokens + plan.rollout.max_new_tokens
    if plan.turns.kind is None and tokens > plan.sizes.max_position_embeddings:
        return (
            f"{plan.rollout.max_new_tokens} + data.max_prompt_tokens {plan.data.max_prompt_tokens} "
            f"= {tokens} tokens, expected at most max_position_embeddings "
            f"{plan.sizes.max_position_embeddings} {in_config(plan)}"
        )
