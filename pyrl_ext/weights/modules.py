"""The checkpoint tensors of all modules as one stream, on every rank, whichever modules it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from pyrl_ext.models.lora_live import Adapters
from pyrl_ext.models.lora_table import adapter_table, targeted
from pyrl_ext.parallel.buckets import Allocate, Bucket, BucketStream
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.rollout.tensor_names import layer_of
from pyrl_ext.weights.check import engine_tensor_names
from pyrl_ext.weights.gather import GatheredWeights, SendTarget, ShardedBucket, plan_buckets
from pyrl_ext.weights.move import LoraUpdateCheck

Buckets = Mapping[str, Sequence[ShardedBucket]]  # of each module


def table_of(plan: Plan, module: str) -> list[Weight]:
    """Every checkpoint tensor of ``module``, with its place in the model."""
    if module != "llm" and isinstance(plan.sizes, VisionLanguage):
        return plan.sizes.tower_weights()
    return plan.sizes.weights(plan.num_mtp_layers)


class LiveParams(NamedTuple):
    """The part of a module that a rank holds.

    Args:
        tensors: by megatron name.
        topo: of the module.
        adapters: that are merged into the tensors; None: none.
    """

    tensors: Mapping[str, Tensor]
    topo: Topology
    adapters: Adapters | None = None


class ModuleTensors:
    """Gathers the tensors of all modules.

    Args:
        topo: of this rank.
        known: weight tables by module; the others are computed.

    Attributes:
        tables: module -> every checkpoint tensor of it.
    """

    def __init__(self, plan: Plan, topo: Topology, known: Mapping[str, Sequence[Weight]]):
        self.plan = plan
        self.topo = topo
        self.tables = {name: known.get(name) or table_of(plan, name) for name in plan.grids}

    @cached_property
    def factors(self) -> list[Weight]:
        """The factors of adapters that the engine applies itself."""
        lora = self.plan.lora
        if lora is None or self.plan.lora_publish != "adapter":
            return []
        return adapter_table(self.tables["llm"], lora)

    @property
    def engine_names(self) -> list[str]:
        """The checkpoint tensors that an engine holds, of all modules, in the order of `whole`, and
        the factors that it applies itself."""
        layers = self.plan.sizes.num_hidden_layers
        names = {m: [name for row in t for name in row.hf_names] for m, t in self.tables.items()}
        names["llm"] = engine_tensor_names(names["llm"], layers, self.plan.draft_layers > 0)
        factors = [name for row in self.factors for name in row.hf_names]
        return [*chain(*names.values()), *engine_tensor_names(factors, layers)]

    @cached_property
    def changing(self) -> frozenset[str] | None:
        """Those of `engine_names` that steps change, or that have to come with them; None: all.

        With adapters these are their factors, or the weights that factors are merged into; with
        `model.freeze` what it leaves. vLLM, which fuses tensors of a layer, takes all of a layer or
        none.
        """
        plan = self.plan
        lora = plan.lora
        names = self.engine_names
        rows = self.tables["llm"]
        if lora is None:
            if not plan.frozen:
                return None
            frozen = {n for row in rows if row.megatron_name in plan.frozen for n in row.hf_names}
            wanted = set(names) - frozen
        else:
            wanted = {row.hf_names[i] for row in rows for i in targeted(row, lora)}
        if self.factors:
            wanted = {name for row in self.factors for name in row.hf_names}
        elif plan.rollout.engine == "vllm":
            layers = {layer_of(name) for name in wanted} - {None}
            wanted |= {name for name in names if layer_of(name) in layers}
        return frozenset(wanted.intersection(names))

    @cached_property
    def buckets(self) -> Buckets:
        """The buckets in which weights are gathered."""
        return self._planned(None, None)

    def _planned(self, dtype: torch.dtype | None, only: Set[str] | None) -> Buckets:
        tables = self.tables
        return {m: plan_buckets(self.plan, table, dtype, only, m) for m, table in tables.items()}

    def whole(
        self,
        live: Mapping[str, LiveParams],
        dtype: torch.dtype | None = None,
        only: Set[str] | None = None,
        move: LoraUpdateCheck | None = None,
    ) -> _Joined:
        """Every wanted tensor (HF name, value), whole on every rank, one module after the other.

        Args:
            live: of the modules that this rank runs.
            dtype: of all tensors; None: of the weights.
            only: checkpoint names that are wanted; None: all.
            move: gets the tensors that adapters are merged into.

        Communicates: see `GatheredWeights`.
        Raises: ValueError listing names that no module has.
        """
        if only is not None:
            self._check(only)
        planned = self.buckets if dtype is None and only is None else self._planned(dtype, only)
        parts: list[GatheredWeights] = []
        for name, grid in self.plan.grids.items():
            tensors, topo, adapters = live.get(name, (None, self.topo, None))
            outward = _outward(grid, self.topo)
            merged = None
            if adapters is not None and tensors is not None:
                merged = adapters.merged(tensors, None if move is None else move.note)
            parts.append(GatheredWeights(planned[name], tensors, topo, outward, merged))
        return _Joined(parts)

    def published(
        self,
        live: Mapping[str, LiveParams],
        only: Set[str] | None = None,
        move: LoraUpdateCheck | None = None,
    ) -> BucketStream:
        """The tensors of `engine_names`: `whole`, or the base and then the factors of adapters.
        For remote engines each tensor comes on the rank that sends it alone.

        Args: as for `whole`.
        Communicates: see `GatheredWeights`.
        """
        factors: list[GatheredWeights] = []
        if self.factors:
            of = live["llm"].adapters
            topo = live["llm"].topo
            assert of is not None
            planned = plan_buckets(self.plan, self.factors, only=only)
            factors = [GatheredWeights(planned, of.live(), topo)]
            live = {name: module._replace(adapters=None) for name, module in live.items()}
        parts = [*self.whole(live, only=only, move=move).parts, *factors]
        for part in parts if self.plan.remote_engines else ():
            of_buckets = [(sharded.stage, sharded.bucket.bytes) for sharded in part.planned]
            part.give(senders_of(self.plan.grids["llm"], self.plan.rollout.senders, of_buckets))
        return _Joined(parts)

    def move_seen(self, dtype: torch.dtype) -> LoraUpdateCheck | None:
        """For `published`; None: no adapters are merged.

        Args:
            dtype: of the engine's weights.
        """
        if self.plan.lora_publish != "merge":
            return None
        return LoraUpdateCheck(dtype, self.topo)

    def _check(self, only: Set[str]) -> None:
        tables = (*self.tables.values(), self.factors)
        known = {n for table in tables for row in table for n in row.hf_names}
        if unknown := sorted(only - known):
            raise ValueError(
                f"ModuleTensors.whole: {len(unknown)} names are unknown: {unknown[:6]}, expected "
                f"some of the model's {len(known)} checkpoint tensors"
            )


def _outward(grid: Grid, topo: Topology) -> SendTarget | None:
    """Broadcast of tensors out of ``grid``; None if this rank takes no part.

    Communicates: at the first call with the other ranks of the group, to make it.
    """
    others = [rank for rank in range(topo.world_size) if rank not in grid.ranks]
    ranks = [grid.first, *others]
    if not others or topo.rank not in ranks:
        return None
    return SendTarget(topo.make_group(f"{grid.name} outward", ranks), grid.first)


def senders_of(grid: Grid, senders: int, buckets: Sequence[tuple[int, int]]) -> list[int]:
    """The rank that sends each bucket to remote engines.

    The senders are spread over the ranks evenly, and so over stages and hosts. A stage's buckets go
    to the senders on it; those of a stage without a sender go to all. Each goes to the sender that
    has the fewest bytes so far.

    Args:
        grid: of the language model
        senders: number of ranks that send
        buckets: (pipeline stage, bytes) of each, in the order in which they are gathered
    """
    ranks = [grid.ranks[i * len(grid.ranks) // senders] for i in range(senders)]
    stages = {rank: grid.place(rank).pp for rank in ranks}
    load = dict.fromkeys(ranks, 0)
    targets = [grid.first] * len(buckets)
    has_none = [stage not in stages.values() for stage, _ in buckets]
    for index in sorted(range(len(buckets)), key=has_none.__getitem__):
        stage, size = buckets[index]
        near = [rank for rank in ranks if has_none[index] or stages[rank] == stage]
        targets[index] = min(near, key=load.__getitem__)
        load[targets[index]] += size
    return targets


class _Joined(BucketStream):
    """One stream after the other."""

    def __init__(self, parts: Sequence[GatheredWeights]):
        self.parts = parts
        if None not in (part.names for part in parts):
            self.names = {name for part in parts for name in part.names or ()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part

    def buckets(self, allocate: Allocate) -> Iterator[tuple[Bucket, Tensor]]:
        largest = max(part.largest for part in self.parts)
        for part in self.parts:
            yield from part.buckets(lambda _: allocate(largest))
