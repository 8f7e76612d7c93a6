"""Share of the policy's change from its frozen base that survives the engine's dtype."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.models.weight_table import tensor_split
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan.model.weight import Weight


class LoraUpdateCheck:
    """Adds up, over all numbers of all merged weights, move * seen and move ** 2.

    ``move`` is what adapters add to a weight of the base, and ``seen`` the difference between both
    weights as the engine holds them, merged and base each rounded to its dtype.

    Args:
        dtype: of the engine's weights.
        topo: of the module that has the adapters.
    """

    def __init__(self, dtype: torch.dtype, topo: Topology):
        self.dtype = dtype
        self.topo = topo
        self.sums = torch.zeros(2, dtype=torch.float64, device=topo.device)

    def note(self, row: Weight, weight: Tensor, delta: Tensor, merged: Tensor) -> None:
        """One weight of this rank.

        Args:
            row: of the weight.
            weight: of the base, in the type in which it is sent.
            delta: [as the weight] float32, what its adapter adds.
            merged: the sum of both, as it is sent.
        """
        seen = merged.to(self.dtype).float() - weight.to(self.dtype).float()
        both = torch.stack([(delta * seen).sum(dtype=torch.float64), delta.double().square().sum()])
        self.sums += both * self._shards(row)

    def _shards(self, row: Weight) -> int:
        """Number of different parts of a row: each stage has as many ranks, so that every number
        counts as often as every other."""
        split, _, _ = tensor_split(row, self.topo)
        split = 1 if row.shard == "same" else split
        return split * (self.topo.ep_size if row.expert is not None else 1)

    def metrics(self) -> dict[str, float]:
        """``publish/move_seen``: sum of move * seen / sum of move ** 2; nothing without a move.

        Communicates: an all-reduce of two numbers over all ranks. Syncs: reads them.
        """
        sums = self.sums.cpu()
        if self.topo.world_size > 1:
            dist.all_reduce(sums, group=self.topo.world)  # type: ignore
        seen = float(sums[0])
        moved = float(sums[1])
        return {"publish/move_seen": seen / moved} if moved else {}
