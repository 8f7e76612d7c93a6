"""The routed experts of a microbatch, from the samples on the host to the routers of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops import count_routes, gather_fields, gather_routes, gather_rows
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.pack.route_check import first_wrong
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.samples import route_dtype

if TYPE_CHECKING:
    from pyrl_ext.pack.shard import BatchShard


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
    def from_padded(
        cls,
        routes: Tensor,
        attention_mask: Tensor,
        *,
        num_experts: int,
        layer_ids: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        known: Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        tp_size: int = 1,
        tp_rank: int = 0,
        align: int = 1,
        rows: Tensor | None = None,
        device: torch.device | str | None = None,
        check: bool = True,
    ) -> RoutedExperts:
        """The routes of this rank's rows, from a padded batch of B sequences of at most S tokens.

        Args:
            routes: [B, S, L, K] integers, the experts of each token.
            attention_mask: [B, S], nonzero at tokens; padding may be on either side.
            num_experts: experts of a layer.
            layer_ids: [L] 0-based global ids of the layers in ``routes``; None: 0 to L - 1.
            layers: ids of those to keep, `Replay.layers` or `Replay.layers_to_replay`; None: all.
            known: [B, S] bool, tokens that have a route; for the others the router chooses. None:
                all tokens.
            cp_size, tp_size, align: of the `TokenLayout` of the packed sequences; ``tp_size`` is 1
                without sequence parallelism.
            cp_rank, tp_rank: this rank's.
            rows: [M] int64, for a model input that is not packed: the place in [B * S] of the token
                at each of the router's rows, -1 = padding. Those above are not used with it.
                Megatron's rows are sequence-major: row s * B + b is token s of sequence b.
            device: where the routers compute; None: that of ``routes``.
            check: refuse expert ids that are out of range or repeat. Without it, ids that are too
                large for their narrowest type wrap around.

        Syncs: copies the rows to the host and checks them there, if ``check``.

        Raises:
            ValueError: shapes do not fit, a layer to keep is not in ``layer_ids``, or a token's
                experts are wrong; a token without a route belongs in ``known``.
        """
        where = "RoutedExperts.from_padded"
        for name, each in (("attention_mask", attention_mask), ("known", known)):
            if routes.ndim != 4 or (each is not None and each.shape != routes.shape[:2]):
                raise ValueError(
                    f"{where}: routes {list(routes.shape)}, {name} "
                    f"{None if each is None else list(each.shape)}, expected [B, S, L, K], [B, S]"
                )
        if rows is None:
            is_token = attention_mask.cpu() != 0
            seqlens = cast(list[int], is_token.sum(1).tolist())  # pyright: ignore
            local = TokenLayout(tuple(seqlens), cp_size, tp_size, align)
            ragged = local.shard(local.rows(cp_rank), tp_rank)
            places = is_token.flatten().nonzero().squeeze(1)
            rows = gather_rows(places, ragged, fill=torch.tensor(-1))
        width = routes.shape[1]
        flat_known = None if known is None else known.flatten()
        source = _Source(where, routes.flatten(0, 1), flat_known, lambda row: divmod(row, width))
        return cls._taken(source, rows, num_experts, layer_ids, layers, device, check)

    @classmethod
    def from_ragged(
        cls,
        routes: Tensor,
        seqlens: Sequence[int],
        *,
        num_experts: int,
        layer_ids: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        known: Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        tp_size: int = 1,
        tp_rank: int = 0,
        align: int = 1,
        device: torch.device | str | None = None,
        check: bool = True,
    ) -> RoutedExperts:
        """The routes of this rank's rows, from sequences stored one after the other.

        Args:
            routes: [T, L, K] integers, the experts of each token.
            seqlens: [S] tokens of each sequence; their sum is T.
            known: [T] bool.
            num_experts, layer_ids, layers, cp_size, cp_rank, tp_size, tp_rank, align, device,
                check: as in `from_padded`.

        Syncs, Raises: as `from_padded`.
        """
        where = "RoutedExperts.from_ragged"
        layout = TokenLayout(tuple(seqlens), cp_size, tp_size, align)
        if routes.ndim != 3 or len(routes) != sum(layout.seqlens):
            raise ValueError(
                f"{where}: routes {list(routes.shape)}, expected [T, L, K] with T = "
                f"{sum(layout.seqlens)}, the sum of seqlens"
            )
        rows = layout.shard(layout.rows(cp_rank), tp_rank)
        source = _Source(where, routes, known, lambda row: (row,))
        return cls._taken(source, rows, num_experts, layer_ids, layers, device, check)

    @classmethod
    def _taken(
        cls,
        source: _Source,
        at: Tensor,
        num_experts: int,
        layer_ids: Sequence[int] | None,
        layers: Sequence[int] | None,
        device: torch.device | str | None,
        check: bool,
    ) -> RoutedExperts:
        """The rows ``at`` and ``layers`` of ``source``, on ``device``."""
        routes = source.routes
        columns = tuple(range(routes.shape[1]) if layer_ids is None else layer_ids)
        if len(columns) != routes.shape[1]:
            raise ValueError(
                f"{source.where}: {len(columns)} layer_ids, expected one for each of the "
                f"{routes.shape[1]} layers of routes"
            )
        known = source.known
        if known is not None and known.shape != routes.shape[:1]:
            raise ValueError(
                f"{source.where}: known {list(known.shape)}, expected [{len(routes)}], one a token"
            )
        part = slice_of(columns if layers is None else layers, columns)
        rows = at.to(routes.device)
        padding = at.cpu() < 0
        (ids,) = gather_fields([routes[:, part]], rows, [0]).views
        has_route = rows >= 0
        if known is not None:
            has_route &= gather_rows(known.to(routes.device, torch.bool), rows)
        if check:
            source.check(ids, has_route, at, columns[part], num_experts)
        device = routes.device if device is None else torch.device(device)
        is_token = ~padding.to(device) if bool(padding.any()) else None
        has_route = has_route.to(device)
        use = None
        if known is not None:
            use = has_route if is_token is None else has_route | ~is_token
        return cls(
            ids=ids.to(device, route_dtype(num_experts)),
            layer_ids=columns[part],
            rows=torch.where(padding, -1, torch.arange(len(at))).to(device),
            use=use,
            from_engine=has_route,
            is_token=is_token,
            num_experts=num_experts,
        )

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
        part = slice_of(layers, held)
        if layers:
            ids = shard.stored["routes"][:, part]
            mask = shard.stored["route_mask"]
        else:
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


@dataclass(frozen=True)
class _Source:
    """Routes [N, L, K] of some tokens, and where they come from.

    Args:
        where: names the function in messages.
        known: [N] bool, tokens that have a route; None: all.
        place: index of a token in what the caller gave.
    """

    where: str
    routes: Tensor
    known: Tensor | None
    place: Callable[[int], tuple[int, ...]]

    def check(
        self, ids: Tensor, checked: Tensor, at: Tensor, layers: Sequence[int], num_experts: int
    ) -> None:
        """Refuse wrong experts among the ids [M, l, K] of the rows ``at``, where ``checked``."""
        wrong = first_wrong(ids, checked.nonzero().squeeze(1), num_experts)
        if wrong is None:
            return
        place = list(self.place(int(at[wrong.row])))
        raise ValueError(
            f"{self.where}: routes{place}, layer {layers[wrong.slot]}: {wrong.found}, expected "
            f"{wrong.expected}. If the token has no route, give known with False there"
        )


def slice_of(layers: Sequence[int], held: Sequence[int]) -> slice:
    """The columns from the first to the last of ``layers``, among those that hold the layers
    ``held``; none without layers.

    Raises: ValueError naming a layer that is not held.
    """
    if missing := [layer for layer in layers if layer not in held]:
        raise ValueError(
            f"replay: layers {missing} have a router but no routes; the engine reported layers "
            f"{list(held)}. Replay needs an engine that returns every router's choices"
        )
    slots = [held.index(layer) for layer in layers]
    return slice(min(slots), max(slots) + 1) if slots else slice(0, 0)


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
