"""megatron-core's communicator of modules over any backend, as it is and mended."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.multimodule_communicator import (
    MultiModulePipelineCommunicator,
)
from torch import Tensor

from benchmarks.module_cases import AXES, Case


class Bridge(BridgeCommunicator):
    """megatron's with the world's backend for its 'nccl'. ``mended``: a reader that several
    replicas feed cuts the gradient as the rows came; megatron cuts it into equal parts."""

    mended = False

    def __init__(self, *args: Any, **kwargs: Any):
        self.rows: list[list[int]] = []
        super().__init__(*args, **kwargs)

    @classmethod
    def _get_or_create_broadcast_pg(cls, ranks_list: list[list[int]]) -> Any:
        return dist.new_subgroups_by_enumeration(ranks_list)[0]

    @classmethod
    def _get_or_create_bridge_pg(cls, ranks: list[int]) -> Any:
        return dist.new_group(sorted(ranks))

    def _communicate_shapes(self, *args: Any, **kwargs: Any) -> Any:
        came, grads = super()._communicate_shapes(*args, **kwargs)
        if self.mended and len(came) > 1:
            self.rows.append([shape[self._batch_dim] for shape in came])
        return came, grads

    def _split_tensor_at_batch_dim(self, aggregated_tensor: Tensor, num_splits: int) -> Any:
        if not self.rows or not self.is_current_rank_in_grid(self.dest_grid):
            return super()._split_tensor_at_batch_dim(aggregated_tensor, num_splits)
        return [part.contiguous() for part in aggregated_tensor.split(self.rows.pop(0))]


class Pipeline(MultiModulePipelineCommunicator):
    """megatron's with `Bridge`. ``mended``: gradients of several readers add up, neighbouring
    stages are one apart, and context-parallel ranks count as tensor-parallel ones."""

    def __init__(self, case: Case, grids: dict[str, HyperCommGrid], config: Any, mended: bool):
        self.case = case
        self.mended = mended
        dims = {name: 2 if name[0] == "e" else 3 for name in grids}
        axes: Any = {"s": 0, "b": 1, "h": 2}  # megatron's annotation says lists
        super().__init__(grids, case.feeds, config, axes, dims)

    def _build_bridge_comms(self) -> None:
        for source, readers in self.topology.items():
            for reader in readers:
                self.bridge_comms.append(
                    type("B", (Bridge,), {"mended": self.mended})(
                        self._ends(source),
                        self._ends(reader),
                        dim_mapping=self.dim_mapping,
                        comm_dtype=self.config.pipeline_dtype,
                        src_module_name=source,
                        dest_module_name=reader,
                        tensor_ndim=2,
                    )
                )

    def _ends(self, name: str) -> HyperCommGrid:
        grid = self.module_to_grid_map[name]
        sizes = self.case.modules[name]
        if not self.mended or sizes.get("cp", 1) == 1:
            return grid
        shape = [sizes.get("tp", 1) * sizes["cp"], 1, sizes.get("dp", 1), sizes.get("pp", 1)]
        return HyperCommGrid(shape, list(AXES), rank_offset=grid.rank_offset)

    def send_forward_recv_backward(self, output_dict: dict, *args: Any, **kwargs: Any) -> dict:
        return self._summed("send_forward_recv_backward", output_dict, *args, **kwargs)

    def recv_backward(self, *args: Any, **kwargs: Any) -> dict:
        return self._summed("recv_backward", None, *args, **kwargs)

    def _summed(self, verb: str, outputs: dict | None, *args: Any, **kwargs: Any) -> dict:
        ((name, info),) = self.rank_module_map.items()
        bridges = info.bridge_comms_as_src_module
        if not self.mended or len(bridges) < 2:
            given = () if outputs is None else (outputs,)
            return getattr(super(), verb)(*given, *args, **kwargs)
        given = () if outputs is None else (outputs[name],)
        grads = [getattr(bridge, verb)(*given) for bridge in bridges]
        return {name: torch.stack(grads).sum(0)}

    @property
    def current_stage(self) -> int:
        """``mended``: counted from the ends, where a shallow encoder is as near its reader as a
        deep one."""
        if not self.mended:
            return super().current_stage
        ((name, info),) = self.rank_module_map.items()
        behind = max((self.case.modules[r].get("pp", 1) for r in self.topology[name]), default=0)
        deepest = max(self.case.modules[r].get("pp", 1) for r in self.case.readers)
        if name[0] == "r":
            behind = deepest - self.case.modules[name].get("pp", 1)
        return self.total_stages - behind - info.pp_size + info.pp_rank
