"""Routing replay: the experts an engine used for each token, forced in Megatron's routers.

`Replay` walks the live model for its routers, hands each microbatch's routes to the layers they
belong to, and counts how often the router would have chosen the same experts. It holds no state
between passes: `session` clears it, also after an exception.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.ops import gather_routes

TopK = tuple[Tensor, Tensor]  # (scores [T, K], expert ids [T, K] int64)


@dataclass(frozen=True)
class Forced:
    """One layer's routes for the rows of one microbatch that a rank's router sees.

    Args:
        ids:    [M, K] int64 expert ids; padding rows hold distinct experts spread over all of them.
        forced: [M] bool, rows whose ids are used, the router chooses for the others; None: all.
        routed: [M] bool, rows whose ids came from the engine (neither padding nor missing).
    """

    ids: Tensor
    forced: Tensor | None
    routed: Tensor


class RouterHook:
    """Stands at ``router.router_replay``, where megatron asks for the top-k of a token's scores.

    It takes the place of megatron's own ``RouterReplay``, which keeps one list for all models of
    the process, serves activation recomputation from the newest microbatch, and knows no missing
    routes. Under recomputation the routes of the microbatch in question are found by order: a
    layer's backward passes come in the order of its forward passes, in every schedule megatron has.
    """

    def __init__(self, layer_id: int, device: torch.device):
        self.layer_id = layer_id
        self.layer_number: int | None = None  # megatron sets it
        self.current: Forced | None = None
        self.for_recompute: deque[Forced] = deque()
        self.counting = False
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)

    def clear(self) -> None:
        self.current = None
        self.for_recompute.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """megatron's hook: ``scores`` [M, E] -> the scores and ids of the experts to use."""
        from megatron.core.tensor_parallel.random import is_checkpointing

        assert default_compute_topk is not None
        native_topk = partial(
            default_compute_topk, topk=topk, num_groups=num_groups, group_topk=group_topk
        )
        recomputing = is_checkpointing() and torch.is_grad_enabled()
        use = self.for_recompute.popleft() if recomputing and self.for_recompute else self.current
        if use is None:
            return native_topk(scores)
        if use.ids.shape != (scores.shape[0], topk):
            raise RuntimeError(
                f"replay: layer {self.layer_id} got routes {list(use.ids.shape)}, its router sees "
                f"{scores.shape[0]} rows with top-{topk}"
            )
        if is_checkpointing() and not recomputing:
            self.for_recompute.append(use)
        with record_function("pyrl: replay"):
            return self._forced(use, scores, self.counting and not recomputing, native_topk)

    def _forced(self, use: Forced, scores: Tensor, count: bool, native_topk: Callable) -> TopK:
        ids = use.ids
        if count or use.forced is not None:
            with torch.no_grad():
                _, native = native_topk(scores.detach())
            if count:
                self._count(ids, native, use.routed)
            if use.forced is not None:
                ids = torch.where(use.forced[:, None], ids, native)
        return scores.gather(1, ids), ids  # gathered from live scores: the gate keeps its gradient

    def _count(self, ids: Tensor, native: Tensor, routed: Tensor) -> None:
        same = (ids[:, :, None] == native[:, None, :]).any(-1).sum(-1)
        share = same.double() / ids.shape[1]
        exact = (same == ids.shape[1]).double()
        each = torch.stack([share, exact, torch.ones_like(share)])
        self.counts += (each * routed).sum(-1)


class Replay:
    """The routers of one model on this rank.

    Args:
        chunks: the rank's model chunks, as megatron's schedule gets them.
        device: where the routers compute.

    Raises: RuntimeError when a router cannot be replayed (fused or balanced routing, an id claimed
        twice, a layer with experts but no router).
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], device: torch.device):
        self.device = device
        self.hooks: list[list[RouterHook]] = [_attach(chunk, device) for chunk in chunks]
        ids = [hook.layer_id for hook in self._all()]
        if len(set(ids)) < len(ids):
            raise RuntimeError(f"replay: router layer ids {ids}, expected each layer once")

    def _all(self) -> Iterator[RouterHook]:
        for hooks in self.hooks:
            yield from hooks

    def layer_ids(self, chunk: int) -> tuple[int, ...]:
        """0-based global ids of the layers with a router in model chunk ``chunk`` of this rank."""
        return tuple(hook.layer_id for hook in self.hooks[chunk])

    @contextmanager
    def session(self, counting: bool = False) -> Iterator[None]:
        """One pass over a schedule. Leaves no routes behind, whatever happens inside.

        Raises: RuntimeError when a completed pass recomputed less than it kept routes for.
        """
        for hook in self._all():
            hook.clear()
            hook.counting = counting
            hook.counts.zero_()
        try:
            yield
            left = {h.layer_id: len(h.for_recompute) for h in self._all() if h.for_recompute}
            if left:
                raise RuntimeError(
                    f"replay: routes kept for a recomputation that did not come, by layer {left}"
                )
        finally:
            for hook in self._all():
                hook.clear()

    def force(self, chunk: int, routes: Sequence[Forced] | None) -> None:
        """Use ``routes``, one a layer of `layer_ids`, in the next forward; None: native."""
        hooks = self.hooks[chunk]
        if routes is not None and len(routes) != len(hooks):
            raise RuntimeError(
                f"replay: routes for {len(routes)} layers, chunk {chunk} has {len(hooks)} routers "
                f"(layers {[h.layer_id for h in hooks]})"
            )
        for i, hook in enumerate(hooks):
            hook.current = None if routes is None else routes[i]

    def agreement(self, num_layers: int) -> dict[int, tuple[float, float, float]]:
        """Layer id -> (sum of |A and B| / K, count of equal sets, count) over all ranks' rows.

        Communicates: one all-reduce of 3 doubles a layer over the world. Syncs: reads it.
        """
        total = torch.zeros(num_layers, 3, dtype=torch.float64, device=self.device)
        for hook in self._all():
            total[hook.layer_id] = hook.counts
        dist.all_reduce(total)
        rows = total.tolist()
        return {layer: (a, e, n) for layer, (a, e, n) in enumerate(rows) if n}


def _attach(chunk: torch.nn.Module, device: torch.device) -> list[RouterHook]:
    """Hook every decoder router of a live model chunk; MTP routers are not the decoder's layers."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter

    hooks = []
    for name, module in chunk.named_modules():
        if not isinstance(module, MoELayer):
            continue
        router: Any = module.router
        if not isinstance(router, TopKRouter):
            raise RuntimeError(
                f"replay: {name}.router is {type(router).__name__}, not a TopKRouter"
            )
        if router.is_mtp_layer:
            continue
        if router.config.moe_router_fusion or router.routing_type in (
            "sinkhorn",
            "quantile_balancing",
        ):
            raise RuntimeError(
                f"replay: {name}.router has fusion={router.config.moe_router_fusion}, balancing="
                f"{router.routing_type!r}; these return before the replay hook is asked"
            )
        assert router.layer_number is not None
        hook: Any = RouterHook(router.layer_number - 1, device)
        router.router_replay = hook
        hooks.append(hook)
    return hooks


def forced_routes(
    routes: Tensor,
    route_mask: Tensor,
    layer_ids: Sequence[int],
    rows: Tensor,
    wanted: Sequence[int],
    num_experts: int,
    device: torch.device,
) -> list[Forced]:
    """The routes of this rank's rows and layers, ready for its routers.

    Args:
        routes:     [T, L, K] narrow integers, routes of the ragged stream, on the host.
        route_mask: [T] bool, tokens that have one.
        layer_ids:  [L] 0-based global ids of the layers in ``routes``.
        rows:       [M] int64, rows of the stream in this rank's order, -1 = padding.
        wanted:     global ids of the layers of one model chunk of this rank.

    Raises: ValueError naming a wanted layer that the routes do not have.
    """
    if missing := [layer for layer in wanted if layer not in layer_ids]:
        raise ValueError(
            f"replay: layers {missing} have a router but no routes; the engine reported layers "
            f"{list(layer_ids)}. Replay needs an engine that returns every router's choices"
        )
    slots = [layer_ids.index(layer) for layer in wanted]
    ids = gather_routes(routes, rows, slots, num_experts, torch.int64).to(device, non_blocking=True)
    is_padding = rows < 0
    routed = route_mask[rows.clamp(min=0)] & ~is_padding if len(route_mask) else ~is_padding
    forced = routed | is_padding
    forced_there = None if bool(forced.all()) else forced.to(device, non_blocking=True)
    routed = routed.to(device, non_blocking=True)
    return [Forced(ids[i], forced_there, routed) for i in range(len(wanted))]
