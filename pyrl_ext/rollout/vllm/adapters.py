"""LoRA adapters in vLLM: from memory, under a new name per version, and none ignored in silence."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.adapters import Adapters, adapters_of
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.vllm import cpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest


def lora_arguments(config: dict[str, Any], lora: Lora | None) -> dict[str, Any]:
    """Arguments of vLLM's engine for the adapters of a Hugging Face config; none without any.

    Raises: ValueError naming modules whose adapters vLLM's build cannot apply.
    """
    if lora is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    adapters = adapters_of(lora, Destinations.from_config(config).parts)

    if experts := [name for name in adapters if ".experts." in name and cpu.installed()]:
        raise ValueError(
            f"VLLMEngine.lora: {len(experts)} adapters of routed experts, {experts[:2]}, expected "
            "none; vLLM's kernel for them is Triton's, which its build for CPUs lacks. Use "
            "lora.publish: merge, or lora.experts: none"
        )
    most = max(adapter.rank for adapter in adapters.values())
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= most]
    if not ranks:
        raise ValueError(
            f"VLLMEngine.lora: rank {most}, expected at most {max(get_args(MaxLoRARanks))}, "
            "vLLM's largest. Use lora.publish: merge"
        )
    # a module is named by its last part, those of experts are one module
    kinds = {"experts" if ".experts." in name else name.rpartition(".")[2] for name in adapters}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(ranks),
        "lora_target_modules": sorted(kinds),
    }


def request_of(version: int, load: int) -> LoRARequest:
    """Asks for the adapters that the workers took in load number ``load``. The prefix cache keys
    blocks by the name, not by what it stands for."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"version {version}, load {load}", load, "from memory")


class AdapterLoading:
    """The part of a worker that takes factors; its methods are called through `collective_rpc`."""

    model_runner: Any
    vllm_config: VllmConfig
    lora: Lora | None = None
    adapters: Adapters = MappingProxyType({})

    def watch_adapters(self, lora: Mapping[str, Any]) -> list[str]:
        """To be called before the first load, with the plan's section. Returns why vLLM would not
        apply some of the adapters."""
        self.lora = Lora.model_validate(lora)
        weights = Destinations.from_config(self.vllm_config.model_config.model).parts
        adapters = self.adapters = adapters_of(self.lora, weights)
        manager = self._manager
        packed = {part for parts in manager.packed_modules.values() for part in parts}
        refused = [
            f"{name}: vLLM's {type(manager.model).__name__} puts no adapter there"
            for name in adapters
            if (place := self._place(name)) not in manager.modules and place not in packed
        ]
        if self.vllm_config.model_config.use_mla:
            # MLAAttention holds the module from before it was wrapped, and decodes with halves
            # of its weight that were split when that was loaded
            refused += [
                f"{name}: vLLM's latent attention silently reads its weight without the "
                "adapter; VLLM_MLA_DISABLE=1 materializes keys and values instead"
                for name in adapters
                if name.endswith(".kv_b_proj")
            ]
        return refused

    def adapters_in_use(self) -> list[int | None]:
        """Number of the load whose adapters vLLM's modules hold, one slot after the other."""
        return list(self._manager.lora_index_to_id)

    @property
    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager

    def _place(self, name: str) -> str:
        """vLLM's name of a module."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_rename_mapper() if mapper is not None else None
        return parse_fine_tuned_lora_name(f"{name}.lora_A.weight", mapper)[0]

    @contextmanager
    def _without_adapters(self) -> Generator[None]:
        """vLLM's loaders find modules by their names without adapters' wrappers."""
        from vllm.lora.utils import replace_submodule

        wrapped = dict(self._manager.modules) if self.adapters else {}
        for name, module in wrapped.items():
            replace_submodule(self._manager.model, name, module.base_layer)
        try:
            yield
        finally:
            for name, module in wrapped.items():
                replace_submodule(self._manager.model, name, module)

    def _use(self, factors: Mapping[str, Tensor], load: int) -> None:
        """Put these factors in place of all earlier ones, under the number ``load``.

        Raises: RuntimeError for a module that vLLM has no place for.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        dtype = self._manager.lora_config.lora_dtype
        loras: dict[str, Any] = {}
        for name, (rank, scale, names) in self.adapters.items():
            place = self._place(name)
            # a copy: vLLM multiplies B by the scale in place
            a, b = (factors[each].to(dtype, copy=True) for each in names)
            loras[place] = LoRALayerWeights(place, rank, round(scale * rank), a, b, scale)
        self.model_runner.lora_manager.remove_all_adapters()
        model = LoRAModel(load, max(each.rank for each in self.adapters.values()), loras)
        self._manager.add_adapter(model)
        self._manager.activate_adapter(load)
        if ignored := sorted(model.loras.keys() - self._manager.modules.keys()):
            raise RuntimeError(
                f"VLLMEngine.load_weights: vLLM ignores the adapters of {len(ignored)} modules, "
                f"{ignored[:4]}, expected none"
            )

    def _adapter_memory(self) -> Iterable[tuple[str, Tensor]]:
        """Factors as vLLM's modules hold them: packed, sharded, scaled, padded to its rank."""
        for name, module in self._manager.modules.items() if self.adapters else ():
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                for number, tensor in enumerate(getattr(module, kind)):
                    yield f"{name}.{kind}.{number}", tensor
