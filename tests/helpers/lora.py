"""Adapters of a live module, whole on every rank, as tests compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyrl_ext.models.lora_live import Adapters
from pyrl_ext.models.lora_table import RandomFactors
from pyrl_ext.models.weight_table import load, stream_of
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.weights.gather import GatheredWeights, plan_buckets

STD = 0.05


def adapters_of(module: TrainedModule) -> Adapters:
    """The module's adapters, which it must have."""
    assert module.adapters is not None
    return module.adapters


def draw_b(module: TrainedModule, std: float = STD) -> None:
    """Draw every B, normal with ``std``: while B is zero, A has no gradient."""
    adapters = adapters_of(module)
    drawn = RandomFactors(adapters.table, module.plan.seed)

    def read(name: str) -> Tensor:
        if name.endswith("lora_A.weight"):
            return drawn(name)
        return torch.randn(drawn.shapes[name], generator=stream_of(name, 0)) * std

    load(adapters.table, adapters.live(), read, module.topo)
    for part in module.optimizer.chained_optimizers if module.optimizer else ():
        if not part.is_stub_optimizer:
            part.reload_model_params()  # mixed precision steps copies


def factors(module: TrainedModule) -> dict[str, Tensor]:
    """Every factor, by its checkpoint name."""
    return _whole(module, module.factors(), adapters_of(module).table)


def gradients(module: TrainedModule) -> dict[str, Tensor]:
    """d(loss) / d(factor), float32."""
    return _whole(module, module.gradients(), adapters_of(module).table, torch.float32)


def merged(module: TrainedModule) -> dict[str, Tensor]:
    """The base with the adapters in it."""
    return _whole(module, adapters_of(module).merged(module.named_parameters()), module.table)


def base(module: TrainedModule) -> dict[str, Tensor]:
    """The base alone."""
    return _whole(module, module.named_parameters(), module.table)


def base_digest(module: TrainedModule) -> str:
    """The digest of the base as it is now."""
    module.__dict__.pop("base_digest", None)
    return module.base_digest


def _whole(
    module: TrainedModule,
    live: Mapping[str, Tensor],
    table: Sequence[Weight],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    buckets = plan_buckets(module.plan, table, dtype)
    return {n: t.clone() for n, t in GatheredWeights(buckets, live, module.topo)}
