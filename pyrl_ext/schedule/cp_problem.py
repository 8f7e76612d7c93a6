"""Input of a plan of dynamic context parallelism: lengths, limits, and the cost of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import NamedTuple

from pyrl_ext.schedule.alignment import alignment
from pyrl_ext.schedule.cp_sizes import cp_sizes


class CpSize(NamedTuple):
    """The limits and the costs of groups of one size.

    Seconds of a group whose samples have padded lengths n: fixed + token sum(n) + square sum(n^2).
    """

    size: int
    """Ranks."""
    unit: int
    """Samples are padded to a multiple of this [tokens]."""
    limit: int
    """Most padded tokens of the group, a multiple of `unit`."""
    fixed: float
    token: float
    square: float


class ExchangeCost(NamedTuple):
    """Cost of context parallelism to the ranks of a group, beyond their share of the work."""

    up_to: int
    """Largest group that these costs hold for [ranks]."""
    launch_seconds: float
    """Seconds of a microbatch, whatever is in it."""
    token_seconds: float
    """Seconds for each token that a rank receives from the other ranks of its group."""
    square_seconds: float = 0.0
    """Seconds for each squared token of a sample: shapes of parts are slower than of wholes."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of one microbatch, forward and backward, on a group of c context-parallel ranks.

    launch + (token sum(n) + square sum(n^2)) / c + exchange, with n the padded lengths of its
    samples; the exchange is that of the group's size, for the (c - 1) / c of its tokens that a rank
    receives, and for sum(n^2).
    """

    token_seconds: float
    """Seconds for each token on one rank: everything but attention scores."""
    square_seconds: float
    """Seconds for each squared token of a sample on one rank: attention scores."""
    launch_seconds: float = 0.0
    """Seconds of a microbatch, whatever is in it."""
    exchanges: tuple[ExchangeCost, ...] = ()
    """By group size, ascending. Nothing at all: communication is free."""

    def exchange(self, cp_size: int) -> ExchangeCost:
        """The costs of groups of `cp_size` ranks.

        Raises:
            ValueError: the model has costs, but none for groups so large
        """
        if cp_size == 1 or not self.exchanges:
            return ExchangeCost(cp_size, 0.0, 0.0)
        for each in self.exchanges:
            if cp_size <= each.up_to:
                return each
        raise ValueError(
            f"CostModel.exchange: a group has {cp_size} ranks, expected at most "
            f"{self.exchanges[-1].up_to}, the largest whose exchange is known. Add it to the costs "
            "(cp_cost.exchanges), or lower the largest size (parallel.dynamic_cp)"
        )

    def rates(self, cp_size: int) -> tuple[float, float, float]:
        """Seconds of a group that has samples, of a token of it, and of a squared token."""
        exchange = self.exchange(cp_size)
        received = exchange.token_seconds * ((cp_size - 1) / cp_size)
        token = self.token_seconds / cp_size + received
        square = self.square_seconds / cp_size + exchange.square_seconds
        return exchange.launch_seconds, token, square


class CpInstance(NamedTuple):
    """Input of the search."""

    lengths: tuple[int, ...]
    """Tokens of each sample."""
    num_ranks: int
    sizes: tuple[CpSize, ...]
    """Ascending: the smallest times powers of two; the last may be `num_ranks` instead."""
    launch: float
    """Seconds of a microbatch without samples."""
    multiple: int
    """The number of microbatches is a multiple of this."""


@dataclass(frozen=True)
class CpGroups:
    """The groups that a grid of ranks may form, priced: a problem without its samples.

    Their sizes are ``min_cp_size`` times powers of two up to ``max_cp_size``, and ``num_ranks``.

    Args:
        num_ranks: ranks of the grid, data-parallel times context-parallel.
        max_tokens_per_rank: most padded rows of a microbatch on one rank [tokens].
        cost: seconds of a microbatch on a group.
        min_cp_size: ranks of the smallest groups; divides ``num_ranks``.
        max_cp_size: ranks of the largest groups; None: ``num_ranks``.
        tp_size: tensor-parallel ranks that share the rows of a rank of the grid.
        tile_rows: each rank's rows are a multiple of this. With ``tp_size`` and a group's size, the
            padding of its samples (`alignment`).
        pp_size, vpp_size: pipeline ranks, and model chunks on each. With several chunks the number
            of microbatches is a multiple of ``pp_size``.

    Raises:
        ValueError: a size is below 1, or the sizes of groups do not fit each other or the costs.
    """

    num_ranks: int
    max_tokens_per_rank: int
    _: KW_ONLY
    cost: CostModel
    min_cp_size: int = 1
    max_cp_size: int | None = None
    tp_size: int = 1
    tile_rows: int = 1
    pp_size: int = 1
    vpp_size: int = 1

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"plan_dynamic_cp: {name} is {value}, expected at least 1")
        assert self.sizes  # priced here, so that errors come at once

    @cached_property
    def sizes(self) -> tuple[CpSize, ...]:
        """Every size of a group, ascending."""
        found = []
        for size in _group_sizes(self.num_ranks, self.min_cp_size, self.max_cp_size):
            unit = alignment(self.tp_size, size, self.tile_rows)
            limit = self.max_tokens_per_rank * size // unit * unit
            found.append(CpSize(size, unit, limit, *self.cost.rates(size)))
        return tuple(found)

    def problem(self, seqlens: Sequence[int]) -> CpInstance:
        """The problem of samples of ``seqlens`` rows.

        Raises:
            ValueError: there are no samples, one is empty, or longer than the largest group takes
        """
        _check_samples(seqlens, self.max_tokens_per_rank, self.sizes)
        # interleaved schedules run whole rounds of stages
        multiple = self.pp_size if self.vpp_size > 1 else 1
        lengths = tuple(map(int, seqlens))
        return CpInstance(lengths, self.num_ranks, self.sizes, self.cost.launch_seconds, multiple)


_POSITIVE = "num_ranks", "max_tokens_per_rank", "min_cp_size", "tp_size", "pp_size", "vpp_size"


def _group_sizes(num_ranks: int, least: int, most: int | None) -> list[int]:
    if num_ranks % least:
        raise ValueError(
            f"plan_dynamic_cp: min_cp_size is {least} and num_ranks {num_ranks}, expected a "
            "min_cp_size that divides num_ranks; otherwise some ranks are in no group"
        )
    sizes = cp_sizes(num_ranks, least)
    if most is not None and most not in sizes:
        raise ValueError(
            f"plan_dynamic_cp: max_cp_size is {most}, expected one of {sizes}: min_cp_size "
            f"({least}) times a power of two, or num_ranks ({num_ranks})"
        )
    return cp_sizes(num_ranks, least, most)


def _check_samples(seqlens: Sequence[int], each: int, sizes: Sequence[CpSize]) -> None:
    if not len(seqlens):
        raise ValueError("plan_dynamic_cp: 0 samples, expected at least 1")
    most = max(size.limit for size in sizes)
    for sample, length in enumerate(seqlens):
        if length < 1:
            raise ValueError(
                f"plan_dynamic_cp: sample {sample} has {length} tokens, expected at least 1"
            )
        if length > most:
            raise ValueError(
                f"plan_dynamic_cp: sample {sample} has {length} tokens, expected at most {most}: "
                f"max_tokens_per_rank ({each}) on the largest group ({sizes[-1].size} ranks), in "
                f"multiples of {sizes[-1].unit}. Raise batching.tokens_per_microbatch or the "
                "largest group, or shorten the responses"
            )
