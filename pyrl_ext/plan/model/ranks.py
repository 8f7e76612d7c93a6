"""Which rank is where, and which ranks communicate: megatron-core's default order, tp fastest.

Attention and dense layers see the ranks of a module as pp x dp x cp x tp; routed experts see the
same ranks as pp x edp x ep x etp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pyrl_ext.plan.schema import Parallel

# Groups that the trainer communicates in: name -> the axes along which their ranks differ, the
# slowest first. megatron-core sums gradients, their norm and the routers' load in `MORE_GROUPS`.
GROUPS = dict(
    tp="tp", cp="cp", dp="dp", dp_cp="dp cp", pp="pp", ep="ep", expt_tp="etp", expt_dp="edp"
)
MORE_GROUPS = dict(
    **{"mp": "pp tp", "tp_cp": "cp tp", "tp_dp_cp": "dp cp tp", "intra_dist_opt": "pp dp cp tp"},
    **{"tp_ep": "ep etp", "tp_ep_pp": "pp ep etp"},
)


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


@dataclass(frozen=True)
class Grid:
    """The ranks that one module runs on, from `first` on, as its `parallel` arranges them."""

    name: str
    first: int
    parallel: Parallel

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.parallel.world_size)

    @cached_property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Axis -> (its size, the distance of neighbours on it), in the order of `Rank`."""
        sizes = self.parallel
        stage = self.parallel.world_size // self.parallel.pp
        tp = sizes.tp
        ep = sizes.ep
        etp = sizes.etp_size
        dense = {"pp": (sizes.pp, stage), "dp": (sizes.dp, sizes.cp * tp), "cp": (sizes.cp, tp)}
        experts = {"edp": (stage // (ep * etp), ep * etp), "ep": (ep, etp), "etp": (etp, 1)}
        return dense | {"tp": (tp, 1)} | experts

    def rank_of(self, *, dp: int = 0, cp: int = 0, tp: int = 0, pp: int = 0) -> int:
        """The rank at a place of the dense grid."""
        here = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        return self.first + sum(at * self.axes[axis][1] for axis, at in here.items())

    def place(self, rank: int) -> Rank:
        """The coordinates of `rank`."""
        at = rank - self.first
        return Rank(rank, *(at // stride % size for size, stride in self.axes.values()))

    def group(self, rank: int, axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` alone, and itself; rising."""
        place = self.place(rank)._asdict()
        group = [rank]
        for axis in axes.split():
            size, stride = self.axes[axis]
            group = [r + (i - place[axis]) * stride for r in group for i in range(size)]
        return tuple(group)

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Name -> the group of that kind that `rank` is in, also where it is alone."""
        return {name: self.group(rank, axes) for name, axes in (GROUPS | MORE_GROUPS).items()}

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Name -> every group of that kind, as rising ranks; kinds of one rank are left out."""
        found = {}
        for name, axes in GROUPS.items():
            kind: list[tuple[int, ...]] = []
            seen: set[int] = set()
            for rank in self.ranks:
                if rank not in seen:
                    kind.append(self.group(rank, axes))
                    seen.update(kind[-1])
            if len(kind[0]) > 1:
                found[name] = tuple(kind)
        return found


def ranks(parallel: Parallel) -> tuple[Rank, ...]:
    """Every rank of a module alone in the world, in order."""
    grid = Grid("llm", 0, parallel)
    return tuple(map(grid.place, grid.ranks))
