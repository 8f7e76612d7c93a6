"""Teachers: what reads them, and what excludes them."""

from __future__ import annotations

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, rule
from pyrl_ext.plan.rules.servers import address_problems


@rule("teacher.model")
def a_teacher_is_asked_for(plan: Plan) -> Found:
    if plan.teacher.model is None:
        return None
    value = show(plan.teacher.model)
    if not plan.objective.distill_coef:
        rule = "expected objective.distill_coef above 0, objective: opd or grpo_opd"
        return f"{value} with objective.distill_coef 0, {rule}; nothing else reads it"
    if plan.data.sources and all(each.teacher for each in plan.data.sources.values()):
        return f"{value} with a teacher in each of data.sources, expected it left out"
    return None


@rule("data.sources")
def a_teacher_of_a_source_is_asked_for(plan: Plan) -> Found:
    for name, keys in plan.data.sources.items():
        if keys.teacher is not None and not plan.objective.distill_coef:
            rule = "expected objective.distill_coef above 0; nothing else reads it"
            yield f"{name}.teacher", f"{show(keys.teacher)} with objective.distill_coef 0, {rule}"


@rule("teacher.dtype")
def a_dtype_is_of_a_teacher(plan: Plan) -> Found:
    if plan.teacher.dtype is not None and not plan.teachers:
        return f"{plan.teacher.dtype} without teacher.model, expected it left out"


@rule("objective")
def distillation_has_a_teacher(plan: Plan) -> Found:
    objective = plan.objective
    untaught = [name for name in plan.data.sources or [""] if name not in plan.teachers]
    if objective.distill_coef and untaught:
        of = f" of data.sources {', '.join(untaught)}" if plan.data.sources else ""
        value = f"{objective.distill_coef:g} without a teacher{of}"
        yield "distill_coef", f"{value}, expected teacher.model: the folder or hub id of a model"
    if objective.distill_clip is not None and not objective.teaches_sampled:
        value = f"{objective.distill_clip:g} without distill_coef and distill: sampled"
        yield "distill_clip", f"{value}, expected it left out; nothing else reads it"
    if objective.distill != "sampled" and not objective.distill_coef:
        yield "distill", f"{objective.distill} with distill_coef 0, expected distill_coef above 0"
    if objective.distill_share != 0.5 and objective.distill != "js":
        value = f"{objective.distill_share:g} with distill {objective.distill}"
        yield "distill_share", f"{value}, expected it left out; only js reads it"
    if objective.advantage == "none" and not objective.distill_coef:
        rule = "expected distill_coef above 0; nothing would be trained"
        yield "advantage", f"none with distill_coef 0, {rule}"
    if objective.advantage == "none" and objective.dynamic_sampling:
        rule = "expected 0; groups with equal rewards are trained on"
        rounds = objective.dynamic_sampling
        yield "dynamic_sampling", f"{rounds} with advantage none, {rule}"


@rule("objective.distill")
def distributions_are_compared_in_chunks(plan: Plan) -> Found:
    objective = plan.objective
    if not objective.compares_distributions:
        return None
    if plan.logprob.head != "fused":
        return (
            f"{objective.distill} with logprob.head {plan.logprob.head}, expected fused; it "
            "compares the distributions chunk by chunk"
        )
    if objective.needs_sequences:
        return (
            f"{objective.distill} with objective.loss {objective.loss}, ratio {objective.ratio} "
            f"and opsm {objective.opsm}, expected token-wise parts or distill: sampled; a chunk "
            "sees some tokens at a time"
        )
    if ":" in objective.loss:
        return (
            f"{objective.distill} with objective.loss {objective.loss}, expected a loss of the "
            "package or distill: sampled; your function would not read the divergence"
        )
    if plan.teacher.servers:
        rule = "expected teacher.model on the trainer's ranks or distill: sampled"
        return f"{objective.distill} with teacher.servers, {rule}; servers send single log-probs"
    if len(plan.teacher_plans) > 1:
        names = ", ".join(plan.teacher_plans)
        return f"{objective.distill} with teachers {names}, expected one or distill: sampled"
    return None


@rule("objective.distill_coef")
def teachers_score_all_of_the_vocabulary(plan: Plan) -> Found:
    if not plan.objective.distill_coef or not plan.trains_on_sampling_mask:
        return None
    rollout = plan.rollout
    return (
        f"{plan.objective.distill_coef:g} with rollout.top_p {rollout.top_p:g} and rollout.top_k "
        f"{rollout.top_k}, expected 1 and 0; the policy's log-probs would be of the tokens that "
        "were kept alone, and the teacher's of all"
    )


@rule("objective.distill_coef")
def teachers_read_text(plan: Plan) -> Found:
    if plan.objective.distill_coef and plan.modules:
        names = ", ".join(plan.modules)
        what = f"{plan.objective.distill_coef:g} with modules {names}"
        return f"{what}, expected none; teachers see no images"


@rule("teacher")
def servers_hold_the_model_of_the_teacher(plan: Plan) -> Found:
    teacher = plan.teacher
    if not teacher.servers:
        for name in ("key", "request_timeout"):
            if changed(teacher, name):
                value = show(getattr(teacher, name))
                yield name, f"{value}, expected it left out; only teacher.servers reads it"
        return
    for problem in address_problems(teacher.servers, "server"):
        yield "servers", problem
    if teacher.model is None:
        rule = "expected the folder or hub id of the model too; its tokenizer is compared"
        yield "servers", f"{show(teacher.servers)} without teacher.model, {rule}"
    if teacher.dtype is not None:
        rule = "expected it left out; the servers decide"
        yield "dtype", f"{teacher.dtype} with teacher.servers, {rule}"


@rule("data.sources")
def servers_teach_all_sources(plan: Plan) -> Found:
    for name, keys in plan.data.sources.items() if plan.teacher.servers else ():
        if keys.teacher is not None:
            rule = "expected it left out; the servers hold teacher.model alone"
            yield f"{name}.teacher", f"{show(keys.teacher)} with teacher.servers, {rule}"


@rule("rollout.temperature")
def servers_score_at_temperature_1(plan: Plan) -> Found:
    if plan.teacher.servers and plan.rollout.temperature != 1:
        rule = "expected 1; vLLM's log-probs of a prompt are those of temperature 1"
        return f"{plan.rollout.temperature:g} with teacher.servers, {rule}"
