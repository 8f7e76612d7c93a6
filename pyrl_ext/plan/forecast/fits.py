"""Comparison of a plan's memory with that of its GPUs: lower bound, and estimate."""

from __future__ import annotations

from pyrl_ext.plan.forecast.memory import StageMemory, stage_memory
from pyrl_ext.plan.model.hardware import memory_limit
from pyrl_ext.plan.model.units import GIB, size
from pyrl_ext.plan.plan import Plan


def fits(plan: Plan) -> str | None:
    """The rule of `hardware.gpu`: the fullest stage fits, counting only what follows from shapes.

    Estimates are left out, so that a plan is refused only if it cannot run.
    """
    return _over(plan, exact=True)


def seems_to_fit(plan: Plan) -> str | None:
    """A note: with estimates included, the fullest stage exceeds its GPU's memory."""
    return None if _over(plan, exact=True) else _over(plan, exact=False)


def _over(plan: Plan, exact: bool) -> str | None:
    limit = memory_limit(plan)
    if limit is None:
        return None
    try:
        stages = stage_memory(plan)
    except (ValueError, ZeroDivisionError):  # layers or ranks have no place; other rules say so
        return None
    held, fullest, phase = _most(stages, exact)
    if held <= limit:
        return None
    items = [i for i in fullest.items if phase in i.phases and not i.host and i.exact >= exact]
    items.sort(key=lambda item: -item.bytes)
    parts = " + ".join(f"{i.name} {size(i.bytes)}" for i in items if i.bytes >= 0.01 * held)
    where = f"{fullest.name}: " if len(stages) > 1 else ""
    limited = plan.hardware.gpu if plan.hardware.memory is None else "hardware.memory"
    about = "" if exact else "about "
    out = "would" if exact else "may"
    return (
        f"{where}a rank needs {about}{size(held)} in phase {phase} ({parts}), expected at most "
        f"{size(limit)} ({limited}); it {out} run out of memory. {_help(plan, exact, held, limit)}"
    )


def _most(stages: tuple[StageMemory, ...], exact: bool) -> tuple[int, StageMemory, str]:
    """(bytes, stage, phase) where a rank holds most."""
    places = [(stage, phase) for stage in stages for phase in reversed(stage.phases)]
    stage, phase = max(places, key=lambda place: place[0].held(place[1], exact=exact))
    return stage.held(phase, exact=exact), stage, phase


def _help(plan: Plan, exact: bool, held: int, limit: int) -> str:
    """Advice: keys that make it fit without another layout, or else the two that save most."""
    rollout = plan.rollout
    rows = plan.batching.tokens_per_microbatch // 2
    changes: list[tuple[str, str, object]] = []
    if plan.model.recompute_modules == ["core_attn", "moe"]:  # full reads no other list
        changes.append(("model", "recompute", "full"))
    elif "moe_act" in plan.recomputed_modules:
        changes.append(("model", "recompute_modules", ["core_attn", "moe"]))
    if plan.optimizer.name == "adamw":
        changes.append(("optimizer", "distributed", True))
    if rows >= plan.max_rows:
        changes.append(("batching", "tokens_per_microbatch", rows))
    if plan.head_chunk_bytes > GIB:
        changes.append(("logprob", "chunk_bytes", GIB))
    if rollout.engine == "vllm" and rollout.gpus is None:
        lower = max(0.1, round(rollout.gpu_memory_utilization - 0.2, 1))
        changes += [("rollout", "sleep", True), ("rollout", "offload_trainer", "all")]
        changes.append(("rollout", "gpu_memory_utilization", lower))
    after: list[tuple[int, str]] = []
    for section, key, value in changes:
        other = getattr(plan, section).model_copy(update={key: value})
        now, *_ = _most(stage_memory(plan.model_copy(update={section: other})), exact)
        text = f"[{', '.join(value)}]" if isinstance(value, list) else str(value).lower()
        after.append((now, f"{section}.{key}: {text}"))
    after.sort()
    enough = [each for each in after if each[0] <= limit]
    parts = [f"{change} ({size(now)})" for now, change in enough or after[:2] if now < 0.99 * held]
    if enough:
        return f"Use one of: {', '.join(parts)}" if len(parts) > 1 else f"Use {parts[0]}"
    wider = "Shard over more GPUs (parallel.ep, tp, pp)"
    return f"{wider}, with {' or '.join(parts)}" if parts else wider
