"""The routes of a microbatch, from the ragged stream on the host to the routers of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyrl_ext.dist.upload import Upload
from pyrl_ext.ops import gather_fields, gather_routes


@dataclass(frozen=True)
class Forced:
    """One layer's routes for the rows of one microbatch that a rank's router sees.

    Args:
        ids:    [M, K] expert ids, as narrow as they came; padding rows hold distinct experts,
            together spread over all of them.
        forced: [M] bool, rows whose ids are used, the router chooses for the others; None: all.
        routed: [M] bool, rows whose ids came from the engine (neither padding nor missing).
        real:   [M] bool, rows that are tokens; None: all.
        num_routed: how many of ``routed`` are True.
    """

    ids: Tensor
    forced: Tensor | None
    routed: Tensor
    real: Tensor | None
    num_routed: int


@dataclass(frozen=True)
class Routes:
    """The routes of one microbatch for the rows that a rank's routers see, where they compute.

    Args:
        ids:       [R, l, K] narrow integers.
        layer_ids: [l] 0-based global id of the layer of each slot.
        rows:      [M] int64, row of ``ids`` at each of the routers' rows, -1 = padding.
        routed:    [M] bool, rows whose ids came from the engine.
        forced:    [M] bool, those and padding; None: all.
        real:      [M] bool, rows that are tokens; None: all.
        num_routed: how many of ``routed`` are True.
        num_experts: experts of a layer.
    """

    ids: Tensor
    layer_ids: tuple[int, ...]
    rows: Tensor
    routed: Tensor
    forced: Tensor | None
    real: Tensor | None
    num_routed: int
    num_experts: int

    @classmethod
    def of(
        cls,
        ids: Tensor,
        layer_ids: Sequence[int],
        route_mask: Tensor,
        rows: Tensor,
        wanted: Sequence[int],
        num_experts: int,
        upload: Upload,
    ) -> Routes:
        """What a rank needs of the routes of a batch: only its rows and layers leave the host.

        Args:
            ids:        [T, L, K] narrow integers, routes of the ragged stream, on the host.
            layer_ids:  [L] 0-based global ids of the layers in ``ids``.
            route_mask: [T] bool, tokens that have a route.
            rows:       [M] int64 on the host, row of the stream at each of the routers' rows.
            wanted:     global ids of this rank's layers that replay.

        Raises: ValueError naming a wanted layer that the routes do not have.
        """
        if missing := [layer for layer in wanted if layer not in layer_ids]:
            raise ValueError(
                f"replay: layers {missing} have a router but no routes; the engine reported layers "
                f"{list(layer_ids)}. Replay needs an engine that returns every router's choices"
            )
        slots = [layer_ids.index(layer) for layer in wanted]
        part = slice(min(slots, default=0), max(slots, default=-1) + 1)
        sources = [ids[:, part], route_mask, route_mask]
        fields = gather_fields(sources, rows, [0, 0, 1], pin=upload.device.type != "cpu")
        # looked at on the host
        num_routed, all_forced = int(fields.views[1].sum()), bool(fields.views[2].all())
        real = rows >= 0
        mine, routed, forced = fields.via(upload).views
        return cls(
            ids=mine,
            layer_ids=tuple(layer_ids[part]),
            rows=upload(torch.where(real, torch.arange(len(rows)), -1)),
            routed=routed,
            forced=None if all_forced else forced,
            real=None if bool(real.all()) else upload(real),
            num_routed=num_routed,
            num_experts=num_experts,
        )

    def of_layers(self, layers: Sequence[int]) -> list[Forced | None]:
        """What the routers of ``layers`` are to use. In a layer without routes tokens choose for
        themselves: None where there is no padding either."""
        known = [layer for layer in layers if layer in self.layer_ids]
        slots = [self.layer_ids.index(layer) for layer in known]
        ids = gather_routes(self.ids, self.rows, slots, self.num_experts) if slots else ()
        found = {
            layer: Forced(each, self.forced, self.routed, self.real, self.num_routed)
            for layer, each in zip(known, ids, strict=True)
        }
        return [found.get(layer, self._native) for layer in layers]

    @cached_property
    def _native(self) -> Forced | None:
        """Tokens choose for themselves, padding rows are spread."""
        if self.real is None:
            return None
        none, padding = self.ids.new_empty(0, 1, self.ids.shape[2]), torch.full_like(self.rows, -1)
        (ids,) = gather_routes(none, padding, [0], self.num_experts)
        return Forced(ids, ~self.real, torch.zeros_like(self.real), self.real, 0)
