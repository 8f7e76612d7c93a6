"""The transfer backend of a stock vLLM server; its plugin registers the class by name.

vLLM calls start, update and finish in each worker. The first worker receives and verifies all
tensors; at the finish it broadcasts them to the others, in buckets, and each loads its part. vLLM's
own backends load tensors as they arrive, and their finish checks nothing: a trainer that dies in
the middle leaves a mixture that is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import inplace

from pyrl_ext.ops.digest import DigestLog
from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.buckets import from_one_rank
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.remote.weight_protocol import TransferError
from pyrl_ext.rollout.remote.weight_receiver import StagedUpdate
from pyrl_ext.rollout.vllm.drafts import drafts_with_mtp
from pyrl_ext.rollout.vllm.loading import Loading

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]
BUCKET_BYTES = 2**28


@dataclass
class NoInit(WeightTransferInitInfo):
    """Each update says where its weights come from."""


class StagedTransfer(WeightTransferEngine[NoInit, WeightTransferUpdateInfo], Loading):
    """A worker's end of a publish."""

    init_info_cls = NoInit
    supports_draft_weight_update = False
    reload_weights: Any
    draft: torch.nn.Module | None = None  # `ServedWorker` sets it

    def __init__(
        self,
        config: Any,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ):
        super().__init__(config, vllm_config, device, model)
        drafts = drafts_with_mtp(vllm_config)
        self._destinations = Destinations.from_config(vllm_config.model_config.model, drafts=drafts)
        parts = self._destinations.parts
        shape = self._destinations.shape
        self.staged = StagedUpdate({name: shape(name) for name in parts}, device)
        self._taken = DigestLog(finite=True)
        self.reload_weights = self._reload

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        self.staged.drop()

    def start_weight_update(self) -> None:
        self.staged.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and verify everything; the model is not touched.

        Raises: TransferError, on every worker; also if it is asked to drop what came, since vLLM
            ends an update for an error alone.
        """
        error = None
        if update_info.get("drop"):
            self.staged.drop()
            error = "weights: the update is dropped, as the trainer asked"
        elif self._world.rank_in_group == 0:
            try:
                self.staged.update(update_info)
            except TransferError as caught:
                error = str(caught)
        if (error := self._shared(error)) is not None:
            raise TransferError(error)

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        raise NotImplementedError("StagedTransfer: update_weights receives")

    def finish_weight_update(self) -> None:
        """Load what came. Raises: TransferError if nothing did."""
        tensors = dict[str, Tensor]()
        only = None
        error = None
        if self._world.rank_in_group == 0:
            try:
                info, tensors = self.staged.finish()
                only = info.only
            except TransferError as caught:
                error = str(caught)
        layout: Layout = [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
        layout, only, error = self._shared((layout, only, error))
        if error is not None:
            raise TransferError(error)
        self._take(self._handed_on(layout, tensors), only, stay_valid=True)

    @property
    def _world(self) -> Any:
        return get_world_group()

    def _shared(self, value: Any) -> Any:
        """The first worker's ``value``, on all of them."""
        return self._world.broadcast_object(value, src=0)

    def _handed_on(
        self, layout: Layout, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, from the first worker, in memory that is not filled again."""
        world = self._world
        if world.world_size == 1:
            for name, tensor in tensors.items():
                yield name, tensor.to(self.device)
            return
        group = world.device_group if on_gpu(self.device) else world.cpu_group
        yield from from_one_rank(layout, tensors, world.ranks[0], group, self.device, BUCKET_BYTES)

    def _held_model(self) -> torch.nn.Module:
        return self.model

    def _draft_model(self) -> torch.nn.Module | None:
        if self.draft is None and drafts_with_mtp(self.vllm_config):
            raise TransferError("weights: no draft model, expected `identity` called before")
        return self.draft

    def _reload(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        inplace.reload_weights(self.vllm_config, self.model, weights_iterator, None, True)
