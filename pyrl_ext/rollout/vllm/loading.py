"""Runs inside vLLM's workers: loads weights and reports digests of them and of its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrl_ext.ops.digest import DigestLog
from pyrl_ext.rollout.adapters import is_factor, need_all_factors
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.vllm.adapters import AdapterLoading
from pyrl_ext.rollout.vllm.drafts import DraftLoad, drafts_with_mtp
from pyrl_ext.rollout.vllm.quantization import need_quantized
from pyrl_ext.rollout.vllm.stacks import ExpertStacks, places_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Loading(AdapterLoading):
    """Its methods are called by name through `collective_rpc`."""

    model_runner: Any  # vLLM has one for GPUs, one for CPUs, and a second generation
    vllm_config: VllmConfig
    rank: int
    reload_weights: Callable[..., None]
    _destinations: Destinations | None = None
    _taken: DigestLog

    def take_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        only: Collection[str] | None,
        load: int = 0,
    ) -> list[Exception]:
        """Loads a checkpoint, or whole layers of it, or the factors of all adapters. vLLM keeps the
        old values of modules that receive nothing, and completes a module that receives a part with
        whatever memory holds.

        Args:
            named: (name, tensor); a tensor is valid until the next one is asked for
            only: names of the tensors that are sent; None: all
            load: number of this load, by which adapters are asked for

        Returns:
            errors, such as the ValueError of `Destinations.check`. They are returned in a list:
            raising (or returning an exception) makes vLLM skip the other workers' replies and
            mismatch the next call
        """
        try:
            self._take(named, only, load)
        except Exception as error:
            return [error]
        return []

    def _take(
        self,
        named: Iterable[tuple[str, Tensor]],
        only: Collection[str] | None,
        load: int = 0,
        stay_valid: bool = False,
    ) -> None:
        """`take_weights`.

        Args:
            stay_valid: a tensor does not change until the load has ended
        """
        if self._destinations is None:
            given = self.vllm_config.model_config.model
            drafts = self._draft_model() is not None
            self._destinations = Destinations.from_config(given, self.lora, drafts)
        if only is None:
            self._taken = DigestLog(finite=True)
        else:
            self._destinations.need_whole_layers(only)
            need_all_factors("VLLMEngine.load_weights", self.adapters, only)
        factors = dict[str, Tensor]()
        checked = self._destinations.check(named, only, self._taken.not_finite)
        weights = self._noted(checked, factors, stay_valid)
        if only is None or not all(map(is_factor, only)):
            self._reload_base(weights)
        else:
            deque(weights, maxlen=0)
        if self.adapters:
            self._use(factors, load)

    def _reload_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        draft = DraftLoad(self._draft_model(), self.vllm_config)
        _name_loaders(self._held_model())
        with self._without_adapters():
            try:
                self.reload_weights(weights_iterator=draft.without_drafts(weights))
            except BaseException:
                # vLLM keeps the parts of incomplete layers and would complete them with parts of
                # the next load; an empty load drops them
                self.reload_weights(weights_iterator=())
                raise
            finally:
                draft.finish()
        if self.vllm_config.quant_config is not None:
            for model in filter(None, (self._held_model(), self._draft_model())):
                need_quantized(model)

    def _held_model(self) -> torch.nn.Module:
        """The model that is loaded."""
        return self.model_runner.model

    def _draft_model(self) -> torch.nn.Module | None:
        """The model of MTP layers with which vLLM drafts tokens, if it does."""
        return self.model_runner.get_draft_model() if drafts_with_mtp(self.vllm_config) else None

    def _noted(
        self, named: Iterable[tuple[str, Tensor]], factors: dict[str, Tensor], stay_valid: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Records a digest of each tensor. Copies those that do not stay valid, as vLLM holds them
        until their layer is complete, and those of single experts, which it takes together. Puts
        factors, which are no weights of vLLM's, into ``factors``."""
        stacks = ExpertStacks(places_of(self._held_model()))
        for name, tensor in named:
            tensor = tensor.detach()
            stacked = stacks.add(name, tensor)
            if stacked is not None:
                held, whole = stacked
                self._taken.add(name, held)
                if whole is not None:
                    yield whole
                continue
            held = tensor if stay_valid else tensor.clone()
            self._taken.add(name, held)
            if is_factor(name):
                factors[name] = held
            else:
                yield name, held

    def weight_digests(self, names: Sequence[str] | None) -> dict[str, int]:
        """Digests of the tensors last loaded; with None also of the tensors in vLLM's memory."""
        transfer = getattr(self, "weight_transfer_engine", None)
        if isinstance(transfer, Loading):  # a server's worker has them from there
            self._taken = transfer._taken
        if unknown := [name for name in names or () if name not in self._taken]:
            raise ValueError(f"VLLMEngine.checksums: {unknown[:4]}, expected names of its weights")
        taken = self._taken.numbers()
        if names is not None:
            return {name: taken[name] for name in names}
        memory = DigestLog()
        for name, tensor in self._memory():
            memory.add(f"vllm rank {self.rank}: {name}", tensor)
        return taken | memory.numbers()

    def _memory(self) -> Iterator[tuple[str, Tensor]]:
        """vLLM's parameters and buffers, packed, fused and sharded as they are. Weights that a CPU
        library has packed are not visible; their product with a vector stands for them."""
        yield from self._adapter_memory()
        modules: list[tuple[str, Any]] = list(self._held_model().named_modules())
        shared = {module for _, module in modules}
        if (draft := self._draft_model()) is not None:
            modules += [(f"draft {n}", m) for n, m in draft.named_modules() if m not in shared]
        for name, module in modules:
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield f"{name}.{key}", tensor
            if (packed := getattr(module, "cpu_linear", None)) is not None:
                weight = module.weight
                width = weight.shape[-1] or getattr(
                    module, "input_size_per_partition", module.input_size
                )
                vector = torch.arange(1.0, width + 1).sin().to(weight.dtype)[None]
                yield f"{name}.weight as packed", packed(vector, weight, None)


def _name_loaders(model: torch.nn.Module) -> None:
    """vLLM 0.32's reload compares the name of each weight's loader (`reload/layerwise.py`). That of
    MiniMax-M2's norms is a `functools.partial` (`minimax_rms_norm/rms_norm_tp.py`), without one."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            loader.__name__ = "partial"  # type: ignore[attr-defined]
