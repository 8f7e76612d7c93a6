"""Rules of the held-out evaluation."""

from __future__ import annotations

import re

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, data_file_problem, rule
from pyrl_ext.plan.schema.evaluate import HELD_OUT


@rule("evaluate.prompts")
def evaluation_has_prompts(plan: Plan) -> Found:
    every = plan.evaluate_every
    if every > 0 and plan.has_rollouts and plan.evaluate.prompts == 0:
        return f"0 with evaluate.every {every}, expected at least 1. Use every: 0 for never"


@rule("data.held_out")
def evaluation_has_records(plan: Plan) -> Found:
    every = plan.evaluate_every
    if every > 0 and not plan.has_rollouts and plan.data.held_out == 0:
        return f"0 with evaluate.every {every}, expected at least 1. Use every: 0 for never"


@rule("evaluate")
def sampled_responses_differ(plan: Plan) -> Found:
    for key, samples, temperature in _drawn(plan):
        if samples > 1 and temperature == 0:
            yield (
                f"{key}samples",
                f"{samples} with temperature 0, expected 1: greedy responses are all the same. "
                "Set a temperature above 0",
            )


@rule("evaluate.pass_k")
def passes_are_sampled(plan: Plan) -> Found:
    most = max(samples for _, samples, _ in _drawn(plan))
    wrong = [k for k in plan.evaluate.pass_k if k > most]
    if wrong:
        return (
            f"{wrong[0]}, expected at most {most}, the responses for each prompt. Raise "
            "evaluate.samples"
        )


@rule("evaluate")
def responses_fit_the_engine(plan: Plan) -> Found:
    limit = plan.rollout.max_new_tokens
    lengths = {"": plan.evaluate.max_new_tokens}
    lengths |= {f"sets.{name}.": each.max_new_tokens for name, each in plan.evaluate.sets.items()}
    for key, tokens in lengths.items():
        if tokens is not None and tokens > limit:
            yield (
                f"{key}max_new_tokens",
                f"{tokens}, expected at most rollout.max_new_tokens {limit}: the engine is built "
                "for it",
            )


@rule("evaluate")
def sets_can_be_read(plan: Plan) -> Found:
    for name, each in plan.evaluate.sets.items():
        key = f"sets.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name == HELD_OUT:
            rule_ = f"expected letters, digits, _, . and -, and not {HELD_OUT}"
            yield "sets", f"{name!r} as the name of a set, {rule_}"
            continue
        if message := data_file_problem(plan, each.file):
            yield f"{key}.file", message
        if each.reward is not None and plan.turns.rewards_all:
            yield (
                f"{key}.reward",
                f"set, expected it left out: turns.{plan.turns.kind} gives rewards",
            )
        scored_by_task = plan.data.task is not None and plan.data.reward is None
        if each.reward is None and (scored_by_task or plan.data.sources):
            owner = "data.task scores its" if plan.data.task else "data.sources score their"
            yield (
                f"{key}.reward",
                f"missing, expected module:function; {owner} own prompts",
            )


def _drawn(plan: Plan) -> list[tuple[str, int, float]]:
    """(key, responses for each prompt, temperature) of the sets that choose them."""
    base = plan.evaluate
    drawn = [("", base.samples, base.temperature)]
    for name, each in base.sets.items():
        if each.samples is None and each.temperature is None:
            continue
        drawn.append((f"sets.{name}.", base.samples_of(each), base.temperature_of(each)))
    return drawn
