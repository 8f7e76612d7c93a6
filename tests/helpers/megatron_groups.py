"""Megatron's parallel state, made again and again in one process."""

import gc

import torch.distributed as dist
from megatron.core import parallel_state


def destroy_groups() -> None:
    """End all process groups but the world's.

    megatron-core's ``destroy_model_parallel`` only forgets them: the threads of some 30 groups of
    gloo stay, and with a thousand of them a process needs ten times as long.
    """
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
