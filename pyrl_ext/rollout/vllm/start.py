"""Starts vLLM's engine in a process of the trainer, next to its process groups."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pyrl_ext.parallel.groups import group_name
from pyrl_ext.rollout.vllm import cpu
from pyrl_ext.rollout.vllm.first_rank import ask_first_rank_for_routes

if TYPE_CHECKING:
    from vllm import LLMEngine


def unwritten(given: dict[str, Any]) -> dict[str, str]:
    """Fields that vLLM needs and that transformers does not write, because its DeepSeek-V3 has
    only one kind of router."""
    needed = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    is_v3 = given["model_type"] == "deepseek_v3"
    return {name: value for name, value in needed.items() if is_v3 and name not in given}


def start(interpreted: bool, **arguments: Any) -> LLMEngine:
    """vLLM's engine in this process, with random weights.

    On a GPU, vLLM makes a CUDA stream and leaves it current in this thread. The trainer, which is
    built later, stays on it: see `need_stream`.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if cpu.installed():
        cpu.prepare(interpreted)
        if arguments["tensor_parallel_size"] > 1 and not dist.is_initialized():
            cpu.share_cores()
    if dist.is_initialized() and dist.get_world_size() > 1:  # ranks that are running already
        arguments["distributed_executor_backend"] = "external_launcher"
    random = torch.get_rng_state()  # vLLM seeds the whole process
    from vllm import EngineArgs, LLMEngine

    if cpu.installed():
        cpu.inspect_models_here()
    if interpreted:
        cpu.without_sampling_kernel()
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            load_format="dummy",
            logprobs_mode="processed_logprobs",
            worker_extension_cls="pyrl_ext.rollout.vllm.worker.WorkerExtension",
            **arguments,
        )
    )
    ask_first_rank_for_routes(engine)
    if arguments.get("distributed_executor_backend") and cpu.installed():
        cpu.remove_shared_memory()
    torch.set_rng_state(random)
    _keep_our_groups()
    return engine


@contextmanager
def world_of(ranks: int | None) -> Iterator[None]:
    """vLLM makes its groups of all ranks that torch has, which waits for all of them; within this,
    of the first ``ranks``, without the others, such as an encoder's, that have no engine."""
    size = dist.get_world_size
    make = dist.new_group
    if ranks is not None and dist.is_initialized():
        dist.get_world_size = lambda group=None: ranks if group is None else size(group)
        dist.new_group = partial(_new_group, make)
    try:
        yield
    finally:
        dist.get_world_size = size
        dist.new_group = make


_MADE = Counter[tuple[int, ...]]()
"""By ranks, the number of vLLM's groups that were made of them in this process."""


def _new_group(make: Callable[..., Any], ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """``make(ranks, ...)``, by its members alone.

    Its name counts the groups of these ranks, which all its members made. torch's own name would
    count all groups of a process (see `GroupMaker`), of which the ranks of the first stage of a
    pipeline, or of groups of dynamic context parallelism, have more than others: they would wait
    for each other under different names until the timeout.
    """
    members = tuple(ranks)
    _MADE[members] += 1
    name = f"pyrl-vllm-{_MADE[members]}-{'-'.join(map(str, members))}"
    with group_name(name):
        return make(list(members), *args, use_local_synchronization=True, **kwargs)


def _keep_our_groups() -> None:
    """When its engine ends in this process, vLLM 0.32 destroys every process group, the trainer's
    included; let it destroy its own only."""
    from vllm.distributed import destroy_model_parallel
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = destroy_model_parallel  # type: ignore
