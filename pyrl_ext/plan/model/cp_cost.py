"""Measured costs of context parallelism."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pyrl_ext.plan.language.fields import NonNegative, Rate, Section, Size

Exchange = Annotated[tuple[Size, NonNegative, NonNegative, NonNegative], Field(strict=False)]


class CpCost(Section):
    """Costs of a microbatch, forward and backward, on a group of context-parallel ranks, as
    `benchmarks.run dynamic_cp --calibrate` measured and printed them."""

    token_seconds: Rate | None = None
    """for each token on one rank, all but attention scores [seconds]; null: costs are not measured
    but estimated for hardware.gpu"""
    square_seconds: NonNegative = 0.0
    """for each squared token of a sample on one rank, attention scores [seconds]"""
    launch_seconds: NonNegative = 0.0
    """of each microbatch, whatever its size [seconds]"""
    exchanges: list[Exchange] = Field(default=[])
    """costs of groups beyond a rank's share of the work, by size: most ranks of the group; seconds
    of a microbatch, of each token that a rank receives, and of each squared token"""
