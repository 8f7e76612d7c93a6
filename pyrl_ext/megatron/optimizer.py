"""megatron's optimizer over the wrapped chunks, and the mends its checkpoint loading needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from pyrl_ext.megatron.model import DTYPES, quiet


def build_optimizer(plan: Any, chunks: Sequence[Any], groups: Any) -> Any:
    """megatron's optimizer (fp32, mixed precision or distributed) with the plan's settings."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options, dtype = plan.optimizer, DTYPES[plan.model.dtype]
    if options.distributed:
        _mend_distributed_load()
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad or math.inf,  # 0 would leave the norm out as well
        bf16=plan.model.dtype == "bfloat16",
        params_dtype=dtype,
        use_distributed_optimizer=options.distributed,
    )
    with quiet():
        return get_megatron_optimizer(
            config, list(chunks), use_gloo_process_groups=False, pg_collection=groups
        )


def set_lr(optimizer: Any, lr: float) -> None:
    """Use learning rate ``lr`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)


def warmed_up(lr: float, warmup_steps: int, step: int) -> float:
    """Learning rate of 0-based ``step``: linear from ``lr / warmup_steps``, then flat."""
    return lr if step >= warmup_steps else lr * (step + 1) / warmup_steps


@functools.cache
def _mend_distributed_load() -> None:
    """megatron-core 0.19.2's DistributedOptimizer over torch's AdamW (no TransformerEngine, no
    Apex) does not load what it saved: `step` is missing from the loaded state (KeyError), and then
    all parameters share one `step` tensor, which so grows once a parameter (wrong bias
    correction)."""
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not USING_PYTORCH_OPTIMIZER:
        return
    cls: Any = DistributedOptimizer
    set_states, load = cls._set_main_param_and_optimizer_states, cls.load_state_dict

    def set_states_with_step(self: Any, param: Any, tensors: dict) -> None:
        set_states(self, param, {"step": None, **tensors})

    def load_with_own_steps(self: Any, state: dict) -> None:
        load(self, state)
        for entry in self.optimizer.state.values():
            entry["step"] = entry["step"].clone()

    cls._set_main_param_and_optimizer_states = set_states_with_step
    cls.load_state_dict = load_with_own_steps
