"""The routed experts of a microbatch, from the samples on the host to the routers of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops import count_routes, gather_fields, gather_routes
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.samples import route_dtype


@dataclass(frozen=True)
class LayerRoutes:
    """The routed experts of one layer for the M rows that a rank's router sees.

    Args:
        ids: [M, K] expert ids, as narrow as they came; padding rows hold distinct experts that
            together spread over all experts.
        use: [M] bool, rows that use ``ids``; for the others the router chooses. None: all rows.
        from_engine: [M] bool, rows whose ids came from the engine (neither padding nor missing).
        is_token: [M] bool, rows that are tokens, not padding. None: all rows.
        sent: [ranks, E] int64 on the host, rows that each rank of the routers' group sends to each
            expert; None: not known before the routers chose.
    """

    ids: Tensor
    use: Tensor | None
    from_engine: Tensor
    is_token: Tensor | None
    sent: Tensor | None = None


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of one microbatch for the M rows that a rank's routers see, on its device.

    Args:
        ids:       [R, l, K] narrow integers.
        layer_ids: [l] 0-based global id of the layer of each slot.
        rows:      [M] int64, row of ``ids`` at each of the routers' rows, -1 = padding.
        use, from_engine, is_token: see `LayerRoutes`.
        num_experts: experts of a layer.
        sent:      [l, ranks, E]; see `LayerRoutes`.
    """

    ids: Tensor
    layer_ids: tuple[int, ...]
    rows: Tensor
    use: Tensor | None
    from_engine: Tensor
    is_token: Tensor | None
    num_experts: int
    sent: Tensor | None = None

    @classmethod
    def of(
        cls,
        shard: BatchShard,
        at: Tensor,
        layers: Sequence[int],
        num_experts: int,
        topk: int,
        upload: Upload,
        group: dist.ProcessGroup | None = None,
    ) -> RoutedExperts:
        """Upload the routed experts of a microbatch.

        Args:
            shard:  on the host; the rows at ``at`` are there.
            at:     [M] int64 on the host, place of each router row among the shard's, -1 = padding.
            layers: global ids of this rank's layers that replay; empty: routers choose for all
                tokens.
            num_experts: experts of a layer.
            topk:   experts of a token in a layer, K.
            group:  of the ranks whose rows share this rank's experts, if it wants to know how many
                they send; all of them call this.

        Communicates: with a group, l * E integers from every rank to every other, host to host.
        Raises: ValueError naming a layer that replays and has no routes in ``shard``.
        """
        held = shard.role.layers
        if missing := [layer for layer in layers if layer not in held]:
            raise ValueError(
                f"replay: layers {missing} have a router but no routes; the engine reported layers "
                f"{list(shard.layer_ids)}. Replay needs an engine that returns every router's "
                "choices"
            )
        if layers:
            slots = [held.index(layer) for layer in layers]
            part = slice(min(slots), max(slots) + 1)
            ids = shard.stored["routes"][:, part]
            mask = shard.stored["route_mask"]
        else:
            part = slice(0, 0)
            rows = len(shard.rows.routers)
            ids = torch.empty(rows, 0, topk, dtype=route_dtype(num_experts))
            mask = torch.zeros(rows, dtype=torch.bool)
        fields = gather_fields([ids, mask, mask], at, [0, 0, 1], pin=upload.device.type != "cpu")
        # read while they are on the host
        is_token = at >= 0
        all_used = bool(fields.views[2].all())
        places = torch.where(is_token, torch.arange(len(at)), -1)
        sent = None
        if layers and group is not None:
            sent = _sent(fields.views[0], places, num_experts, all_used, group)
        taken, from_engine, use = fields.via(upload).views
        return cls(
            ids=taken,
            layer_ids=held[part],
            rows=upload(places),
            use=None if all_used else use,
            from_engine=from_engine,
            is_token=None if bool(is_token.all()) else upload(is_token),
            num_experts=num_experts,
            sent=sent,
        )

    def of_layers(self, layers: Sequence[int]) -> list[LayerRoutes | None]:
        """The routes of each of ``layers``.

        A layer without routes has padding spread over its experts and lets its router choose for
        tokens; None if there is no padding either.
        """
        known = [layer for layer in layers if layer in self.layer_ids]
        slots = [self.layer_ids.index(layer) for layer in known]
        ids = gather_routes(self.ids, self.rows, slots, self.num_experts) if slots else ()
        shared = self.use, self.from_engine, self.is_token
        sent = [None] * len(slots) if self.sent is None else self.sent[slots]
        parts = zip(known, ids, sent, strict=True)
        replayed = {layer: LayerRoutes(x, *shared, rows) for layer, x, rows in parts}
        return [replayed.get(layer, self._native) for layer in layers]

    @cached_property
    def _native(self) -> LayerRoutes | None:
        """Routers choose for tokens; padding rows are spread."""
        if self.is_token is None:
            return None
        none = self.ids.new_empty(0, 1, self.ids.shape[2])
        padding = torch.full_like(self.rows, -1)
        (ids,) = gather_routes(none, padding, [0], self.num_experts)
        return LayerRoutes(ids, ~self.is_token, torch.zeros_like(self.from_engine), self.is_token)


def _sent(
    ids: Tensor, rows: Tensor, num_experts: int, known: bool, group: dist.ProcessGroup
) -> Tensor | None:
    """[l, ranks, E] int64, rows of every rank of ``group`` that go to each expert; None if they are
    not ``known`` on one of them. ``ids`` and ``rows`` as in `RoutedExperts`, on the host."""
    mine = count_routes(ids, rows, num_experts)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine if known else mine.fill_(-1), group=group)  # pyright: ignore[reportUnknownMemberType]
    sent = torch.stack(everyone, 1)
    return None if bool((sent < 0).any()) else sent
