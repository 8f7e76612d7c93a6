"""The sizes of dynamic context parallelism, for the plan, the schedules and the process groups."""

from __future__ import annotations


def cp_sizes(ranks: int, least: int, most: int | None = None) -> list[int]:
    """Sizes of context-parallel groups, rising: `least` times powers of two, and all ranks.

    If larger groups come first, groups of these sizes always begin at a multiple of their size:
    what comes before is a multiple of it, and a group of all ranks is alone.

    Args:
        ranks: of the grid of data- and context-parallel ranks
        least: ranks of the smallest group; divides `ranks`
        most: ranks of the largest group; None: all
    """
    doubled = [least << i for i in range(ranks.bit_length()) if least << i <= ranks]
    return [size for size in sorted({*doubled, ranks}) if size <= max(least, most or ranks)]


def cp_group(rank: int, ranks: int, size: int) -> range:
    """The group of `size` ranks that `rank` can be in; fewer ranks if the grid ends before."""
    first = rank // size * size
    return range(first, min(ranks, first + size))
