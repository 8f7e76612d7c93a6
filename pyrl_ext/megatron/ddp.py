"""megatron-core's DistributedDataParallel: wrap chunks, reach their gradient buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.suppress_warnings import quiet
from pyrl_ext.plan import Plan


def wrap_ddp(
    plan: Plan, chunks: Sequence[Module], groups: Any, overlap: bool = True
) -> list[Module]:
    """megatron's DistributedDataParallel around each chunk: gradients in fp32 buffers.

    Args:
        overlap: gradients may be reduced while others are computed, if the plan says so.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.utils import get_model_config

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=plan.optimizer.overlap_grad_reduce and overlap,
        use_distributed_optimizer=plan.optimizer.distributed,
        check_for_nan_in_grad=False,  # the optimizer's gradient norm shows it once for all ranks
    )
    with quiet():
        wrapped: list[Any] = [
            DistributedDataParallel(
                config=get_model_config(chunk),
                ddp_config=ddp,
                module=chunk,
                disable_bucketing=i > 0,
                pg_collection=groups,
            )
            for i, chunk in enumerate(chunks)
        ]
    for chunk in wrapped:
        _add_weight_gradients(chunk)
    if ddp.overlap_grad_reduce:  # only the last microbatch's backward passes may reduce
        pauses = [chunk.no_sync for chunk in wrapped]
        get_model_config(chunks[0]).no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return wrapped


class _IntoMainGrad:
    """In place of ``fused_weight_gradient_mlp_cuda``, the extension of Apex that megatron's linears
    call: else each product's gradient is written, read again, and added to the buffer in fp32."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        if rows.dtype == main_grad.dtype:
            main_grad.addmm_(grad.t(), rows)
        elif on_gpu(rows):
            torch.addmm(main_grad, grad.t(), rows, out_dtype=main_grad.dtype, out=main_grad)
        else:
            main_grad.add_(grad.t().mm(rows))


def _add_weight_gradients(chunk: Module) -> None:
    """Let the linears of a wrapped chunk add their weights' gradients to its buffers themselves."""
    from megatron.core.tensor_parallel import layers

    from pyrl_ext.megatron.local_layers import ReplicatedLinear

    layers.fused_weight_gradient_mlp_cuda = _IntoMainGrad  # type: ignore[attr-defined]
    ours = layers.ColumnParallelLinear, layers.RowParallelLinear, ReplicatedLinear
    for module in chunk.modules():
        if isinstance(module, ours):
            module.gradient_accumulation_fusion = True


def release(chunks: Sequence[Any]) -> None:
    """Break the reference cycles of DDP-wrapped chunks.

    The cycles pass through autograd nodes, which the garbage collector cannot see, and token
    dispatchers keep the graph of their last microbatch. Without this, a process that builds several
    models would keep all of them and their process groups.
    """
    for chunk in chunks:
        chunk.grad_accs.clear()
        for module in chunk.modules():
            if (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
                dispatcher.probs = None


def unwrap(module: Module) -> Module:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while isinstance(inner := getattr(module, "module", None), Module):
        module = inner
    return module


def buffers(chunks: Sequence[Any]) -> list[Any]:
    """The gradient buffers of each chunk: first without, then with expert parameters."""
    return [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def gather_shards(chunks: Sequence[Any]) -> None:
    """Complete the gradient buffers; the distributed optimizer reduced only this rank's shard.

    Communicates: all-gather of the gradients over the ranks that share them.
    """
    for buffer in buffers(chunks):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            mine = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
