"""The teacher: what reads it, and what excludes it."""

from __future__ import annotations

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule


@rule("teacher.model")
def a_teacher_is_asked_for(plan: Plan) -> Found:
    if plan.teacher.model is not None and not plan.objective.distill_coef:
        rule = "expected objective.distill_coef above 0, or objective: opd; nothing else reads it"
        return f"{show(plan.teacher.model)} with objective.distill_coef 0, {rule}"


@rule("teacher.dtype")
def a_dtype_is_of_a_teacher(plan: Plan) -> Found:
    if plan.teacher.dtype is not None and plan.teacher.model is None:
        return f"{plan.teacher.dtype} without teacher.model, expected it left out"


@rule("objective")
def distillation_has_a_teacher(plan: Plan) -> Found:
    objective = plan.objective
    if objective.distill_coef and plan.teacher.model is None:
        value = f"{objective.distill_coef:g} without a teacher"
        yield "distill_coef", f"{value}, expected teacher.model: the folder or hub id of a model"
    if objective.distill_clip is not None and not objective.distill_coef:
        value = f"{objective.distill_clip:g} without distill_coef"
        yield "distill_clip", f"{value}, expected it left out; nothing else reads it"
    if objective.advantage == "none" and not objective.distill_coef:
        rule = "expected distill_coef above 0; nothing would be trained"
        yield "advantage", f"none with distill_coef 0, {rule}"
    if objective.advantage == "none" and objective.dynamic_sampling:
        rule = "expected 0; groups with equal rewards are trained on"
        rounds = objective.dynamic_sampling
        yield "dynamic_sampling", f"{rounds} with advantage none, {rule}"


@rule("teacher.model")
def the_teacher_scores_all_of_the_vocabulary(plan: Plan) -> Found:
    if plan.teacher.model is None or not plan.trains_on_sampling_mask:
        return None
    rollout = plan.rollout
    return (
        f"{show(plan.teacher.model)} with rollout.top_p {rollout.top_p:g} and rollout.top_k "
        f"{rollout.top_k}, expected 1 and 0; the policy's log-probs would be of the tokens that "
        "were kept alone, and the teacher's of all"
    )


@rule("teacher.model")
def the_teacher_reads_text(plan: Plan) -> Found:
    if plan.teacher.model is not None and plan.modules:
        names = ", ".join(plan.modules)
        return f"{show(plan.teacher.model)} with modules {names}, expected none; it sees no images"
