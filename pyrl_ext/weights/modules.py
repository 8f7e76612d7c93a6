"""The checkpoint tensors of all modules as one stream, on every rank, whichever modules it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property

import torch
from torch import Tensor

from pyrl_ext.dist.buckets import Allocate, Bucket, BucketStream
from pyrl_ext.dist.topology import Topology
from pyrl_ext.models import family
from pyrl_ext.models.weight_table import Weight
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.weights.check import engine_tensor_names
from pyrl_ext.weights.gather import GatheredWeights, Outward, ShardedBucket, plan_buckets

Buckets = Mapping[str, Sequence[ShardedBucket]]  # of each module


def table_of(plan: Plan, module: str) -> list[Weight]:
    """Every checkpoint tensor of ``module``, with its place in the model."""
    kind = family(plan.model.family)
    if module == "llm" or kind.tower is None:
        return kind.weights(plan.sizes, plan.num_mtp_layers)
    return kind.tower.weights(plan.sizes)


class ModuleTensors:
    """Gathers the tensors of all modules.

    Args:
        topo: of this rank.
        known: weight tables by module; the others are computed.

    Attributes:
        tables: module -> every checkpoint tensor of it.
    """

    def __init__(self, plan: Plan, topo: Topology, known: Mapping[str, Sequence[Weight]]):
        self.plan, self.topo = plan, topo
        self.tables = {name: known.get(name) or table_of(plan, name) for name in plan.grids}

    @property
    def engine_names(self) -> list[str]:
        """The checkpoint tensors that an engine holds, of all modules, in the order of `whole`."""
        layers = self.plan.sizes.num_hidden_layers
        names = {m: [name for row in t for name in row.hf_names] for m, t in self.tables.items()}
        names["llm"] = engine_tensor_names(names["llm"], layers)
        return [name for each in names.values() for name in each]

    @cached_property
    def buckets(self) -> Buckets:
        """The buckets in which weights are gathered."""
        return self._planned(None, None)

    def _planned(self, dtype: torch.dtype | None, only: Set[str] | None) -> Buckets:
        tables = self.tables
        return {m: plan_buckets(self.plan, table, dtype, only, m) for m, table in tables.items()}

    def whole(
        self,
        live: Mapping[str, tuple[Mapping[str, Tensor], Topology]],
        dtype: torch.dtype | None = None,
        only: Set[str] | None = None,
    ) -> BucketStream:
        """Every wanted tensor (HF name, value), whole on every rank, one module after the other.

        Args:
            live: of the modules that this rank runs: its tensors by megatron name, and the module's
                topology.
            dtype: of all tensors; None: of the weights.
            only: checkpoint names that are wanted; None: all.

        Communicates: see `GatheredWeights`.
        Raises: ValueError listing names that no module has.
        """
        if only is not None:
            self._check(only)
        planned = self.buckets if dtype is None and only is None else self._planned(dtype, only)
        parts: list[GatheredWeights] = []
        for name, grid in self.plan.grids.items():
            tensors, topo = live.get(name, (None, self.topo))
            outward = _outward(grid, self.topo)
            parts.append(GatheredWeights(planned[name], tensors, topo, outward))
        return _Joined(parts)

    def _check(self, only: Set[str]) -> None:
        known = {n for table in self.tables.values() for row in table for n in row.hf_names}
        if unknown := sorted(only - known):
            raise ValueError(
                f"ModuleTensors.whole: {len(unknown)} names are unknown: {unknown[:6]}, expected "
                f"some of the model's {len(known)} checkpoint tensors"
            )


def _outward(grid: Grid, topo: Topology) -> Outward | None:
    """How tensors leave ``grid``; None where this rank takes no part.

    Communicates: at the first call with the other ranks of the group, to make it.
    """
    others = [rank for rank in range(topo.world_size) if rank not in grid.ranks]
    ranks = [grid.first, *others]
    if not others or topo.rank not in ranks:
        return None
    return Outward(topo.make_group(f"{grid.name} outward", ranks), grid.first)


class _Joined(BucketStream):
    """One stream after the other."""

    def __init__(self, parts: Sequence[GatheredWeights]):
        self.parts = parts

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part

    def buckets(self, allocate: Allocate) -> Iterator[tuple[Bucket, Tensor]]:
        largest = max(part.largest for part in self.parts)
        for part in self.parts:
            yield from part.buckets(lambda _: allocate(largest))
