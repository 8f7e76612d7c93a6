"""The matrices that Muon steps on a rank, and the work of making their updates orthogonal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain

from pyrl_ext.plan.forecast.parameters import rows_of
from pyrl_ext.plan.model.weight import Size, Weight
from pyrl_ext.plan.plan import Plan

# of Newton and Schulz, for each update: megatron's default
ITERATIONS = 5
# that its passes over weights, momentum and update move, beyond AdamW's one pass
MORE_BYTES = 20

_IN_LAYERS = re.compile(r"(decoder|mtp)\.layers\.\d+\.")


def muon_parameters(plan: Plan, stage: int) -> int:
    """Parameters in the matrices that Muon steps, on one rank of a stage; 0 with AdamW."""
    parallel = plan.parallel
    total = 0
    for row, count in _matrices(plan, stage):
        ranks = parallel.tp if row.expert is None else parallel.etp_size
        total += count * math.prod(row.shard_shape(ranks))
    return total


def muon_flops(plan: Plan, stage: int) -> float:
    """Operations of an update on one rank of a stage; ranks that share a matrix all compute it."""
    total = 0.0
    for row, count in _matrices(plan, stage):
        for rows, columns in _made_orthogonal(row):
            short, long = sorted((rows, columns))
            total += count * ITERATIONS * (4 * short**2 * long + 2 * short**3)
    return total


def _matrices(plan: Plan, stage: int) -> Iterator[tuple[Weight, int]]:
    """(one of them, how many of its shape a rank has): a layer's experts come as one."""
    if plan.optimizer.name != "muon":
        return
    for row in chain.from_iterable(rows_of(plan, chunk) for chunk in plan.stages[stage]):
        is_matrix = _IN_LAYERS.match(row.megatron_name) is not None and len(row.shapes[0]) == 2
        if not is_matrix or row.megatron_name in plan.frozen:
            continue
        if row.expert is None:
            yield row, 1
        elif row.expert == 0:
            yield row, plan.sizes.num_experts // plan.parallel.ep


def _made_orthogonal(row: Weight) -> list[Size]:
    """The matrices that a parameter is split into: queries, gates, keys and values."""
    if row.shard != "grouped":
        return [(sum(shape[0] for shape in row.shapes), row.shapes[0][1])]
    queries, *others = row.shapes
    parts = 1 + row.gates
    return [(queries[0] // parts, queries[1])] * parts + others
