"""Which rank is where, and which ranks communicate: megatron-core's default order, tp fastest.

Attention and dense layers see the ranks as pp x dp x cp x tp; routed experts see the same ranks as
pp x edp x ep x etp.
"""

from __future__ import annotations

from itertools import product
from operator import attrgetter
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


def ranks(parallel: Parallel) -> tuple[Rank, ...]:
    """Every rank of the world, in order."""
    pp, ep, etp = parallel.pp, parallel.ep, parallel.etp_size
    dense = product(*map(range, (pp, parallel.dp, parallel.cp, parallel.tp)))
    expert = product(*map(range, (pp, parallel.world_size // (pp * ep * etp), ep, etp)))
    pairs = zip(dense, expert, strict=True)
    return tuple(Rank(i, *here, *there[1:]) for i, (here, there) in enumerate(pairs))


DENSE_GRID = ("pp", "dp", "cp", "tp")
EXPERT_GRID = ("pp", "edp", "ep", "etp")
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
    everyone, found = ranks(parallel), {}
    for name, axes in GROUPS.items():
        grid = EXPERT_GRID if axes[0] in EXPERT_GRID else DENSE_GRID
        place = attrgetter(*(axis for axis in grid if axis not in axes))
        kind: dict[tuple[int, ...], list[int]] = {}
        for each in everyone:
            kind.setdefault(place(each), []).append(each.rank)
        if len(kind) < len(everyone):
            found[name] = tuple(map(tuple, kind.values()))
    return found
