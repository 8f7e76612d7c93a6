"""The load of experts, by which megatron moves a router's selection bias, without padding rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyrl_ext.replay.routed_experts import LayerRoutes


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
