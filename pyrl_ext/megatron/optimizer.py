"""Megatron's optimizer over the wrapped chunks, and its state in a layout-independent form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.megatron.bf16_moments import MOMENTS, Bf16MomentsAdamW
from pyrl_ext.megatron.ddp import buffers
from pyrl_ext.megatron.te import use_kernels
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.parallel.saved_tensors import Block, SavedTensors
from pyrl_ext.parallel.suppress_warnings import quiet
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan


def build_optimizer(plan: Plan, chunks: Sequence[Any], groups: Any) -> Any:
    """Megatron's optimizer (fp32, mixed precision or distributed) with the plan's settings.

    Communicates: megatron-core 0.19.2 gathers names of parameter groups over the world
    (optimizer/__init__.py:364), so the ranks of every module build one, trained or not; those
    without a module that shares ranks call `join_build_optimizer`.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    use_kernels(plan.model.backend)
    options = plan.optimizer
    dtype = dtype_of(plan.model.dtype)
    by_muon = options.name == "muon"
    if by_muon:
        from pyrl_ext.megatron.muon import mark_whole, use_stacked_experts

        use_stacked_experts()
        mark_whole(chunks)
    config = OptimizerConfig(
        optimizer="muon" if by_muon else "adam",
        muon_momentum=options.muon_momentum,
        muon_nesterov=True,
        muon_extra_scale_factor=options.muon_rms,
        muon_tp_mode="duplicated",  # by block, the update would depend on tp
        muon_fp32_matmul_prec="highest" if dtype == torch.float32 else "medium",
        lr=options.lr,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad or math.inf,  # with 0 megatron would not compute the norm
        bf16=plan.model.dtype == "bfloat16",
        params_dtype=dtype,
        use_distributed_optimizer=options.distributed,
    )
    with quiet():
        optimizer = get_megatron_optimizer(
            config, list(chunks), use_gloo_process_groups=False, pg_collection=groups
        )
    _gather_once(optimizer)
    if options.moments == "bfloat16":
        for part in _parts(optimizer):
            part.optimizer = Bf16MomentsAdamW(part.optimizer.param_groups)
            part.init_state_fn = lambda inner, _: inner.init_state()
    for part in _parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                # few kernels for all tensors, one pass on a CPU; megatron has no option for it
                group["fused"] = True
    return optimizer


def name_of(optimizer: Any) -> str:
    """The classes that update the weights, each with the package it is from."""
    names = list[str]()
    for part in _parts(optimizer):
        kind = type(part.optimizer)
        name = f"{kind.__module__.split('.')[0]}.{kind.__name__}"
        if name not in names:
            names.append(name)
    return ", ".join(names) or "none on this rank, whose weights are all frozen"


def join_build_optimizer(topo: Topology) -> None:
    """Take part in what `build_optimizer` gathers over the world for a module that is not on this
    rank, but on another with several modules."""
    for _ in ("dense parameters", "experts"):
        dist.all_gather_object([None] * topo.world_size, [])


def _gather_once(optimizer: Any) -> None:
    """Let the last distributed optimizer alone gather the updated weights.

    megatron-core 0.19.2 has one for dense parameters and one for experts, which step in turn, and
    each gathers the weights of both: all of them twice an update, the first time with experts that
    have not changed. No option of it avoids that; the attribute is its own, for another case.
    """
    for part in _parts(optimizer)[:-1]:
        part._defer_param_sync = True


def set_lr(optimizer: Any, lr: float) -> None:
    """Use learning rate ``lr`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)


def step_all(held: Sequence[tuple[Any, Topology]]) -> tuple[bool, float]:
    """Clip the gradients by their norm over all modules, and update the weights.

    megatron-core 0.19.2 takes the norm over the ranks of one module (optimizer.py:1760), so each
    would clip by another.

    Args:
        held: of each module of this rank megatron's optimizer, None if it is not trained, and the
            rank's place.

    Returns: True if all steps were applied, and the norm before clipping (NaN if there is none).
    Communicates: besides megatron's sums, an all-reduce of one number if there are several modules.
    """
    optimizers = [optimizer for optimizer, _ in held if optimizer is not None]
    if len(held[0][1].grids) == 1:
        applied, norm, _ = optimizers[0].step()
        return applied, math.nan if norm is None else float(norm)
    norm = _norm_over_modules(held)
    return all([_step_by(optimizer, norm) for optimizer in optimizers]), norm


def _step_by(optimizer: Any, norm: float) -> bool:
    """Clip by ``norm`` and update; returns True if the step was applied."""
    optimizer.get_grad_norm = lambda: norm
    try:
        applied, *_ = optimizer.step()
    finally:
        del optimizer.get_grad_norm
    return applied


def _norm_over_modules(held: Sequence[tuple[Any, Topology]]) -> float:
    """The norm of all modules' gradients; a module's first rank counts it."""
    square = 0.0
    for optimizer, topo in held:
        if optimizer is not None:
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            square += norm**2 if topo.rank == topo.first else 0.0
    total = torch.tensor(square, dtype=torch.float64)
    dist.all_reduce(total, group=held[0][1].world)
    return math.sqrt(float(total))


def state_tensors(optimizer: Any) -> list[Tensor]:
    """The tensors that the optimizer updates on this rank (the weights or their fp32 copies), and
    its state tensors."""
    tensors = []
    for part in _parts(optimizer):
        states = part.optimizer.state.values()
        tensors += _mains(part) + [t for s in states for t in s.values() if torch.is_tensor(t)]
    return tensors


def state_bytes(plan: Plan, chunks: Sequence[Any]) -> int:
    """Bytes of `state_tensors` after the first step, without weights in fp32, which it steps
    themselves; of wrapped chunks whose optimizer need not be built yet."""
    each = plan.optimizer_bytes
    held = 0
    for buffer in buffers(chunks):
        shares = buffer.data_parallel_group.size() if plan.optimizer.distributed else 1
        held += each * buffer.grad_data.numel() // shares
        held += 4 * len(buffer.param_index_map)  # Adam counts the steps of each
    if plan.optimizer.name == "muon":
        from pyrl_ext.megatron.muon import matrices

        for matrix in matrices(chunks):  # one moment instead of two, and no count
            held -= 4 * matrix.numel() + 4
    return held


# state for checkpoints ---------------------------------------------------------------------------
#
# megatron-core 0.19.2 saves an optimizer's state in a form that depends on how the optimizer was
# built, so that it loads only into one built the same way:
# - with ep > 1 there are two (one for the experts) and their states are numbered: error at ep 1;
# - plain, mixed precision and distributed optimizers have different forms;
# - the distributed one over torch's AdamW (no TransformerEngine, no Apex) does not load its own
#   form: `step` is missing (KeyError), and then all parameters share one `step` tensor, which is
#   then incremented once for each parameter (wrong bias correction).
# Here every optimizer saves the same: three tensors for each parameter, or two with Muon, sharded
# and named as the parameter is, and the number of steps. Hyperparameters come from the plan, not
# the checkpoint.

MUON = ("momentum_buffer",)


def sharded_state(optimizer: Any, models: dict) -> dict[str, Any]:
    """The optimizer's state for ``dist_checkpointing``, in a form independent of the layout.

    Args:
        models: sharded state dicts of the model chunks; their ``data`` are the live parameters.

    Returns: ``step`` and, in ``params``, the sharded tensors ``optimizer.state.<kind>.<parameter>``
        (fp32; kind: param, exp_avg, exp_avg_sq; with Muon: param, momentum_buffer) of each part of
        the optimizer. Moments in bfloat16 stay so where they are not gathered.
        With a distributed optimizer the first data-parallel rank alone has those to save.
    Communicates: that rank gathers them from the others, over gloo and in host memory.
    """
    parts = _parts_with_moments(optimizer)
    step = max((_step(part) for part in parts), default=0)
    for part in parts:
        _set_step(part, step)
    params = {
        i: (_gathered(part, models) or {}) if _is_distributed(part) else _sharded(part, models)
        for i, part in enumerate(parts)
    }
    return {"step": step, "params": params}


def _gathered(part: Any, models: dict) -> dict[int, Any] | None:
    """megatron's form. Its default gathers the state on every rank: on its GPU, then on the host;
    its other way asks for a gloo group, which ours are for tensors on the host."""
    part.data_parallel_group_gloo = part.data_parallel_group
    sparing = {"distrib_optim_fully_reshardable_mem_efficient": True}
    return part.sharded_param_state_fully_reshardable(models, False, sparing)


def _sharded(part: Any, models: dict) -> dict[int, dict[str, Any]]:
    """Index in the inner optimizer -> its state by kind, sharded as the model's parameter is."""
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    return {
        i: {
            kind: make_sharded_optimizer_tensor(parameter, tensor, f"optimizer.state.{kind}")
            for kind, tensor in _tensors(part, main).items()
        }
        for i, (parameter, main, _) in enumerate(_places(part, models))
    }


@torch.no_grad()
def load_state(optimizer: Any, models: dict, folder: Path, step: int, moments: bool = True) -> None:
    """Read the state that this rank steps, and no more, from a checkpoint of any layout.

    megatron-core 0.19.2 lets every rank read the whole of what its data-parallel group steps, 12
    bytes a parameter of host memory, and takes a shard of it.

    Args:
        models: as for `sharded_state`.
        step: number of finished steps.
        moments: read the moments; otherwise only the weights that the optimizer steps.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    saved = SavedTensors(folder)
    for part in _parts_with_moments(optimizer):
        _set_step(part, step)
        for parameter, main, first in _places(part, models):
            for kind, tensor in _tensors(part, main).items():
                if kind != "param" and not moments:
                    continue
                key = f"optimizer.state.{kind}.{parameter.key}"
                whole = torch.empty_like(parameter.data, device="meta")
                state = replace(parameter, key=key, data=whole)
                built = state.build() if isinstance(state, ShardedTensorFactory) else [state]
                blocks = [Block(x.key, x.global_offset, x.data) for x in nested_values(built)]
                saved.read_shard(tensor.view(-1), first, whole.shape, blocks)


def _parts_with_moments(optimizer: Any) -> list[Any]:
    """`_parts`; moments are zeros before the first step."""
    for part in (parts := _parts(optimizer)):
        part.init_state_fn(part.optimizer, part.config)
    return parts


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers in the chain that have parameters on this rank."""
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def _is_distributed(part: Any) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(part, DistributedOptimizer)


def _mains(part: Any) -> list[Tensor]:
    """The tensors that the inner optimizer updates: the parameters, or their fp32 copies."""
    return [main for group in part.optimizer.param_groups for main in group["params"]]


def _tensors(part: Any, main: Tensor) -> dict[str, Tensor]:
    state = part.optimizer.state[main]
    kinds = MUON if MUON[0] in state else MOMENTS
    return {"param": main} | {kind: state[kind] for kind in kinds}


def _places(part: Any, models: dict) -> list[tuple[Any, Tensor, int]]:
    """The parameter as the model's checkpoint has it, what the inner optimizer updates of it here,
    and the element of the parameter at which that begins; in the inner optimizer's order."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    saved = list(nested_values(extract_sharded_tensors_and_factories(models)[0]))
    if not _is_distributed(part):
        by_main = {id(getattr(s.data, "main_param", s.data)): s for s in saved}
        return [(by_main[id(main)], main, 0) for main in _mains(part)]
    by_parameter = {id(s.data): s for s in saved}
    groups = part.optimizer.param_groups
    return [
        (
            by_parameter[id(parameter)],
            groups[group]["params"][i],
            part._get_model_param_range_map(parameter)["param"].start,
        )
        for parameter, (group, i) in part.model_param_group_index_map.items()
    ]


def _step(part: Any) -> int:
    """Finished steps: torch's AdamW counts them per parameter, fused optimizers per group. Muon
    counts none and needs none: 0 where it steps all that is trained."""
    inner = part.optimizer
    return int(max(c.get("step", 0) for c in (*inner.state.values(), *inner.param_groups)))


def _set_step(part: Any, step: int) -> None:
    inner = part.optimizer
    if isinstance(inner, torch.optim.Adam):  # AdamW is one
        for main, entry in inner.state.items():
            device = main.device if inner.param_groups[0].get("fused") else None
            # a separate tensor each: incremented in place
            entry["step"] = torch.tensor(float(step), device=device)
    else:
        for group in inner.param_groups:
            group["step"] = step
