"""Starts vLLM's engine in a process of the trainer, next to its process groups."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pyrl_ext.parallel.groups import group_name
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.rollout.vllm import cpu

if TYPE_CHECKING:
    from vllm import LLMEngine


def unwritten(given: dict[str, Any]) -> dict[str, Any]:
    """Fields that vLLM needs and that transformers does not write, because its DeepSeek-V3 and its
    MiniMax-M2 have only one kind of router, and the latter one name for what is rotated."""
    needed: dict[str, Any] = {}
    if given["model_type"] == "deepseek_v3":
        needed = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    elif given["model_type"] == "minimax_m2":
        rotated = read_sizes(given).rotary_width
        needed = {"use_routing_bias": True, "scoring_func": "sigmoid", "rotary_dim": rotated}
    return {name: value for name, value in needed.items() if name not in given}


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
def world_of(ranks: int | None) -> Generator[None]:
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


def ask_first_rank_for_routes(engine: LLMEngine) -> None:
    """Let the scheduler of every other rank of the tensor parallel group ask for no routes.

    With `external_launcher` each of these ranks has a scheduler and a worker. All workers capture
    routes, since that takes collectives, but only the one of the first rank keeps and returns them
    (vllm 0.32, `AuxOutputWorkerConnector.__init__`: "only the executor output rank owns the
    auxiliary output data plane"). Every scheduler asserts that its worker returned some
    (`AuxOutputSchedulerConnector.take_output`), so the other ranks would fail at the first sampled
    token, while the first one waits for them in the next all-reduce. No argument of vLLM's differs
    between ranks there, and a scheduler without a connector schedules the same requests.

    Samples of the other ranks have no routes; `distribute.part_of` gives the samples of an engine
    to its first rank.
    """
    if not _returns_outputs(engine):
        core: Any = engine.engine_core
        core.engine_core.scheduler.aux_output_connector = None


def reports_routes(engine: LLMEngine) -> bool:
    """True if vLLM reports the routes of this engine's samples on this rank."""
    return engine.vllm_config.aux_output_config.enabled and _returns_outputs(engine)


def _returns_outputs(engine: LLMEngine) -> bool:
    """True if this process has the outputs of the first rank of the tensor parallel group."""
    from vllm.distributed import get_tp_group

    backend = engine.vllm_config.parallel_config.distributed_executor_backend
    return backend != "external_launcher" or get_tp_group().is_first_rank
