"""Adapters on a live model: its factors by name, the base without them, and both merged."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyrl_ext.megatron.lora import LiveFactor, LoraAdapter, adapt
from pyrl_ext.models.frozen import start_gradients
from pyrl_ext.models.lora_table import adapter_rows, adapter_table, targeted
from pyrl_ext.models.shards import shard_of
from pyrl_ext.models.weight_table import by_expert, named_global, tensor_split
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.plan.schema.lora import Lora

Note = Callable[[Weight, Tensor, Tensor, Tensor], None]
_OF_AN_EXPERT = re.compile(r"\.local_experts\.\d+\.(linear_fc[12])\.weight$")


class Adapters:
    """The adapters of a model on this rank. Build with `attach`.

    Attributes:
        table: a row for each factor of the whole model.
    """

    def __init__(self, table: Sequence[Weight], lora: Lora, topo: Topology):
        self.table = adapter_table(table, lora)
        self.lora = lora
        self.topo = topo
        self._adapters: list[LoraAdapter] = []
        self._factors: list[tuple[LiveFactor, list[str]]] = []  # names of the stacked ones
        self._place_of: dict[str, _Place] = {}  # by the name of a weight

    @classmethod
    def attach(
        cls, models: Sequence[nn.Module], table: Sequence[Weight], lora: Lora, topo: Topology
    ) -> Adapters:
        """Freeze ``models`` and put adapters, with undefined factors, next to their linears.

        Before megatron's DistributedDataParallel: what requires no gradient then has no place in
        its buffers, nor in the optimizer.

        Args:
            table: the rows of the base.

        Raises: NotImplementedError if some, but not all, tensor-parallel ranks split an expert.
        """
        self = cls(table, lora, topo)
        if self.table and topo.etp_size not in (1, topo.tp_size) and lora.experts != "none":
            raise NotImplementedError(
                f"Adapters.attach: etp {topo.etp_size} and tp {topo.tp_size}, expected etp 1 or tp"
            )
        rows = defaultdict[str, list[Weight]](list)
        for row in table:
            if targeted(row, lora):
                rows[_OF_AN_EXPERT.sub(r".\1", row.megatron_name)].append(row)
        for model in models:
            model.requires_grad_(False)
            start_gradients(model)
        for model, local, name, weight in list(named_global(models)):
            if name in rows:
                owner, _, attribute = local.rpartition(".")
                self._add(model.get_submodule(owner), attribute, name, weight, rows[name])
        return self

    def _add(
        self, owner: nn.Module, attribute: str, name: str, weight: Tensor, rows: list[Weight]
    ) -> None:
        """An adapter for one live weight, of whose experts ``rows`` are, or the one row."""
        row = rows[0]
        stacked = weight.ndim == 3
        size, _, group = tensor_split(row, self.topo)
        if stacked:
            first = self.topo.groups.ep.rank() * len(weight)
            rows = [expert for expert in rows if expert.expert in range(first, first + len(weight))]
        factors = {letter: self._factor_rows(letter, row, rows) for letter in "AB"}
        a, b = (_local_shape(factor, size) for factor in factors.values())
        scale = self.lora.scale_of(stacked)
        adapter = LoraAdapter(weight, a, b, self._linear_of(row, weight.shape[-2]), scale)
        for letter, factor_rows in factors.items():
            value = getattr(adapter, f"lora_{letter}")
            shard = factor_rows[0].shard
            experts = factor_rows[0].expert is not None
            cut = None if shard == "same" else int(shard == "columns") + value.ndim - 2
            key = f"{name.removesuffix('.weight')}.lora_{letter}"
            sections = factor_rows[0].sections_of(value.shape[-2])
            factor = LiveFactor(key, value, cut, sections, experts)
            factor.mark(weight, self.topo.tp_size if stacked and not experts else size)
            self._factors.append((factor, [expert.megatron_name for expert in factor_rows]))
        adapt(owner, attribute, adapter, row.shard, group)
        self._adapters.append(adapter)
        for i, expert in enumerate(rows):
            place = _Place(expert, adapter, i if stacked else None)
            self._place_of[expert.megatron_name] = place

    def _factor_rows(self, letter: str, first: Weight, rows: list[Weight]) -> list[Weight]:
        """The rows of one factor: one, or one for each of this rank's experts."""
        factors = [factor for factor in adapter_rows(first, self.lora) if factor.expert is None]
        for row in rows:
            factors += [f for f in adapter_rows(row, self.lora) if f.expert is not None]
        return [factor for factor in factors if factor.megatron_name.endswith(letter)]

    def _linear_of(self, row: Weight, length: int) -> Tensor:
        """[length] the linear with an adapter that each of this rank's rows belongs to, or -1."""
        if len(row.shapes) == 1:
            return torch.zeros(length, dtype=torch.long)
        size, rank, _ = tensor_split(row, self.topo)
        numbers = {linear: i for i, linear in enumerate(targeted(row, self.lora))}
        columns = [
            torch.full((shape[0], 1), numbers.get(i, -1)) for i, shape in enumerate(row.shapes)
        ]
        return shard_of(row, columns, size, rank)[:, 0]

    def live(self) -> dict[str, Tensor]:
        """The factors of this rank, by their name in the whole model; with their gradients."""
        factors: dict[str, Tensor] = {}
        for factor, names in self._factors:
            tensors = by_expert(factor.value) if factor.experts else [factor.value]
            factors |= zip(names, tensors, strict=True)
        return factors

    @contextmanager
    def off(self) -> Generator[None]:
        """The base alone."""
        for adapter in self._adapters:
            adapter.on = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.on = True

    def merged(self, live: Mapping[str, Tensor], note: Note | None = None) -> Mapping[str, Tensor]:
        """``live`` tensors of the base with the adapters in them, each made when it is asked for.

        ``W + scale B A`` is added in float32 and rounded once; this rank's part from its parts of
        the factors.

        Args:
            note: called with the row, the weight, ``scale B A`` in float32 and the merged weight of
                each that is made.
        """
        return _Merged(live, self._place_of, note)

    def sharded(self, prefix: str) -> dict[str, Any]:
        """Every factor for ``dist_checkpointing``, by its name in the whole model."""
        return {factor.key: factor.sharded(self.topo.groups, prefix) for factor, _ in self._factors}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the factors that were saved as `sharded`."""
        for factor, _ in self._factors:
            factor.value.copy_(tensors[factor.key])


def _local_shape(factor_rows: Sequence[Weight], size: int) -> tuple[int, ...]:
    """The shape of this rank's part of a factor, of several experts with their number before."""
    shape = factor_rows[0].shard_shape(size)
    return shape if factor_rows[0].expert is None else (len(factor_rows), *shape)


class _Place(NamedTuple):
    """The adapter of a weight; ``expert``: its place among this rank's stacked experts."""

    row: Weight
    adapter: LoraAdapter
    expert: int | None


class _Merged(Mapping[str, Tensor]):
    def __init__(self, live: Mapping[str, Tensor], places: Mapping[str, _Place], note: Note | None):
        self._live = live
        self._places = places
        self._note = note

    def __getitem__(self, name: str) -> Tensor:
        weight = self._live[name]
        if (place := self._places.get(name)) is None:
            return weight
        delta = place.adapter.delta(place.expert)
        if self._note is None:
            return delta.add_(weight.detach()).to(weight.dtype)
        merged = (delta + weight.detach()).to(weight.dtype)
        self._note(place.row, weight, delta, merged)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)
