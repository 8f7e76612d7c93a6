"""The number of processes of a run: the data-parallel size that follows, and sizes that differ."""

from __future__ import annotations

from pyrl_ext.plan.language.fields import MAX_RANKS, InvalidField
from pyrl_ext.plan.language.yaml_tree import Source
from pyrl_ext.plan.plan import PartialPlan, Plan


def leaves_out_dp(source: Source) -> bool:
    """True if no file and no override sets parallel.dp."""
    section = source.tree.get("parallel", {})
    return isinstance(section, dict) and "dp" not in section


def fill_dp(source: Source, draft: PartialPlan, ranks: int | None) -> PartialPlan:
    """`draft` with the parallel.dp that `ranks` leave to it, which is written into `source` too.

    Args:
        source: without a parallel.dp
        draft: the plan with dp 1
        ranks: number of processes of the run; None: unknown, so that dp is 1

    A number of processes that no dp gives is recorded as a problem.
    """
    dp = 1
    reason = "torchrun's number of processes decides, or pyrl plan --ranks N"
    try:
        parallel = draft.parallel
        others = parallel.tp * parallel.pp * parallel.cp
        if ranks is not None:
            own = draft.world_size - parallel.world_size
            dp, rest = divmod(ranks - own, others)
            if rest or not 1 <= dp <= MAX_RANKS:
                source.report(("parallel",), _no_dp(draft, ranks, own))
                return draft
            reason = f"the run has {ranks} processes" if ranks > 1 else "the run has one process"
    except InvalidField:  # reported already
        return draft
    source.tree["parallel"] = {**source.tree.get("parallel", {}), "dp": dp}
    source.notes.append(f"parallel.dp is left out: {dp}; {reason}")
    return draft.changed({("parallel", "dp"): dp})


def _no_dp(plan: Plan, ranks: int, own: int) -> str:
    parallel = plan.parallel
    others = parallel.tp * parallel.pp * parallel.cp
    after = f", after the {own} of the encoders" if own else ""
    return (
        f"{_processes(ranks)}, expected a multiple of tp {parallel.tp} * pp {parallel.pp} * cp "
        f"{parallel.cp} = {others}{after}; parallel.dp is left out, and takes the rest. Start it "
        f"with torchrun --nproc-per-node {others + own}, or change tp, pp or cp"
    )


def ranks_problem(plan: Plan, ranks: int) -> str | None:
    """Why `ranks` processes cannot run `plan`, with the ways out; None: they can."""
    if plan.world_size == ranks:
        return None
    parallel = plan.parallel
    own = plan.world_size - parallel.world_size
    more = f" + {own} of encoders" if own else ""
    dp, rest = divmod(ranks - own, parallel.tp * parallel.pp * parallel.cp)
    change = f"leave parallel.dp out or set parallel.dp={dp}"
    if rest or dp < 1:
        change = "change tp, pp or cp: no dp makes up for the difference"
    machine = ""
    if plan.device == "cpu" and plan.hardware.gpu:
        wanted = f"{plan.world_size} x {plan.hardware.gpu}"
        machine = f". Its sizes are for {wanted}; for a CPU: pyrl configs --copy tiny"
    return (
        f"parallel: dp {parallel.dp} * tp {parallel.tp} * pp {parallel.pp} * cp {parallel.cp}"
        f"{more} = {_processes(plan.world_size)}, but the run has {ranks}. Start it with torchrun "
        f"--nproc-per-node {plan.world_size}, or {change}{machine}"
    )


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
