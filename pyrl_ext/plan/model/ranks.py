"""Which rank is where, and which ranks communicate: megatron-core's default order, tp fastest.

Attention and dense layers see the ranks as pp x dp x cp x tp; routed experts see the same ranks as
pp x edp x ep x etp.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from pyrl_ext.plan.schema import Parallel


class Rank(NamedTuple):
    """Coordinates of one rank; `edp`, `ep` and `etp` are those of its routed experts."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int


def _axes(parallel: Parallel) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the dense and of the expert grid, slowest axis first."""
    etp = parallel.etp_size
    edp = parallel.world_size // (parallel.pp * parallel.ep * etp)
    dense = {"pp": parallel.pp, "dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp}
    return dense, {"pp": parallel.pp, "edp": edp, "ep": parallel.ep, "etp": etp}


def ranks(parallel: Parallel) -> tuple[Rank, ...]:
    """Every rank of the world, in order."""
    dense, expert = (product(*map(range, axes.values())) for axes in _axes(parallel))
    pairs = zip(dense, expert, strict=True)
    return tuple(Rank(i, *here, *there[1:]) for i, (here, there) in enumerate(pairs))


# Groups that the trainer communicates in: name -> the axes along which their ranks differ.
GROUPS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "pp": ("pp",),
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "expt_dp": ("edp",),
}


def groups(parallel: Parallel) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Name -> every group of that kind, as rising ranks; kinds of one rank are left out."""
    everyone = ranks(parallel)
    found = {name: _along(everyone, axes) for name, axes in GROUPS.items()}
    return {name: kind for name, kind in found.items() if len(kind) < len(everyone)}


def _along(everyone: Iterable[Rank], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    expert = axes[0] in ("edp", "ep", "etp")
    grid = ("pp", "edp", "ep", "etp") if expert else ("pp", "dp", "cp", "tp")
    kept = [axis for axis in grid if axis not in axes]
    together: dict[tuple[int, ...], list[int]] = {}
    for each in everyone:
        together.setdefault(tuple(getattr(each, axis) for axis in kept), []).append(each.rank)
    return tuple(map(tuple, together.values()))
