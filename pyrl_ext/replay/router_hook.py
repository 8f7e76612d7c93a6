"""Routing replay: the experts used before for each token, forced in Megatron's routers.

`Replay` finds the routers in the live model, hands each microbatch's routes to their layers,
and counts how often a router would have chosen the same experts. It holds no state between passes:
`session` clears it, also after an exception.

Layers are named by 0-based global ids. The ids of MTP layers follow the decoder's: the first MTP
layer has id ``num_layers``.
"""

# megatron-core has no stubs, and torch is not fully typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.lazy import missing
from pyrl_ext.ops import replay_probs
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.replay.routed_experts import LayerRoutes, RoutedExperts
from pyrl_ext.samples import route_dtype

TopK = tuple[Tensor, Tensor]  # (scores [T, K], expert ids [T, K])


class RouterHook:
    """The object at ``router.router_replay``, which megatron asks for the top-k of token scores.

    It replaces megatron's own ``RouterReplay``, which keeps one list for all models of the process,
    serves activation recomputation from the newest microbatch, and knows no missing routes. Under
    recomputation the routes of the right microbatch are found by order: a layer's backward passes
    come in the order of its forward passes, in every schedule that megatron has.
    """

    def __init__(self, router: Any, device: torch.device, clock: Clock):
        # megatron numbers MTP layers from 1 again
        before = router.config.num_layers if router.is_mtp_layer else 0
        self.layer_id = before + router.layer_number - 1
        self.is_mtp = bool(router.is_mtp_layer)
        self.num_experts = router.config.num_moe_experts
        self.topk = router.topk
        self.router = router
        self.clock = clock
        self.layer_number: int | None = None  # megatron sets it
        self.current: LayerRoutes | None = None
        self.used: LayerRoutes | None = None  # in the newest forward or recomputation
        self.recomputing = False  # the newest is a recomputation
        self.for_recompute: deque[LayerRoutes] = deque()
        self.counting = False
        self.recording = False
        self.recorded: list[tuple[Tensor, Tensor]] = []  # (ids, rows that are tokens) by forward
        # experts of both choices, rows with equal choices, rows, and experts of one choice
        self.counts = torch.zeros(4, dtype=torch.float64, device=device)

    def clear(self) -> None:
        self.current = self.used = None
        self.for_recompute.clear()
        self.recorded.clear()

    def start(self, counting: bool, recording: bool) -> None:
        """Before a pass."""
        self.clear()
        self.counting = counting
        self.recording = recording
        self.counts = torch.zeros_like(self.counts)

    @property
    def is_clear(self) -> bool:
        kept = self.for_recompute or self.recorded
        return self.current is None and self.used is None and not kept

    def take(self, rows: int, topk: int) -> LayerRoutes | None:
        """The routes for this forward or recomputation, once for each; kept as ``used``."""
        from megatron.core.tensor_parallel.random import is_checkpointing

        # with FP8, TransformerEngine recomputes, and megatron does not know: then a forward in
        # training without gradients is one that will be recomputed, and one with them does it
        config = self.router.config
        by_te = config.fp8 and config.recompute_granularity and self.router.training
        checkpointing = is_checkpointing() or by_te
        recomputing = self.recomputing = bool(checkpointing and torch.is_grad_enabled())
        kept = recomputing and self.for_recompute
        routes = self.used = self.for_recompute.popleft() if kept else self.current
        if routes is not None and routes.ids.shape != (rows, topk):
            raise RuntimeError(
                f"replay: layer {self.layer_id} got routes {list(routes.ids.shape)}, expected "
                f"{[rows, topk]}, the rows of its router and its top-k"
            )
        if routes is not None and checkpointing and not recomputing:
            self.for_recompute.append(routes)
        return routes

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """megatron's hook: ``scores`` [M, E] -> the scores and ids of the experts ``used``."""
        assert default_compute_topk is not None
        native_topk = partial(
            default_compute_topk, topk=topk, num_groups=num_groups, group_topk=group_topk
        )
        if self.used is None:
            chosen = native_topk(scores)
        else:
            with self.clock("time/replay"):
                ids = self.forced(self.used, lambda: native_topk(scores.detach())[1]).long()
                # gathered from live scores: the gate keeps its gradient
                chosen = (scores.gather(1, ids), ids)
        self.record(chosen[1])
        return chosen

    def forced(self, routes: LayerRoutes, choose: Callable[[], Tensor]) -> Tensor:
        """[M, K] the experts of ``routes``, and of ``choose`` in rows that it leaves to the router.
        Counts how many of both are the same, once for each forward of a pass that counts.

        Args:
            choose: returns the [M, K] experts that the router would choose.
        """
        counting = self.counting and not self.recomputing
        if not counting and routes.use is None:
            return routes.ids
        with torch.no_grad():
            chosen = choose()
        ids = routes.ids.long()
        if counting:
            self._count(routes, ids, chosen)
        return ids if routes.use is None else torch.where(routes.use[:, None], ids, chosen)

    def record(self, ids: Tensor) -> None:
        """Keep the ids [M, K] of a forward's experts, if the pass records."""
        if not self.recording:
            return
        is_token = None if self.used is None else self.used.is_token
        if is_token is None:
            is_token = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self.recorded.append((ids.to(route_dtype(self.num_experts)), is_token))

    def _count(self, routes: LayerRoutes, ids: Tensor, native: Tensor) -> None:
        shared = (ids[:, :, None] == native[:, None, :]).sum((1, 2))
        topk = torch.full_like(shared, ids.shape[1])
        each = torch.stack([shared, shared == topk, torch.ones_like(shared), topk])
        self.counts = self.counts + each.double() @ routes.from_engine.double()


class Agreement(NamedTuple):
    """Agreement of routers with the routes they replayed, over all ranks.

    Args:
        share: sum over rows of |experts of both| / K.
        exact: rows in which both chose the same experts.
        rows: rows with routes from the engine.
    """

    share: float
    exact: float
    rows: float

    @property
    def fraction(self) -> float:
        """Mean over rows of the share of experts that both chose."""
        return self.share / self.rows


class Recorded(NamedTuple):
    """The experts that the routers of one rank used in a pass.

    Args:
        layers: 0-based global ids of its layers whose routers ran, ascending.
        routes: [R, l, K] narrow integers on the host, of the routers' rows in the order of a
            `BatchShard`; None without layers.
    """

    layers: tuple[int, ...]
    routes: Tensor | None


class Replay:
    """The routers of one model on this rank.

    Args:
        chunks: the rank's model chunks, as megatron's schedule gets them.
        device: where the routers compute; None: where the parameters are.

    Raises: RuntimeError when a router cannot be replayed (fused or balanced routing, an id claimed
        twice, a layer with experts but no router).
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], device: torch.device | None = None):
        if device is None:
            device = next(chunks[0].parameters()).device
        self.chunks = list(chunks)
        self.device = device
        self.clock = Clock()  # counts, as "time/replay", the host time that replay adds to a step
        self.hooks: list[list[RouterHook]] = [
            _attach(chunk, device, self.clock) for chunk in chunks
        ]
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
    def session(self, counting: bool = False, recording: bool = False) -> Generator[None]:
        """One pass over a schedule. Leaves no routes behind, whatever happens inside.

        Args:
            counting: for `agreement`.
            recording: for `recorded`.

        Raises: RuntimeError when a completed pass recomputed less than it kept routes for.
        """
        from megatron.core.tensor_parallel import random

        for hook in self._all():
            hook.start(counting, recording)
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
        """True if no router holds routes of any microbatch."""
        return all(hook.is_clear for hook in self._all())

    def layers_to_replay(self, routed: Collection[int]) -> list[int]:
        """Layers of this rank that replay samples with routes of the layers ``routed``.

        A decoder layer without routes is among them, which is an error; an MTP layer is not.
        """
        hooks = self._all()
        return [hook.layer_id for hook in hooks if not hook.is_mtp or hook.layer_id in routed]

    @property
    def sizes(self) -> tuple[int, int]:
        """Experts of a layer, and experts of a token in it."""
        hook = next(self._all())
        return hook.num_experts, hook.topk

    @property
    def shares_rows(self) -> dist.ProcessGroup | None:
        """Ranks that send rows to each other's experts, where these use what each will send; None:
        they do not."""
        return getattr(next(self._all()).router, "shares_rows", None)

    def use(self, chunk: int | torch.nn.Module, routes: RoutedExperts | None) -> None:
        """Use ``routes`` in the next forward of a model chunk; None: routers choose.

        Args:
            chunk: one of the model chunks, or its number among them.

        Raises: ValueError for a module that is none of them.
        """
        number = chunk if isinstance(chunk, int) else self._number(chunk)
        hooks = self.hooks[number]
        with record_function("pyrl: routes"), self.clock("time/replay"):
            layers = self.layer_ids(number)
            each_layer = [None] * len(hooks) if routes is None else routes.of_layers(layers)
        for hook, layer_routes in zip(hooks, each_layer, strict=True):
            hook.current = layer_routes

    def _number(self, module: torch.nn.Module) -> int:
        for number, chunk in enumerate(self.chunks):
            if chunk is module:
                return number
        raise ValueError(
            f"Replay.use: chunk is a {type(module).__name__}, expected one of the "
            f"{len(self.chunks)} model chunks that Replay was given, or its number"
        )

    def recorded(self) -> Recorded:
        """The experts that the routers of this rank used in a session that records.

        Syncs: copies them to the host.
        """
        hooks = [hook for hook in self._all() if hook.recorded]  # MTP layers may not have run
        columns: list[Tensor] = []
        for hook in hooks:
            ids, is_token = (torch.cat(parts).cpu() for parts in zip(*hook.recorded, strict=True))
            columns.append(ids[is_token])
        layers = tuple(hook.layer_id for hook in hooks)
        return Recorded(layers, torch.stack(columns, 1) if columns else None)

    def agreement(self, num_layers: int) -> dict[int, Agreement]:
        """Layer id -> agreement, of each layer that replayed.

        Args:
            num_layers: layers of the whole model, MTP layers included.

        Communicates: one all-reduce of 4 numbers a layer over the world. Syncs: reads it.
        """
        total = torch.zeros(num_layers, 4, dtype=torch.float64, device=self.device)
        for hook in self._all():
            total[hook.layer_id] = hook.counts
        total = total.cpu()
        dist.all_reduce(total)
        counts: list[list[float]] = total.tolist()
        return {
            layer: Agreement(rows * shared / experts, equal, rows)
            for layer, (shared, equal, rows, experts) in enumerate(counts)
            if rows
        }


def _attach(chunk: torch.nn.Module, device: torch.device, clock: Clock) -> list[RouterHook]:
    """Hook every router of a live model chunk."""
    try:
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.moe.router import TopKRouter
    except ModuleNotFoundError as error:
        raise missing("pyrl_ext.replay.Replay", error) from None

    hooks: list[RouterHook] = []
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
        hook: Any = RouterHook(router, device, clock)
        router.router_replay = hook
        _route(router, hook)
        leave_out_padding(router, lambda hook=hook: hook.used)
        hooks.append(hook)
    return hooks


def _route(router: Any, hook: RouterHook) -> None:
    """One kernel replaces megatron's ten [M, E] operations (bit-equal in fp32). The router's own
    top-k is taken where it chooses, or is counted.

    Routing that adds to a loss or drops tokens is left to megatron, which asks its hook.
    """
    config = router.config
    routing = router.routing
    plain = (
        config.moe_z_loss_coeff is None
        and config.moe_expert_capacity_factor is None
        and not router.is_aux_loss_enabled()
        and router.score_function in ("sigmoid", "softmax")
    )

    def route(logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        flat = logits.view(-1, config.num_moe_experts)
        routes = hook.take(len(flat), router.topk)
        if not plain:
            return routing(logits, padding_mask)
        with record_function("pyrl: router"):  # not counted as replay: a router does no less
            if router.score_function == "sigmoid":
                scores = torch.sigmoid(flat.float())
                norm = "sum"
            elif config.moe_router_pre_softmax:
                scores = flat.softmax(-1, dtype=torch.float32)
                norm = "none"
            else:
                scores = flat
                norm = "softmax"
            scale = config.moe_router_topk_scaling_factor
            choose = partial(_choose, router, scores)
            if routes is None:
                ids = choose()
            else:
                with hook.clock("time/replay"):
                    ids = hook.forced(routes, choose)
            hook.record(ids)
            probs, routing_map = replay_probs(scores, ids, norm, scale, flat.dtype)
        if config.moe_router_bias_update_rate:  # else nothing reads the load of experts
            router._apply_expert_bias(routing_map, padding_mask=padding_mask)
        return probs, routing_map

    router.routing = route


def _choose(router: Any, scores: Tensor) -> Tensor:
    """[M, K] experts that megatron's router chooses by scores [M, E], in its order."""
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    config = router.config
    in_order = torch.is_grad_enabled()
    scores = scores.detach()
    if router.score_function == "sigmoid" and router.expert_bias is not None:
        scores = scores + router.expert_bias.float()
    if config.moe_router_group_topk:
        rows, experts = scores.shape
        groups = config.moe_router_num_groups
        kept = config.moe_router_group_topk
        return group_limited_topk(scores, router.topk, rows, experts, groups, kept)[1]
    return scores.topk(router.topk, dim=1, sorted=in_order)[1]


def leave_out_padding(router: Any, used: Callable[[], LayerRoutes | None]) -> None:
    """Count tokens only in the expert load of ``router``.

    megatron-core 0.19.2 counts padding rows when it updates the expert bias, which would make the
    bias depend on the layout. Its own ``padding_mask`` raises there ([T, E] & [T]) and is cut for
    sequence parallelism on the first pipeline stage only.

    Args:
        used: the routes of the router's newest forward or recomputation.
    """
    count = router._apply_expert_bias

    def count_tokens(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        routes = used()
        is_token = None if routes is None else routes.is_token
        count(routing_map if is_token is None else routing_map & is_token[:, None], padding_mask)

    router._apply_expert_bias = count_tokens
