"""Which parts of the model every pipeline rank holds, exactly as megatron-core places them.

A pipeline of pp ranks with vpp chunks each is a string of pp * vpp stages; stage i is chunk i // pp
of rank i % pp. megatron's layout string writes it down: `E` embedding, `t` decoder layer, `m`
multi-token-prediction layer, `L` final norm, output projection and loss; stages end at `|`. Splits
that are given by numbers are written the same way here, so that there is one table to read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyrl_ext.plan.schema import Parallel

_REPEATED_LETTER = re.compile(r"([EtmL|])\*([0-9]{1,3})")
_REPEATED_GROUP = re.compile(r"\(([EtmL|]+)\)\*([0-9]{1,3})")


# The keys that say how layers are split (megatron's config has the same), and the way of splitting
# that each belongs to.
SPLIT_WAYS = {
    "pipeline_model_parallel_layout": "layout",
    "num_layers_in_first_pipeline_stage": "counts",
    "num_layers_in_last_pipeline_stage": "counts",
    "account_for_embedding_in_pipeline_split": "even",
    "account_for_loss_in_pipeline_split": "even",
}


@dataclass(frozen=True)
class ModelChunk:
    """The layers that one model chunk of a pipeline rank holds."""

    embedding: bool
    """The token embedding."""
    layers: tuple[int, ...]
    """0-based global ids of its decoder layers, rising without a gap."""
    mtp: int
    """Number of its multi-token-prediction layers: all of the model's, or none."""
    loss: bool
    """The final norm, the output projection and the loss."""


def plan_stages(
    parallel: Parallel, num_layers: int, num_mtp_layers: int = 0
) -> tuple[tuple[ModelChunk, ...], ...]:
    """The stage of every pipeline rank and chunk.

    Args:
        parallel: sizes, and at most one way of splitting: first and last stage, account_for_*, or
            a layout
        num_layers: decoder layers of the model
        num_mtp_layers: multi-token-prediction layers that are trained

    Returns:
        `[pp][vpp]` stages; layers are dealt to chunk 0 of every rank, then to chunk 1, and so on

    Raises:
        ValueError: where the split does not place every layer once
    """
    written = _stages(parallel, num_layers, num_mtp_layers)
    stages, placed = [], 0
    for parts in written:
        layers = tuple(range(placed, placed + parts.count("t")))
        stages.append(ModelChunk("E" in parts, layers, parts.count("m"), "L" in parts))
        placed += len(layers)
    if (placed, len(stages)) != (num_layers, parallel.pp * parallel.vpp_size):
        raise ValueError(
            f"plan_stages: {'|'.join(written)}, expected {num_layers} layers (t) in pp "
            f"{parallel.pp} * vpp {parallel.vpp_size} stages"
        )
    return tuple(tuple(stages[rank :: parallel.pp]) for rank in range(parallel.pp))


def _stages(parallel: Parallel, num_layers: int, num_mtp_layers: int) -> list[str]:
    """The stages as strings of parts, in the order of execution."""
    if parallel.pipeline_model_parallel_layout:
        return spell_out(parallel.pipeline_model_parallel_layout).split("|")
    embedding = int(parallel.account_for_embedding_in_pipeline_split)
    loss = int(parallel.account_for_loss_in_pipeline_split)
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    left, ranks = _rest(parallel, num_layers + embedding + loss)
    layers = [left // max(ranks, 1)] * parallel.pp
    layers[0] = layers[0] if first is None else first
    layers[-1] = layers[-1] if last is None else last
    counts = [count // parallel.vpp_size for count in layers] * parallel.vpp_size
    counts[0] -= embedding
    counts[-1] -= loss
    stages = ["t" * count for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] += f"{'m' * num_mtp_layers}L"
    return stages


def spell_out(layout: str) -> str:
    """A layout string without commas and repeats: `Et*2|(t|)*2,L` is `Ett|t|t|L`."""
    plain = layout.replace(",", "")
    for repeated in (_REPEATED_LETTER, _REPEATED_GROUP):
        plain = repeated.sub(lambda found: found[1] * int(found[2]), plain)
    return plain


# Ways to split, and what is wrong with them: messages for the rules -------------------------------


def split_keys(parallel: Parallel) -> dict[str, str]:
    """The keys that are set to split layers, each with its way: layout, counts or even."""
    return {key: way for key, way in SPLIT_WAYS.items() if getattr(parallel, key)}


def is_split_by(parallel: Parallel, way: str) -> bool:
    """Whether layers are split in this way and no other, over more than one stage."""
    return parallel.pp > 1 and ({*split_keys(parallel).values()} or {"even"}) == {way}


def a_split_that_fits(parallel: Parallel, num_layers: int) -> str:
    """The key to set: layers of the first stage, near an equal share, that leave equal stages."""
    share = num_layers / parallel.pp
    for first in sorted(range(1, num_layers), key=lambda count: abs(count - share)):
        tried = parallel.model_copy(update={"num_layers_in_first_pipeline_stage": first})
        if first % parallel.vpp_size == 0 and _others_are_equal(tried, num_layers):
            return f"num_layers_in_first_pipeline_stage {first}"
    return "pipeline_model_parallel_layout"


def counts_problem(parallel: Parallel, num_layers: int) -> str | None:
    """Why a first and last stage of so many layers leave no equal stages between them."""
    if _others_are_equal(parallel, num_layers):
        return None
    left, ranks = _rest(parallel, num_layers)
    given = " and ".join(f"{key} {getattr(parallel, key)}" for key in split_keys(parallel))
    rule = f"a multiple of {ranks * parallel.vpp_size} above 0" if ranks else "0"
    return (
        f"{left} of num_hidden_layers {num_layers} remain for {ranks} of {parallel.pp} stages "
        f"beside {given}, expected {rule}; stages without a count are equal. Use "
        f"{a_split_that_fits(parallel, num_layers)}"
    )


def _rest(parallel: Parallel, num_layers: int) -> tuple[int, int]:
    """(layers, ranks) that are left beside a given first and last stage."""
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    ranks = parallel.pp - (first is not None) - (last is not None)
    return num_layers - (first or 0) - (last or 0), ranks


def _others_are_equal(parallel: Parallel, num_layers: int) -> bool:
    left, ranks = _rest(parallel, num_layers)
    if ranks == 0 or left <= 0:
        return left == ranks == 0
    return left % (ranks * parallel.vpp_size) == 0


def chunks_problem(parallel: Parallel) -> str | None:
    """Why a first and last stage of so many layers cannot be interleaved."""
    vpp, counts = parallel.vpp_size, {key: getattr(parallel, key) for key in split_keys(parallel)}
    if odd := [f"{key} {count}" for key, count in counts.items() if count % vpp]:
        return (
            f"{vpp} does not divide {' and '.join(odd)}, expected a divisor; every chunk of a "
            "stage holds the same number of layers"
        )
    if vpp > 1 and parallel.pp == len(counts):
        return (
            f"{vpp} with pp 2 and the layers of both stages, expected those of one; megatron-core "
            "0.19.2 divides by the stages between them. Leave out "
            "num_layers_in_last_pipeline_stage: the last stage holds the rest"
        )
    return None


def layout_problem(parallel: Parallel, num_layers: int, num_mtp_layers: int) -> str | None:
    """Why the layout does not place this model on these ranks."""
    plain = spell_out(parallel.pipeline_model_parallel_layout or "")
    if letters := sorted(set(plain) - set("EtmL|")):
        return (
            f"cannot read {' '.join(letters)} in {plain[:60]!r}, expected the letters E t m L in "
            "stages split by |. Write repeats as t*3 or (tt|)*2, up to 999, and no group in a group"
        )
    stages, pp, vpp = plain.split("|"), parallel.pp, parallel.vpp_size
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
    plain, holders = "".join(stages), [i for i, parts in enumerate(stages) if "m" in parts]
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
    return None
