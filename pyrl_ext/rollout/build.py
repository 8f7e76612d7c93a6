"""Builds the rollout engine of a rank, and its sampling parameters, from the plan."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from pyrl_ext.data.prompt_dataset import PromptDataset, image_reader
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.ops.tensors import dtype_of, on_gpu
from pyrl_ext.parallel.waiting import announced
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.adapters import applied_lora
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.process.client import IdleEngine, ProcessEngine
from pyrl_ext.samples import Sampling


def build_engine(
    plan: Plan, device: torch.device, rank: int = 0, *groups: dist.ProcessGroup | None
) -> Engine:
    """The engine of this rank: in this process, in a separate one, servers, or an idle stand-in.

    Args:
        groups: of all ranks, and a second one for the thread that sends weights
            (`syncs_weights_in_background`); None, or none: this process alone

    Raises: RuntimeError when there are fewer GPUs than the trainer's ranks and the engines need.
    """
    transport = plan.transport
    number = plan.engine_of_rank[rank]
    if transport == "servers":
        from pyrl_ext.rollout.remote.engine import build_servers_engine  # needs aiohttp

        return build_servers_engine(plan, device, *groups)
    if plan.rollout.engine == "recorded":  # takes no weights; an idle rank would wait for them
        return build_in_this_process(plan, device)
    if number is None:
        return IdleEngine(routes=bool(plan.router_layers), images=bool(plan.modules))
    if transport == "inprocess":
        what = f"the {plan.rollout.engine} engine to start in this process"
        with announced(what, signals_kill=True):
            return build_in_this_process(plan, device)
    return ProcessEngine(
        build_in_process,
        (plan,),
        transport=transport,
        bucket_bytes=plan.rollout.bucket_bytes,
        readers=plan.rollout.tp,
        device=device,
        log=Path(plan.run) / f"engine-{number}.log",
        environment=_devices(plan, number) if on_gpu(device) else None,
    )


def build_in_process(plan: Plan) -> Engine:
    """The engine, called in a separate process that sees the engine's GPUs only."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
    return build_in_this_process(plan, torch.device(plan.device))


def _devices(plan: Plan, number: int) -> dict[str, str]:
    """The GPUs of engine ``number``: those after the trainer's, or the GPU of its rank."""
    local, ranks = (int(os.environ.get(k, d)) for k, d in (("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    gpus = plan.rollout.gpus
    tp = plan.rollout.tp
    if gpus is None:
        return {"CUDA_VISIBLE_DEVICES": names[local]}
    if len(names) < ranks + gpus:
        raise RuntimeError(
            f"rollout.gpus: {gpus} in addition to the trainer's {ranks}, expected {ranks + gpus} "
            f"GPUs on this machine; there are {len(names)}"
        )
    first = ranks + number * tp
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + tp])}


def build_in_this_process(plan: Plan, device: torch.device) -> Engine:
    """The engine that ``rollout.engine`` names, in this process."""
    if plan.rollout.engine == "hf":
        from pyrl_ext.rollout.hf.engine import HFEngine

        return HFEngine(
            plan.hf,
            dtype=dtype_of(plan.rollout_dtype),
            device=device,
            max_num_seqs=plan.max_num_seqs,
            tokenizer=load_tokenizer(folder) if (folder := _stops_with(plan)) else None,
            scale=reader.scale if (reader := image_reader(plan)) else None,
            lora=applied_lora(plan),
        )
    if plan.rollout.engine == "recorded":
        from pyrl_ext.rollout.recorded import RecordedEngine

        assert plan.recorded_path is not None  # a rule says so
        return RecordedEngine(plan.recorded_path, whole=not plan.drops_samples)
    if plan.rollout.engine == "vllm":
        return _vllm(plan)
    raise NotImplementedError(
        f"rollout.engine: {plan.rollout.engine!r}, expected hf, recorded or vllm"
    )


def _stops_with(plan: Plan) -> str | None:
    """Folder of the tokenizer, if the engine looks for stop strings."""
    return plan.tokenizer_path if plan.rollout.stop else None


def _vllm(plan: Plan) -> Engine:
    from pyrl_ext.rollout.vllm.engine import VLLMEngine

    reader = image_reader(plan)
    return VLLMEngine(
        Path(plan.config_path).parent,
        num_experts=plan.sizes.num_experts,
        layer_ids=plan.router_layers,
        dtype=plan.rollout_dtype,
        tp=plan.rollout.tp,
        ranks=plan.parallel.world_size if plan.modules else None,
        max_tokens=plan.longest + 1,
        max_num_seqs=plan.max_num_seqs,
        gpu_memory_utilization=plan.rollout.gpu_memory_utilization,
        sampling_mask=plan.trains_on_sampling_mask,
        draft_layers=plan.draft_layers,
        quantization=plan.rollout.quantization,
        sleeps=plan.engine_sleeps,
        tokenizer=plan.tokenizer_path if reader else _stops_with(plan),
        scale=reader.scale if reader else None,
        lora=applied_lora(plan),
        options=plan.rollout.engine_options,
    )


def sampling_of(plan: Plan, source: PromptDataset, step: int) -> Sampling:
    """Sampling parameters of ``step``; each step has separate random streams."""
    options = plan.rollout
    return Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        stop_ids=source.stop_ids,
        stop=tuple(options.stop),
        samples_per_prompt=plan.batching.samples_per_prompt,
        seed=plan.seed * 1_000_003 + step,
        sampling_mask=plan.trains_on_sampling_mask,
        step=step,
    )
