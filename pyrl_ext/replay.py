"""Routing replay: the experts an engine used for each token, forced in Megatron's routers.

`Replay` walks the live model for its routers, hands each microbatch's routes to the layers they
belong to, and counts how often the router would have chosen the same experts. It holds no state
between passes: `session` clears it, also after an exception.

Layers are named by 0-based global ids; the routers of multi-token-prediction layers follow the
decoder's, so that the first of them has id ``num_layers``.
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
        real:   [M] bool, rows that are tokens; None: all.
    """

    ids: Tensor
    forced: Tensor | None
    routed: Tensor
    real: Tensor | None


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
        self.used: Forced | None = None  # in the newest forward or recomputation
        self.for_recompute: deque[Forced] = deque()
        self.counting = False
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)

    def clear(self) -> None:
        self.current = self.used = None
        self.for_recompute.clear()

    @property
    def is_clear(self) -> bool:
        return self.current is None and self.used is None and not self.for_recompute

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
        self.used = use
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
        if len(set(self.layers)) < len(self.layers):
            raise RuntimeError(f"replay: router layers {self.layers}, expected each once")

    def _all(self) -> Iterator[RouterHook]:
        for hooks in self.hooks:
            yield from hooks

    @property
    def layers(self) -> tuple[int, ...]:
        """0-based global ids of the layers with a router on this rank."""
        return tuple(hook.layer_id for hook in self._all())

    def layer_ids(self, chunk: int) -> tuple[int, ...]:
        """0-based global ids of the layers with a router in model chunk ``chunk`` of this rank."""
        return tuple(hook.layer_id for hook in self.hooks[chunk])

    @contextmanager
    def session(self, counting: bool = False) -> Iterator[None]:
        """One pass over a schedule. Leaves no routes behind, whatever happens inside.

        Raises: RuntimeError when a completed pass recomputed less than it kept routes for.
        """
        from megatron.core.tensor_parallel import random

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
            # megatron leaves this set when a checkpointed forward or its recomputation raises
            random._unset_checkpointing()
            for hook in self._all():
                hook.clear()

    @property
    def is_clear(self) -> bool:
        """Whether no router holds routes of any microbatch."""
        return all(hook.is_clear for hook in self._all())

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

        Args:
            num_layers: layers of the whole model, those for multi-token prediction included.

        Communicates: one all-reduce of 3 doubles a layer over the world. Syncs: reads it.
        """
        total = torch.zeros(num_layers, 3, dtype=torch.float64, device=self.device)
        for hook in self._all():
            total[hook.layer_id] = hook.counts
        dist.all_reduce(total)
        rows = total.tolist()
        return {layer: (a, e, n) for layer, (a, e, n) in enumerate(rows) if n}


def _attach(chunk: torch.nn.Module, device: torch.device) -> list[RouterHook]:
    """Hook every router of a live model chunk."""
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
        if router.config.moe_router_fusion or router.routing_type in (
            "sinkhorn",
            "quantile_balancing",
        ):
            raise RuntimeError(
                f"replay: {name}.router has fusion={router.config.moe_router_fusion}, balancing="
                f"{router.routing_type!r}; these return before the replay hook is asked"
            )
        assert router.layer_number is not None
        # megatron numbers the layers for multi-token prediction from 1 again
        before = router.config.num_layers if router.is_mtp_layer else 0
        hook: Any = RouterHook(before + router.layer_number - 1, device)
        router.router_replay = hook
        _leave_out_padding(router, hook)
        hooks.append(hook)
    return hooks


def _leave_out_padding(router: Any, hook: RouterHook) -> None:
    """megatron-core 0.19.2 counts padding rows as load of the experts, by which it moves the
    selection bias, so that the bias would depend on the layout. Its own ``padding_mask`` raises
    there ([T, E] & [T]) and is cut for sequence parallelism on the first pipeline stage only."""
    count = router._apply_expert_bias

    def count_real(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        real = None if hook.used is None else hook.used.real
        count(routing_map if real is None else routing_map & real[:, None], padding_mask)

    router._apply_expert_bias = count_real


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
    real = rows >= 0
    routed = route_mask[rows.clamp(min=0)] & real if len(route_mask) else real
    return _forced(ids, routed, real, device)


def native_routes(
    rows: Tensor, layers: int, topk: int, num_experts: int, device: torch.device
) -> list[Forced]:
    """What stands for missing routes: tokens choose for themselves, padding rows are spread.

    Args: as in `forced_routes`; ``layers`` routers that pick ``topk`` experts each.
    """
    none = torch.zeros(0, 1, topk, dtype=torch.int32)
    padding = torch.full_like(rows, -1)
    ids = gather_routes(none, padding, [0] * layers, num_experts, torch.int64).to(device)
    return _forced(ids, torch.zeros_like(rows, dtype=torch.bool), rows >= 0, device)


def _forced(ids: Tensor, routed: Tensor, real: Tensor, device: torch.device) -> list[Forced]:
    forced = routed | ~real
    forced_there = None if bool(forced.all()) else forced.to(device, non_blocking=True)
    real_there = None if bool(real.all()) else real.to(device, non_blocking=True)
    routed = routed.to(device, non_blocking=True)
    return [Forced(each, forced_there, routed, real_there) for each in ids]
