"""Layers over pipeline stages."""

from __future__ import annotations

from pyrl_ext.plan.model.chunks import SPLIT_WAYS, remaining, spell_out
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, choice, divisors, in_config, rule
from pyrl_ext.plan.schema import Parallel


@rule("parallel.pp")
def a_split_needs_stages(plan: Plan) -> Found:
    if plan.parallel.pp == 1 and (keys := ", ".join(split_keys(plan.parallel))):
        return f"1 with {keys}, expected pp above 1; there is nothing to split. Remove {keys}"


@rule("parallel.vpp")
def chunks_need_stages(plan: Plan) -> Found:
    if plan.parallel.vpp and plan.parallel.pp == 1:
        vpp = plan.parallel.vpp
        return f"{vpp} with pp 1, expected pp above 1; there is nothing to interleave. Use null"


@rule("parallel")
def one_way_to_split(plan: Plan) -> Found:
    keys = split_keys(plan.parallel)
    if len({*keys.values()}) > 1:
        return (
            f"{', '.join(keys)} together, expected a layout, or layers of the first and last "
            "stage, or what to account for; megatron-core splits in one of these ways"
        )


@rule("parallel.pp")
def layers_split_over_stages(plan: Plan) -> Found:
    parallel = plan.parallel
    layers = plan.sizes.num_hidden_layers
    pp = parallel.pp
    vpp = parallel.vpp_size
    counted = [key.split("_")[2] for key in split_keys(parallel)]
    slots = layers + len(counted)
    if is_split_by(parallel, "even") and slots % (pp * vpp):
        chunks = f"pp {pp} * vpp {vpp} = {pp * vpp}" if vpp > 1 else f"{pp}"
        total = f" + {' + '.join(counted)} = {slots}" if counted else ""
        other = "" if counted else f", or {a_split_that_fits(parallel, layers)}"
        return (
            f"{chunks} does not divide num_hidden_layers {layers}{total} {in_config(plan)}, "
            "expected a divisor; every stage holds the same number of layers. Use "
            f"{choice(divisors(slots))}{other}"
        )


@rule("parallel.pp")
def stage_counts_leave_equal_stages(plan: Plan) -> Found:
    parallel = plan.parallel
    layers = plan.sizes.num_hidden_layers
    if is_split_by(parallel, "counts") and not _others_are_equal(parallel, layers):
        left, ranks = remaining(parallel, layers)
        given = " and ".join(f"{key} {getattr(parallel, key)}" for key in split_keys(parallel))
        rest = f"a multiple of {ranks * parallel.vpp_size} above 0" if ranks else "0"
        return (
            f"{left} of num_hidden_layers {layers} remain for {ranks} of {parallel.pp} stages "
            f"after {given}, expected {rest}; stages without a count are equal. Use "
            f"{a_split_that_fits(parallel, layers)}"
        )


@rule("parallel.vpp")
def stage_counts_split_over_chunks(plan: Plan) -> Found:
    parallel = plan.parallel
    vpp = plan.parallel.vpp_size
    if not is_split_by(parallel, "counts"):
        return None
    counts = {key: getattr(parallel, key) for key in split_keys(parallel)}
    if odd := [f"{key} {count}" for key, count in counts.items() if count % vpp]:
        return (
            f"{vpp} does not divide {' and '.join(odd)}, expected a divisor; every chunk of a "
            "stage holds the same number of layers"
        )
    if vpp > 1 and parallel.pp == len(counts):
        return (
            f"{vpp} with pp 2 and layers of the first and last stage, expected one of them; "
            "megatron-core 0.19.2 divides by the stages between them. Leave out "
            "num_layers_in_last_pipeline_stage: the last stage holds the rest"
        )


@rule("parallel.pipeline_model_parallel_layout")
def layout_places_the_model(plan: Plan) -> Found:
    if is_split_by(plan.parallel, "layout"):
        return layout_problem(plan.parallel, plan.sizes.num_hidden_layers, plan.num_mtp_layers)


def split_keys(parallel: Parallel) -> dict[str, str]:
    """The keys that are set to split layers, each with its way: layout, counts or even."""
    return {key: way for key, way in SPLIT_WAYS.items() if getattr(parallel, key)}


def is_split_by(parallel: Parallel, way: str) -> bool:
    """True if layers are split in this way and no other, over more than one stage."""
    return parallel.pp > 1 and ({*split_keys(parallel).values()} or {"even"}) == {way}


def a_split_that_fits(parallel: Parallel, num_layers: int) -> str:
    """The key to set: layers of the first stage, near an equal share, that leave equal stages."""
    share = num_layers / parallel.pp
    for first in sorted(range(1, num_layers), key=lambda count: abs(count - share)):
        tried = parallel.model_copy(update={"num_layers_in_first_pipeline_stage": first})
        if first % parallel.vpp_size == 0 and _others_are_equal(tried, num_layers):
            return f"num_layers_in_first_pipeline_stage {first}"
    return "pipeline_model_parallel_layout"


def _others_are_equal(parallel: Parallel, num_layers: int) -> bool:
    left, ranks = remaining(parallel, num_layers)
    return left > 0 and left % (ranks * parallel.vpp_size) == 0 if ranks else left == 0


def layout_problem(parallel: Parallel, num_layers: int, num_mtp_layers: int) -> str | None:
    """Why the layout does not place this model on these ranks."""
    plain = spell_out(parallel.pipeline_model_parallel_layout or "")
    if letters := sorted(set(plain) - set("EtmL|")):
        return (
            f"cannot read {' '.join(letters)} in {plain[:60]!r}, expected the letters E t m L in "
            "stages split by |. Write repeats as t*3 or (tt|)*2, up to 999, without nested groups"
        )
    stages = plain.split("|")
    pp = parallel.pp
    vpp = parallel.vpp_size
    if len(stages) != pp * vpp:
        chunks, odd = divmod(len(stages), pp)
        advice = "" if odd else f". Use vpp {chunks if chunks > 1 else 'null'}"
        return f"{len(stages)} stages, expected pp {pp} * vpp {vpp} = {pp * vpp}{advice}"
    wanted = {
        "E": (1, "there is one embedding"),
        "t": (num_layers, f"num_hidden_layers is {num_layers}"),
        "m": (num_mtp_layers, f"{num_mtp_layers} multi-token-prediction layers are trained"),
        "L": (1, "there is one loss"),
    }
    for letter, (count, why) in wanted.items():
        if plain.count(letter) != count:
            return f"{plain.count(letter)} times {letter}, expected {count}; {why}"
    if not plain.startswith("E"):
        return f"starts with {plain[:3]}, expected E; the first stage begins with the embedding"
    if not plain.endswith("L"):
        return f"ends with {plain[-3:]}, expected L; the last stage ends with the loss"
    return _mtp_problem(stages, pp)


def _mtp_problem(stages: list[str], pp: int) -> str | None:
    plain = "".join(stages)
    holders = [i for i, parts in enumerate(stages) if "m" in parts]
    if holders and plain.rfind("t") > plain.find("m"):
        return "a t after m, expected every t first; multi-token prediction follows the decoder"
    if len(holders) > 1:
        where = " and ".join(str(i + 1) for i in holders)
        return f"m in stages {where}, expected one stage; megatron-core keeps these layers together"
    if holders and holders[0] < len(stages) - pp:
        return (
            f"m in stage {holders[0] + 1} of {len(stages)}, expected one of the last {pp}; "
            "megatron-core builds it in the last chunk of a rank only"
        )
    if holders and 0 < holders[0] == len(stages) - pp:
        return (
            f"m in stage {holders[0] + 1} of {len(stages)}, which is on the ranks of stage 1, "
            "expected it behind; it reads a second copy of the embedding, and a rank has one"
        )
    return None
