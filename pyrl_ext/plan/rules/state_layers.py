"""Layers that carry a state: heads over context-parallel ranks, and what they do not support."""

from __future__ import annotations

from pyrl_ext.plan.model.families.qwen3_next import DeltaNets
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, rule
from pyrl_ext.schedule.cp_sizes import cp_sizes


def _unfit(plan: Plan, sizes: list[int], ranks: int) -> str | None:
    """The problem that groups of some of these `sizes` cannot share the heads of a mixer."""
    mixer = plan.sizes.state_mixer
    tp = plan.parallel.tp
    if mixer is None or not mixer.fits(tp, 1) or all(mixer.fits(tp, size) for size in sizes):
        return None
    heads = ", ".join(f"{name} {number}" for name, number in mixer.heads.items())
    odd = next(size for size in sizes if not mixer.fits(tp, size))
    most = max(size for size in range(1, odd + 1) if ranks % size == 0 and mixer.fits(tp, size))
    return (
        f"{odd} with tp {tp}, expected groups that divide {heads} {in_config(plan)}, each over tp; "
        f"the ranks that share a sample share the heads of {mixer.name} layers. Use at most {most}"
    )


@rule("parallel.cp")
def heads_with_states_split_over_cp(plan: Plan) -> Found:
    parallel = plan.parallel
    return _unfit(plan, [parallel.cp], parallel.dp * parallel.cp)


@rule("parallel.dynamic_cp")
def heads_with_states_split_over_every_group(plan: Plan) -> Found:
    parallel = plan.parallel
    if parallel.dynamic_cp is None:
        return None
    ranks = parallel.dp * parallel.cp
    _, *larger = cp_sizes(ranks, parallel.cp, parallel.dynamic_cp)
    return _unfit(plan, larger, ranks)


@rule("model")
def features_know_layers_with_states(plan: Plan) -> Found:
    mixer = plan.sizes.state_mixer
    model = plan.model
    if mixer is None:
        return
    mtp = model.mtp and mixer.name == "mamba"
    asked = {"mtp": mtp, "fp8": model.fp8, "te_attention": model.te_attention}
    asked["backend"] = model.backend if model.backend == "te" else None
    for name, value in asked.items():
        if value:
            shown, unset = ("on", "off") if value is True else (value, "null")
            unset = "local" if name == "backend" else unset
            yield (
                name,
                f"{shown} with {mixer.name} layers, expected {unset}; they do not support it",
            )


@rule("lora")
def adapters_know_the_projections_of_delta_nets(plan: Plan) -> Found:
    family = plan.model.family
    if plan.lora is not None and plan.sizes.state_mixer and family.startswith("qwen3_5"):
        return (
            f"on with model.family {family}, expected null; adapters are not built for delta nets "
            "whose projections are four tensors"
        )


@rule("rollout.engine")
def vllm_for_cpus_has_kernels_for_the_states(plan: Plan) -> Found:
    sizes = plan.sizes
    dtype = plan.rollout_dtype
    if plan.rollout.engine != "vllm" or plan.device != "cpu" or not isinstance(sizes, DeltaNets):
        return None
    key = sizes.linear_key_head_dim
    value = sizes.linear_value_head_dim
    if dtype == "bfloat16" and key == value and key in (64, 128):
        return None
    return (
        f"vllm on device cpu with rollout.dtype {dtype}, linear_key_head_dim {key} and "
        f"linear_value_head_dim {value} {in_config(plan)}, expected bfloat16 and both widths 64 or "
        "both 128; vLLM 0.32 for CPUs has no other kernels for gated_delta_net layers. Use hf"
    )


@rule("rollout.engine")
def vllm_for_cpus_has_kernels_for_the_experts(plan: Plan) -> Found:
    sizes = plan.sizes
    gated = sizes.mlp_matrices == 3 or not sizes.router_layers
    if plan.rollout.engine != "vllm" or plan.device != "cpu" or gated:
        return None
    return (
        f"vllm on device cpu with experts that have no gates {in_config(plan)}, expected gated "
        "ones; vLLM 0.32 for CPUs has no other kernels for routed experts. Use hf"
    )
