"""The type in which the ids of routed experts are stored."""

from __future__ import annotations

from typing import Literal


def route_id_dtype(num_experts: int) -> Literal["uint8", "uint16"]:
    """The narrowest unsigned type that holds every expert id of a model, by its torch name.

    Args:
        num_experts: routed experts of a layer; 0: a model without any, whose routes are empty

    Raises:
        ValueError: more experts than fit into 16 bits
    """
    if not 0 <= num_experts <= 2**16:
        raise ValueError(f"route_id_dtype: {num_experts} experts, expected 0 to 65536")
    return "uint8" if num_experts <= 2**8 else "uint16"


def route_id_bytes(num_experts: int) -> int:
    """Bytes of one expert id."""
    return {"uint8": 1, "uint16": 2}[route_id_dtype(num_experts)]
