"""TransformerEngine: its packages, and what its attention and products in 8 bits demand."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from pyrl_ext.plan.model.attention import head_widths, heads_of, kv_heads
from pyrl_ext.plan.model.hardware import GPUS, gpu_of
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, choice, in_config, rule
from pyrl_ext.schedule.cp_sizes import cp_sizes

# megatron-core 0.19.2 asks for 2.14 at most; a later major version may move what it imports
OLDEST = (2, 14)
TOO_NEW = (3, 0)
MXFP8_TARGET = 100
HEAD_TILE = 8
WIDEST_HEAD = 256
INSTALL = (
    "CUDA_HOME=/usr/local/cuda pip install --no-build-isolation "
    "'transformer-engine[pytorch,core_cu13]==2.20.2' (make .venv/.te, in a checkout)"
)


def te_problems(plan: Plan) -> list[str]:
    """Why `plan` cannot run TransformerEngine's layers here."""
    if plan.model.backend != "te":
        return []
    problem = package_problem()
    return [f"model.backend: te, {problem}. Run: {INSTALL}"] if problem else []


def package_problem() -> str | None:
    """The package of transformer-engine that is missing or of a wrong version; imports none."""
    for name in ("transformer_engine", "transformer_engine_torch"):
        if find_spec(name) is None:
            return f"{name} is not installed, expected it"
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return "transformer_engine is installed without its version, expected a package of pip"
    if not OLDEST <= tuple(map(int, found.split(".")[:2])) < TOO_NEW:
        allowed = " to before ".join(".".join(map(str, each)) for each in (OLDEST, TOO_NEW))
        return f"transformer-engine {found}, expected {allowed}"
    spec = find_spec("transformer_engine")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not any((Path(each) / "pytorch" / "fp8.py").exists() for each in folders):
        return (
            f"transformer-engine {found} without transformer_engine.pytorch.fp8, expected it; "
            "megatron-core 0.19.2 imports it, and silently uses other layers where it cannot"
        )
    return None


@rule("model.backend")
def te_needs_a_gpu(plan: Plan) -> Found:
    if plan.model.backend == "te" and plan.device == "cpu":
        return "te with device cpu, expected device cuda; its kernels run on GPUs only. Use local"


@rule("model.backend")
def te_has_no_norms_over_all_heads(plan: Plan) -> Found:
    if plan.model.backend == "te" and plan.sizes.normalizes_all_heads:
        return (
            f"te with model.family {plan.model.family}, expected local; norms of queries and keys "
            "over all heads are built for local alone. Use local"
        )


@rule("model.te_attention")
def te_attention_is_transformer_engines(plan: Plan) -> Found:
    if plan.model.te_attention and plan.model.backend != "te":
        return (
            f"{plan.model.te_attention} with model.backend {plan.model.backend}, expected null; "
            "its kernels are transformer-engine's. Use backend: te"
        )


@rule("model.te_attention")
def te_attention_is_of_bfloat16(plan: Plan) -> Found:
    if plan.model.te_attention and plan.model.dtype != "bfloat16":
        return (
            f"{plan.model.te_attention} with model.dtype {plan.model.dtype}, expected bfloat16; "
            "its kernels for packed sequences take 16 bits only"
        )


@rule("model.te_attention")
def te_attention_has_a_kernel_for_the_heads(plan: Plan) -> Found:
    width = max(head_widths(plan.sizes))
    if plan.model.te_attention and (width % HEAD_TILE or width > WIDEST_HEAD):
        return (
            f"{plan.model.te_attention} with heads of {width} {in_config(plan)}, expected a "
            f"multiple of {HEAD_TILE}, at most {WIDEST_HEAD}; transformer-engine has no kernel for "
            "others. Use null"
        )


@rule("model.te_attention")
def a2a_splits_heads(plan: Plan) -> Found:
    parallel = plan.parallel
    if plan.model.te_attention != "a2a" or (most := parallel.dynamic_cp or parallel.cp) == 1:
        return None
    heads = heads_of(plan).number, kv_heads(plan, parallel.tp)
    sizes = [2, *cp_sizes(most, parallel.cp)]  # of odd heads it has no kernel at all
    if odd := [size for size in sizes if any(number % size for number in heads)]:
        return (
            f"a2a with {heads[0]} query and {heads[1]} key/value heads on a tensor-parallel rank, "
            f"expected multiples of {choice(sorted({*odd}))}; context-parallel ranks split heads. "
            "Use p2p, all_gather, or lower tp or cp"
        )


@rule("model.fp8")
def fp8_is_transformer_engines(plan: Plan) -> Found:
    if plan.model.fp8 and plan.model.backend != "te":
        return (
            f"{plan.model.fp8} with model.backend {plan.model.backend}, expected null; only "
            "transformer-engine has products in 8 bits. Use backend: te"
        )


@rule("model.fp8")
def the_gpu_has_fp8(plan: Plan) -> Found:
    gpu = gpu_of(plan)
    if plan.model.fp8 == "mxfp8" and gpu and gpu.target < MXFP8_TARGET:
        having = ", ".join(name for name, each in GPUS.items() if each.target >= MXFP8_TARGET)
        return (
            f"mxfp8 with hardware.gpu {plan.hardware.gpu}, expected {having}; only Blackwell "
            "scales blocks of 32. Use blockwise"
        )
    if plan.model.fp8 and gpu and "fp8" not in gpu.flops:
        having = ", ".join(name for name, each in GPUS.items() if "fp8" in each.flops)
        return (
            f"{plan.model.fp8} with hardware.gpu {plan.hardware.gpu}, expected one of {having}; it "
            "has no products in 8 bits. Use null"
        )


@rule("model.fp8")
def fp8_widths_are_multiples_of_16(plan: Plan) -> Found:
    sizes = plan.sizes
    tp = plan.parallel.tp
    parts = {f"{name} {width}": width for name, width in sizes.whole_widths.items()} | {
        f"{name} {width} / tp {tp}": width // tp for name, width in sizes.tp_widths.items()
    }
    width = sizes.moe_intermediate_size
    etp = plan.parallel.etp_size
    parts[f"moe_intermediate_size {width} / etp {etp}"] = width // etp
    if plan.model.fp8 and (odd := [name for name, part in parts.items() if part % 16]):
        return (
            f"{plan.model.fp8} with {', '.join(odd)} {in_config(plan)}, expected multiples of 16 "
            "on a rank; tensor cores multiply 8-bit matrices in tiles of 16. Lower tp, or use null"
        )


@rule("model.fp8")
def fp8_is_of_bfloat16(plan: Plan) -> Found:
    if plan.model.fp8 and plan.model.dtype != "bfloat16":
        return (
            f"{plan.model.fp8} with model.dtype {plan.model.dtype}, expected bfloat16; values "
            "between 8-bit products, and their sums, have 16 bits"
        )
