"""The optimizer, and its schedule."""

from __future__ import annotations

from importlib.util import find_spec

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, in_config, rule

MOST_DECAY = 0.992  # without a gradient a moment falls by 1/128, the most between two bfloat16


def muon_problems(plan: Plan) -> list[str]:
    """Why `plan` cannot step by Muon here."""
    if plan.optimizer.name != "muon" or find_spec("emerging_optimizers"):
        return []
    return [
        "optimizer.name: muon, but emerging_optimizers, which megatron-core takes it from, is not "
        "installed, expected it. Run: pip install 'pyrl-ext[muon]'"
    ]


@rule("optimizer")
def keys_of_muon_have_muon(plan: Plan) -> Found:
    options = plan.optimizer
    if options.name == "muon":
        return
    for name in ("muon_momentum", "muon_rms"):
        if changed(options, name):
            value = getattr(options, name)
            yield name, f"{value:g} with name adamw, expected it left out; muon alone reads it"


@rule("optimizer.moments")
def rounded_moments_move(plan: Plan) -> Found:
    options = plan.optimizer
    if options.moments == "float32":
        return
    if options.name == "muon":
        yield "bfloat16 with name muon, expected float32; Muon keeps its momentum in float32"
    for decay in options.betas:
        if decay > MOST_DECAY:
            yield (
                f"bfloat16 with a decay of {decay:g} in optimizer.betas, expected decays of at "
                f"most {MOST_DECAY}; neighbouring bfloat16 numbers differ by up to 1/128, and "
                "smaller changes may be rounded away. Lower the decay, or use float32"
            )


@rule("optimizer.distributed")
def muon_has_whole_matrices(plan: Plan) -> Found:
    if plan.optimizer.distributed and plan.optimizer.name == "muon":
        return (
            "true with name muon, expected false; megatron-core spreads the state in pieces of "
            "matrices, and Muon needs each one whole. To save memory raise parallel.ep, tp or pp"
        )


@rule("optimizer.name")
def muon_steps_the_weights_of_a_language_model(plan: Plan) -> Found:
    if plan.optimizer.name != "muon":
        return
    if plan.lora is not None:
        yield (
            "muon with lora, expected adamw; it would make the update of each factor orthogonal, "
            "not that of the weight that two factors change"
        )
    if plan.modules:
        yield (
            f"muon with modules {', '.join(plan.modules)}, expected adamw; it would step an "
            "encoder's embedding of positions as a matrix"
        )


@rule("optimizer.name")
def muon_has_whole_heads(plan: Plan) -> Found:
    groups = plan.sizes.query_groups
    tp = plan.parallel.tp
    if plan.optimizer.name == "muon" and groups is not None and tp > groups:
        return (
            f"muon with parallel.tp {tp} above num_key_value_heads {groups} {in_config(plan)}, "
            f"expected tp of at most {groups}; it steps queries, keys and values separately, and "
            "ranks that share a group hold unequal parts of them. Lower tp, or use adamw"
        )


@rule("optimizer.warmup_steps")
def warmup_ends(plan: Plan) -> Found:
    if plan.optimizer.warmup_steps > plan.optimizer_steps:
        return f"{plan.optimizer.warmup_steps}, {_at_most(plan, 0)}; lr would not be reached"


@rule("optimizer.decay_steps")
def decay_follows_the_warmup(plan: Plan) -> Found:
    options = plan.optimizer
    if options.schedule != "wsd":
        if options.decay_steps:
            rule = "expected 0; only wsd reads it, the others fall from the warmup to the end"
            return f"{options.decay_steps} with schedule {options.schedule}, {rule}"
        return None
    if not options.decay_steps:
        return "0 with schedule wsd, expected the optimizer steps of decay at the end of the run"
    if options.warmup_steps + options.decay_steps > plan.optimizer_steps:
        return f"{options.decay_steps}, {_at_most(plan, options.warmup_steps)}"


@rule("optimizer.min_lr")
def the_learning_rate_falls(plan: Plan) -> Found:
    least = plan.optimizer.min_lr
    if plan.optimizer.schedule == "constant":
        if least:
            yield f"{least:g} with schedule constant, expected 0; linear, cosine and wsd read it"
        return
    for name in ("llm", *plan.modules):
        if least > (lr := plan.learning_rate(name).lr):
            yield f"{least:g}, expected at most the learning rate {lr:g} of {name}"


def _at_most(plan: Plan, before: int) -> str:
    """The rule that a number of optimizer steps is within the run, after `before` others."""
    rest = f" less {before} of warmup" if before else ""
    factors = f"steps {plan.steps} * minibatches {plan.batching.minibatches}"
    if plan.has_rollouts:
        factors += f" * epochs {plan.batching.epochs}"
    return (
        f"expected at most {plan.optimizer_steps - before}, the optimizer steps of the run "
        f"({factors}){rest}"
    )
