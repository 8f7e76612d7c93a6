"""Routing replay (R3): the engine's experts in Megatron's routers."""
