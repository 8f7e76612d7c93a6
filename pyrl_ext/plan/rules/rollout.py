"""The engine: what it reads, and which GPUs it runs on."""

from __future__ import annotations

import os

from pyrl_ext.plan.forecast.engine_memory import BLOCK
from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.model.attention import head_widths
from pyrl_ext.plan.model.hardware import GPUS, gpu_of
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import (
    Found,
    changed,
    in_config,
    indivisible,
    relative,
    rule,
    unfit_for_heads,
)

# Key of the section -> the engines that read it; all others are read by every engine, have a
# separate rule, or may stay when rollouts are played again.
READERS = {
    **dict.fromkeys(("tp", "gpus", "gpu_memory_utilization", "engine_options"), ("vllm",)),
    **dict.fromkeys(("speculation", "quantization"), ("vllm",)),
    **dict.fromkeys(("sleep", "offload_trainer", "dtype", "transport"), ("hf", "vllm")),
    **dict.fromkeys(("stop", "oversample", "record", "check_tensors"), ("hf", "vllm")),
    "max_mismatch": ("hf", "vllm"),
}
# vLLM pads the vocabulary to a multiple of this before it splits it.
VOCABULARY_UNIT = 64


@rule("rollout.path")
def recorded_samples_exist(plan: Plan) -> Found:
    engine = plan.rollout.engine
    path = plan.recorded_path
    if engine == "recorded" and path is None:
        return "null with engine recorded, expected the recorded samples"
    if engine != "recorded" and path is not None:
        return f"{plan.rollout.path!r} with engine {engine}, expected null; it would not be read"
    if path is not None and not os.path.exists(path):
        return f"{relative(path)} does not exist, expected the recorded samples"


@rule("rollout")
def the_engine_reads_what_is_set(plan: Plan) -> Found:
    rollout = plan.rollout
    for name, readers in READERS.items():
        if rollout.engine not in readers and changed(rollout, name):
            yield (
                name,
                f"{show(getattr(rollout, name))} with engine {rollout.engine}, expected it left "
                f"out; only {' and '.join(readers)} would read it",
            )


@rule("rollout.engine")
def the_engine_runs_the_family(plan: Plan) -> Found:
    if plan.rollout.engine == "vllm" and plan.model.family == "kimi_k25":
        return (
            "vllm with model.family kimi_k25, expected hf; vLLM 0.32 for CPUs exits at startup "
            "with this family, and reads an image processor of another format than transformers"
        )


@rule("rollout.speculation")
def the_engine_can_draft(plan: Plan) -> Found:
    rollout = plan.rollout
    if rollout.speculation is None or rollout.engine != "vllm":
        return None
    if not plan.model.mtp:
        return (
            "mtp with model.mtp false, expected true; the engine drafts with the layers that the "
            "trainer trains"
        )
    if "speculative_config" in rollout.engine_options:
        return "mtp with rollout.engine_options.speculative_config, expected one of them"
    if plan.trains_on_sampling_mask:
        return (
            "mtp with the tokens that top-p and top-k kept, expected null; vLLM's worker for CPUs "
            "does not report them for drafted tokens. Use rollout.speculation: null"
        )
    if plan.lora_publish == "adapter":
        return "mtp with adapters in the engine, expected null. Use lora.publish: merge"
    if plan.sizes.state_mixer is not None:
        return (
            f"mtp with model.family {plan.model.family}, expected null; vLLM 0.32 for CPUs does "
            "not start with its MTP layers, so that their samples were never compared"
        )


@rule("rollout.quantization")
def the_engine_can_quantize(plan: Plan) -> Found:
    way = plan.rollout.quantization
    if way is None or plan.rollout.engine != "vllm":
        return None
    if plan.rollout_dtype != "bfloat16":
        return (
            f"{way} with rollout.dtype {plan.rollout_dtype}, expected bfloat16; vLLM multiplies "
            "quantized weights by 16-bit or 8-bit values. Use rollout.dtype: bfloat16"
        )
    family = f"model.family {plan.model.family}"
    unproved = {
        f"{family}, which has a vision tower": plan.sizes.vision is not None,
        f"{family}, whose layers carry states": plan.sizes.state_mixer is not None,
        "adapters in the engine, which add to its weights": plan.lora_publish == "adapter",
    }
    if parts := [part for part, holds in unproved.items() if holds]:
        return f"{way} with {parts[0]}, expected null; their samples were never compared"
    sizes = plan.sizes
    heads = sizes.num_attention_heads * head_widths(sizes)[1]
    wholes = {"num_attention_heads * width of a value": heads}
    if len(sizes.router_layers) < sizes.num_hidden_layers:
        wholes["intermediate_size"] = sizes.intermediate_size
    if sizes.shared_expert_width:
        wholes["width of shared experts"] = sizes.shared_expert_width
    tp = plan.rollout.tp
    odd = [f"{name} {whole}" for name, whole in wholes.items() if whole % (BLOCK * tp)]
    if odd and plan.device == "cuda":
        return (
            f"{way} with rollout.tp {tp} and {', '.join(odd)} {in_config(plan)}, expected "
            f"multiples of {BLOCK} on a GPU; vLLM quantizes activations in groups of so many. "
            "Lower rollout.tp, or use null"
        )
    gpu = gpu_of(plan)
    if gpu and "fp8" not in gpu.flops:
        having = ", ".join(name for name, each in GPUS.items() if "fp8" in each.flops)
        return (
            f"{way} with hardware.gpu {plan.hardware.gpu}, expected one of {having}; it has no "
            "products in 8 bits. Use null"
        )


@rule("rollout.gpus")
def own_gpus_are_not_shared_and_have_an_owner(plan: Plan) -> Found:
    rollout = plan.rollout
    ranks = plan.parallel.world_size
    if rollout.gpus is None or rollout.engine != "vllm":
        return
    if rollout.sleep and "sleep" in rollout.model_fields_set:
        yield (
            f"{rollout.gpus} with rollout.sleep true, expected null; only an engine that shares "
            "the trainer's GPUs makes room for it. Remove one"
        )
    if rollout.offload_trainer != "none":
        yield (
            f"{rollout.gpus} with rollout.offload_trainer {rollout.offload_trainer}, expected "
            "null; only a trainer that shares its GPUs makes room for the engine. Remove one"
        )
    if plan.device == "cpu":
        yield f"{rollout.gpus} with device cpu, expected null; there are none"
    elif rollout.gpus % rollout.tp == 0 and rollout.gpus // rollout.tp > ranks:
        yield (
            f"{rollout.gpus} with rollout.tp {rollout.tp} are {rollout.gpus // rollout.tp} "
            f"engines, expected at most {ranks}, one for each of the language model's ranks. Use "
            "a larger rollout.tp"
        )


@rule("rollout.transport")
def weights_can_reach_the_engine(plan: Plan) -> Found:
    rollout = plan.rollout
    shared = plan.rollout.gpus is None
    way = rollout.transport
    on_cpu = plan.device == "cpu"
    if rollout.engine == "recorded" or plan.remote_engines:
        return None
    if way == "inprocess" and not shared:
        return (
            f"inprocess with rollout.gpus {rollout.gpus}, expected broadcast; an engine on "
            "separate GPUs runs in a separate process"
        )
    if way == "shm" and not on_cpu:
        return "shm with device cuda, expected another; weights would go through host memory"
    if way == "ipc" and (on_cpu or not shared or rollout.tp > 1):
        there = "device cpu" if on_cpu else f"rollout.gpus {show(rollout.gpus)}"
        there = there if on_cpu or not shared else f"rollout.tp {rollout.tp}"
        return (
            f"ipc with {there}, expected one GPU that the trainer's rank and the whole engine share"
        )
    if way == "broadcast" and shared and not on_cpu:
        return (
            "broadcast with rollout.gpus null, expected inprocess or ipc; NCCL refuses two "
            "processes on one GPU"
        )


@rule("rollout.offload_trainer")
def the_trainer_has_a_device_to_leave(plan: Plan) -> Found:
    moves = plan.rollout.offload_trainer
    if moves != "none" and plan.device == "cpu" and plan.rollout.engine != "recorded":
        return f"{moves} with device cpu, expected none; the trainer is in host memory already"


@rule("rollout.tp")
def the_model_splits_over_an_engine(plan: Plan) -> Found:
    sizes = plan.sizes
    rollout = plan.rollout
    vocabulary = -(-sizes.vocab_size // VOCABULARY_UNIT) * VOCABULARY_UNIT
    wholes = {
        "num_attention_heads": sizes.num_attention_heads,
        "intermediate_size": sizes.intermediate_size,
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "vocab_size as vLLM pads it": vocabulary,
        **(sizes.state_mixer.heads if sizes.state_mixer else {}),
    }
    if rollout.engine_options.get("enable_expert_parallel"):
        del wholes["moe_intermediate_size"]
        wholes[sizes.key("num_experts")] = sizes.num_experts
    if rollout.engine == "vllm":
        why = "vLLM splits each of them evenly over an engine's GPUs"
        heads = unfit_for_heads(plan, rollout.tp, "vLLM keeps a key/value head whole on a GPU")
        return filter(None, (indivisible(rollout.tp, wholes, why, in_config(plan)), heads))


@rule("rollout.tp")
def engines_fill_their_gpus(plan: Plan) -> Found:
    rollout = plan.rollout
    node = plan.hardware.gpus_per_node
    if rollout.engine != "vllm":
        return None
    wholes = {"rollout.gpus": rollout.gpus or 0}
    if plan.remote_engines:
        wholes = {"rollout.launch.gpus": rollout.launch.gpus if rollout.launch.hosts else node}
    elif rollout.gpus is None:
        wholes = {"the language model's ranks": plan.parallel.world_size}
    if max(wholes.values()) > node:
        wholes["hardware.gpus_per_node"] = node
    return indivisible(rollout.tp, wholes, "an engine has tp GPUs of one node, and none is idle")
