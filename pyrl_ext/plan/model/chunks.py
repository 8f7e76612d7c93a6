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
    stages = []
    placed = 0
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
    left, ranks = remaining(parallel, num_layers + embedding + loss)
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


def remaining(parallel: Parallel, num_layers: int) -> tuple[int, int]:
    """(layers, ranks) that are left next to a given first and last stage."""
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    ranks = parallel.pp - (first is not None) - (last is not None)
    return num_layers - (first or 0) - (last or 0), ranks


def spell_out(layout: str) -> str:
    """A layout string without commas and repeats: `Et*2|(t|)*2,L` is `Ett|t|t|L`."""
    plain = layout.replace(",", "")
    for repeated in (r"([EtmL|])\*([0-9]{1,3})", r"\(([EtmL|]+)\)\*([0-9]{1,3})"):  # letter, group
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    return plain


def even_layout(layers: int, mtp: int, stages: int) -> str:
    """Megatron's layout string for stages that differ by one layer at most. The stages at the ends,
    which have the embedding and the loss, are the last to get the extra layer."""
    fewest, more = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda i: (-min(i, stages - 1 - i), i))
    longer = set(inner_first[:more])
    counts = [fewest + (i in longer) for i in range(stages)]
    return f"E{'|'.join(f't*{count}' if count else '' for count in counts)}{'m' * mtp}L"
