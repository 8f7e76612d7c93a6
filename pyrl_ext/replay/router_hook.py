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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.dist.clock import Clock
from pyrl_ext.ops import replay_probs
from pyrl_ext.replay.routed_experts import Forced

TopK = tuple[Tensor, Tensor]  # (scores [T, K], expert ids [T, K])


class RouterHook:
    """Stands at ``router.router_replay``, where megatron asks for the top-k of a token's scores.

    It takes the place of megatron's own ``RouterReplay``, which keeps one list for all models of
    the process, serves activation recomputation from the newest microbatch, and knows no missing
    routes. Under recomputation the routes of the microbatch in question are found by order: a
    layer's backward passes come in the order of its forward passes, in every schedule megatron has.
    """

    def __init__(self, layer_id: int, device: torch.device, clock: Clock):
        self.layer_id, self.clock = layer_id, clock
        self.layer_number: int | None = None  # megatron sets it
        self.topk = 1  # of the newest forward
        self.current: Forced | None = None
        self.used: Forced | None = None  # in the newest forward or recomputation
        self.for_recompute: deque[Forced] = deque()
        self.counting = False
        self.shared = torch.zeros((), dtype=torch.int64, device=device)  # experts of both choices
        self.equal = torch.zeros_like(self.shared)  # rows with equal choices
        self.counted = 0  # rows

    def clear(self) -> None:
        self.current = self.used = None
        self.for_recompute.clear()

    def start(self, counting: bool) -> None:
        """Before a pass."""
        self.clear()
        self.counting, self.counted = counting, 0
        self.shared.zero_()
        self.equal.zero_()

    @property
    def is_clear(self) -> bool:
        return self.current is None and self.used is None and not self.for_recompute

    def take(self, rows: int, topk: int) -> Forced | None:
        """What this forward or recomputation is to use, once for each; kept as ``used``."""
        from megatron.core.tensor_parallel.random import is_checkpointing

        recomputing = is_checkpointing() and torch.is_grad_enabled()
        use = self.for_recompute.popleft() if recomputing and self.for_recompute else self.current
        self.used, self.topk = use, topk
        if use is not None and use.ids.shape != (rows, topk):
            raise RuntimeError(
                f"replay: layer {self.layer_id} got routes {list(use.ids.shape)}, its router sees "
                f"{rows} rows with top-{topk}"
            )
        if use is not None and is_checkpointing() and not recomputing:
            self.for_recompute.append(use)
        return use

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
            return native_topk(scores)
        with record_function("pyrl: replay"), self.clock("time/replay"):
            return self._forced(self.used, scores, native_topk)

    def _forced(self, use: Forced, scores: Tensor, native_topk: Callable) -> TopK:
        ids = use.ids.long()
        if self.counting or use.forced is not None:
            with torch.no_grad():
                _, native = native_topk(scores.detach())
            if self.counting:
                self._count(use, ids, native)
            if use.forced is not None:
                ids = torch.where(use.forced[:, None], ids, native)
        return scores.gather(1, ids), ids  # gathered from live scores: the gate keeps its gradient

    def _count(self, use: Forced, ids: Tensor, native: Tensor) -> None:
        same = (ids[:, :, None] == native[:, None, :]).sum((1, 2))
        if use.num_routed < len(same):
            same *= use.routed
        self.shared += same.sum()
        self.equal += (same == ids.shape[1]).sum()
        self.counted += use.num_routed


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
    def session(self, counting: bool = False) -> Iterator[None]:
        """One pass over a schedule. Leaves no routes behind, whatever happens inside.

        Raises: RuntimeError when a completed pass recomputed less than it kept routes for.
        """
        from megatron.core.tensor_parallel import random

        for hook in self._all():
            hook.start(counting)
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

    def force(self, chunk: int, routes: Sequence[Forced | None]) -> None:
        """Use ``routes``, one a layer of `layer_ids`, in the next forward; None: native."""
        hooks = self.hooks[chunk]
        if len(routes) != len(hooks):
            raise RuntimeError(
                f"replay: routes for {len(routes)} layers, chunk {chunk} has {len(hooks)} routers "
                f"(layers {[h.layer_id for h in hooks]})"
            )
        for hook, each in zip(hooks, routes, strict=True):
            hook.current = each

    def agreement(self, num_layers: int) -> dict[int, tuple[float, float, float]]:
        """Layer id -> (sum of |A and B| / K, count of equal sets, count) over all ranks' rows.

        Args:
            num_layers: layers of the whole model, those for multi-token prediction included.

        Communicates: one all-reduce of 4 integers a layer over the world. Syncs: reads it.
        """
        total = torch.zeros(num_layers, 4, dtype=torch.int64, device=self.device)
        for hook in self._all():
            experts = hook.counted * hook.topk
            counted = torch.tensor([hook.counted, experts]).to(self.device)
            total[hook.layer_id] = torch.cat([torch.stack([hook.shared, hook.equal]), counted])
        dist.all_reduce(total)
        return {
            layer: (rows * shared / experts, equal, rows)
            for layer, (shared, equal, rows, experts) in enumerate(total.tolist())
            if rows
        }


def _attach(chunk: torch.nn.Module, device: torch.device, clock: Clock) -> list[RouterHook]:
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
        hook: Any = RouterHook(before + router.layer_number - 1, device, clock)
        router.router_replay = hook
        _route(router, hook)
        _leave_out_padding(router, hook)
        hooks.append(hook)
    return hooks


def _route(router: Any, hook: RouterHook) -> None:
    """Where all experts are given, one kernel makes the probabilities and the map. megatron's hook
    stands in the middle of some ten operations on [M, E] that do the same, bit for bit in fp32, so
    this stands one function further out; all else goes through the hook.

    Routing of Megatron that adds to a loss or drops tokens is left to it as a whole.
    """
    config, routing = router.config, router.routing
    plain = (
        config.moe_z_loss_coeff is None
        and config.moe_expert_capacity_factor is None
        and not router.is_aux_loss_enabled()
        and router.score_function in ("sigmoid", "softmax")
    )

    def route(logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        flat = logits.view(-1, config.num_moe_experts)
        use = hook.take(len(flat), router.topk)
        if not plain or use is None or use.forced is not None or hook.counting:
            return routing(logits, padding_mask)
        with record_function("pyrl: router"):  # no addition of replay: a router does no less
            if router.score_function == "sigmoid":
                scores, norm = torch.sigmoid(flat.float()), "sum"
            elif config.moe_router_pre_softmax:
                scores, norm = flat.softmax(-1, dtype=torch.float32), "none"
            else:
                scores, norm = flat, "softmax"
            scale = config.moe_router_topk_scaling_factor
            probs, routing_map = replay_probs(scores, use.ids, norm, scale, flat.dtype)
        router._apply_expert_bias(routing_map, padding_mask=padding_mask)
        return probs, routing_map

    router.routing = route


def _leave_out_padding(router: Any, hook: RouterHook) -> None:
    """megatron-core 0.19.2 counts padding rows as load of the experts, by which it moves the
    selection bias, so that the bias would depend on the layout. Its own ``padding_mask`` raises
    there ([T, E] & [T]) and is cut for sequence parallelism on the first pipeline stage only."""
    count = router._apply_expert_bias

    def count_real(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        real = None if hook.used is None else hook.used.real
        count(routing_map if real is None else routing_map & real[:, None], padding_mask)

    router._apply_expert_bias = count_real
