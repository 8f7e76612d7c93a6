"""Routing replay (R3): the engine's experts in Megatron's routers."""

from typing import TYPE_CHECKING

from pyrl_ext.lazy import exported

if TYPE_CHECKING:
    from pyrl_ext.replay.routed_experts import RoutedExperts
    from pyrl_ext.replay.router_hook import Replay

__all__ = ["Replay", "RoutedExperts"]

__getattr__ = exported(__name__, {"Replay": "router_hook", "RoutedExperts": "routed_experts"})
