"""vLLM's weights in 8 bits: the arguments that ask for them, and a check of every layer's type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.rollout.vllm import cpu

# vLLM 0.32 quantizes the routers of some families as well (`models/qwen3_moe.py` gives its gate the
# quantization of the model), and tokens would get other experts
ROUTERS = r".*gate$"
METHOD = "fp8_per_block"  # e4m3, and a float32 scale for each block of 128 x 128
MATRICES = ("weight", "w13_weight", "w2_weight")
SHOWN = 8
CPU_OUTPUTS = 32
"""vLLM's kernel for CPUs ends the process if a matrix has other outputs than a multiple of this."""


def quantizing(quantization: str | None) -> dict[str, Any]:
    """Arguments of vLLM's engine whose weights are quantized as `rollout.quantization` names it.

    Raises: ValueError for a processor on which vLLM has no kernel for them.
    """
    if quantization is None:
        return {}
    if cpu.installed() and "amx_tile" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        raise ValueError(
            f"rollout.quantization: {quantization} on a processor without AMX, expected one with "
            "it, or a GPU; vLLM for CPUs has no other kernels. Use null"
        )
    return {"quantization": METHOD, "quantization_config": {"ignore": [f"re:{ROUTERS}"]}}


def quantization_of(config: Any) -> str | None:
    """How vLLM of this config quantizes weights: "fp8" as `quantizing` asks for it, or its own name
    of another way; None: not at all."""
    held = config.quant_config
    if held is None:
        return None
    if held.get_name() != "online":
        return held.get_name()
    args = held.args
    ways = {str(args.linear), str(args.moe)} | {str(each) for each in (args.targets or {}).values()}
    return "fp8" if ways == {f"{METHOD}_static"} else " and ".join(sorted(ways))


def need_quantized(model: torch.nn.Module) -> None:
    """Check the type of every layer of an engine with quantized weights.

    Raises: ValueError naming layers in 8 bits that the plan keeps in 16, and the reverse.
    """
    wrong = [text for name, module in model.named_modules() for text in _wrong(name, module)]
    if wrong:
        more = f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(
            f"rollout.quantization: {len(wrong)} weights of the engine are not as the plan says:"
            "\n  " + "\n  ".join(wrong[:SHOWN]) + more
        )


def _wrong(name: str, module: torch.nn.Module) -> list[str]:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    found = list[str]()
    method = getattr(module, "quant_method", None)
    if method is None or isinstance(module, VocabParallelEmbedding):  # a norm, embedding or head
        return found
    if re.fullmatch(ROUTERS, name):
        # by the method: the one for CPUs may hold 8-bit values in float32
        if not isinstance(method, UnquantizedLinearMethod):
            found.append(f"{name}.weight is in 8 bits, by {type(method).__name__}, expected none")
        return found
    expected = current_platform.fp8_dtype()
    for key in MATRICES:
        weight = getattr(module, key, None)
        if not isinstance(weight, Tensor):
            continue
        if weight.dtype != expected:
            found.append(f"{name}.{key} is {str(weight.dtype)[6:]}, expected {str(expected)[6:]}")
        elif key == "weight" and cpu.installed() and len(weight) % CPU_OUTPUTS:
            found.append(
                f"{name}.{key} has {len(weight)} outputs, expected a multiple of {CPU_OUTPUTS}; "
                "vLLM's kernel for CPUs has no others"
            )
    return found
