"""TransformerEngine's Python modules on CPU tensors, with torch formulas in place of its kernels.

    python -m pytest -p tests.te.formulas tests/te

TransformerEngine is three packages: Python modules (``transformer_engine``), a library of kernels
(``transformer_engine_cu13``) and a C++ binding (``transformer_engine_torch``). Only the first is
installed. `install` puts a module in the binding's place whose functions are the formulas of the
kernels that a bfloat16 or float32 decoder layer calls. All else, the modules with their parameters,
autograd functions, collectives and checkpoint code, and megatron's wrappers around them, is the
installed code.

It proves names, shapes, layouts, wiring, collectives and gradients. It proves no kernel, no overlap
of communication, no memory and no speed. A function without a formula raises by its name.

As a pytest plugin it is installed before megatron-core is imported, here and in the processes that
ranks are forked from.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

import torch
from torch import Tensor

from tests.te import attention_formulas

NAME = "transformer_engine_torch"

# values as in transformer_engine.h of 2.20.2; only equality and names are used here
ENUMS = {
    "DType": "kByte=0 kInt32=2 kFloat32=4 kFloat16=5 kBFloat16=6 kFloat8E4M3=7 kFloat8E5M2=8 "
    "kFloat4E2M1=10",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD "
    "NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD NVTE_QKV_Format_NOT_SET",
    "NVTE_Fused_Attn_Backend": "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
    "NVTEScalingMode": "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P "
    "EXTERNAL_BULK_OVERLAP_AG",
}
CLASSES = (
    "CommOverlapHelper CommOverlap CommOverlapP2P CommOverlapCore CommOverlapBase FP8TensorMeta"
)

# modules of transformer_engine.pytorch
WRITES_CUDA_LITERALLY = (
    "optimizers.fused_adam", "module.base", "module.grouped_linear", "cpp_extensions.gemm",
    "module.fp8_padding", "module.fp8_unpadding",
    "quantization", "utils", "distributed",
)  # fmt: skip
# and those that take 16 bits on a GPU alone
ATTENTION = ("backends", "dot_product_attention", "utils")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like")


# formulas ----------------------------------------------------------------------------------------


def generic_gemm(A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in,
                 grad, workspace, workspace_size, accumulate, use_split_accumulator,
                 comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False,
                 alpha=1.0, beta=None):  # fmt: skip
    """D = op(B) op(A), row by row: y = x W^T (TN), dx = dy W (NN), dW = dy^T x (NT)."""
    _plain(quantizer=quantizer, gelu=gelu or None, comm_overlap=comm_overlap)
    a = A.flatten(0, -2)
    b = B.flatten(0, -2)
    a = a.T if transA else a
    b = b.T if transB else b
    wide = torch.promote_types(B.dtype, torch.float32)  # products are summed in 32 bits
    out = alpha * (b.to(wide) @ a.to(wide))
    bias_grad = None
    if bias is not None and not grad:
        out = out + bias
    elif bias is not None:
        bias_grad = B.flatten(0, -2).sum(0).to(bias.dtype)
    kind = None if output_dtype is None else _torch_dtype(output_dtype)
    out = out.to(kind or B.dtype)
    if not transB:
        out = out.unflatten(0, B.shape[:-1])
    if D is None:
        return out, bias_grad, None, None
    D.copy_(D + out.view_as(D) if accumulate else out.view_as(D))
    return D, bias_grad, None, None


def te_general_grouped_gemm(A, transa, B, transb, D, D_type, m_splits, bias, bias_type,
                            single_output, pre_gelu_out, grad, workspace, workspace_size,
                            accumulate, use_split_accumulator, math_sm_count):  # fmt: skip
    """One product a group; with ``single_output`` they are the rows of D[0], one after another."""
    parts = D[0].split([int(m) for m in m_splits]) if single_output else D
    for i, (a, b, d) in enumerate(zip(A, B, parts, strict=True)):
        if not isinstance(a, Tensor):  # quantized by a reference recipe, in Python
            _reference_gemm(a, transa, b, transb, d, accumulate)
            continue
        offset = bias[i] if not grad and bias and bias[i].numel() else None
        if grad and bias and bias[i].numel():
            bias[i].copy_(b.sum(0))
        generic_gemm(a, transa, b, transb, d, None, None, offset, None, False, None, False, None, 0,
                     accumulate, use_split_accumulator)  # fmt: skip
    return bias


def _reference_gemm(a, transa, b, transb, d, accumulate):
    from transformer_engine.pytorch.custom_recipes.gemm import custom_gemm

    layout = ("T" if transa else "N") + ("T" if transb else "N")
    found, *_ = custom_gemm(a, b, None, torch.bfloat16, layout=layout, grad=layout != "TN")
    d.copy_(d + found if accumulate else found)


def fused_multi_row_padding(rows, out, splits, padded):
    for part, into in zip(rows.split(list(splits)), out.split(list(padded)), strict=True):
        into.zero_()
        into[: len(part)] = part


def fused_multi_row_unpadding(rows, out, padded, splits):
    for part, into in zip(rows.split(list(padded)), out.split(list(splits)), strict=True):
        into.copy_(part[: len(into)])


def rmsnorm_fwd(x, weight, eps, out, quantizer, otype, sm_margin, zero_centered_gamma):
    _plain(quantizer=quantizer)
    wide = x.float() if x.dtype != torch.float64 else x
    inverse = (wide.square().mean(-1) + eps).rsqrt()
    gamma = weight.to(wide.dtype) + int(zero_centered_gamma)
    y = (wide * inverse[:, None] * gamma).to(_torch_dtype(otype))
    return (y if out is None else out.copy_(y)), None, inverse


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    wide = torch.promote_types(x.dtype, torch.float32)
    dz = dz.to(wide)
    values = x.to(wide)
    scale = gamma.to(wide) + int(zero_centered_gamma)
    normal = values * rsigma[:, None]
    inner = dz * scale
    dx = rsigma[:, None] * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz * normal).sum(0).to(gamma.dtype)


def multi_tensor_scale(chunk, noop, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk, noop, lists, scale):
    multi_tensor_scale(chunk, noop, lists, scale)


def multi_tensor_l2norm(chunk, noop, lists, per_tensor=False):
    each = torch.stack([t.float().norm() for t in lists[0]])
    return each.norm()[None], each if per_tensor else each.new_empty(0)


def multi_tensor_adam(
    chunk, noop, lists, lr, beta1, beta2, eps, step, mode, bias_correction, decay
):
    """Lists: gradients, parameters, first and second moments (and fp32 masters); mode 1: AdamW."""
    correct1, correct2 = (1 - b**step if bias_correction else 1.0 for b in (beta1, beta2))
    for grad, param, first, second, *master in zip(*lists, strict=True):
        main = master[0] if master else param
        g = grad.float() + (0 if mode else decay * main.float())
        first.mul_(beta1).add_(g, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (first / correct1) / ((second / correct2).sqrt() + eps)
        main.sub_(lr * (update + (decay * main if mode else 0)))
        if master:
            param.copy_(main)


def get_cudnn_version():
    return 92000


def get_num_cublas_streams():
    return 1


FORMULAS = (
    generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, multi_tensor_scale,
    multi_tensor_scale_tensor, multi_tensor_l2norm, multi_tensor_adam, get_cudnn_version,
    get_num_cublas_streams, fused_multi_row_padding, fused_multi_row_unpadding,
)  # fmt: skip


def _plain(**features: Any) -> None:
    if used := [name for name, value in features.items() if value is not None]:
        raise NotImplementedError(
            f"tests.te.formulas: {', '.join(used)} given, which needs the kernels"
        )


def _torch_dtype(kind: Any) -> torch.dtype:
    if isinstance(kind, torch.dtype):
        return kind
    names = {0: "uint8", 2: "int32", 4: "float32", 5: "float16", 6: "bfloat16"}
    return getattr(torch, names[int(kind)])


# the module --------------------------------------------------------------------------------------


class _Binding(types.ModuleType):
    """A kernel without a formula is a function that says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(
                f"tests.te.formulas: {name} has no formula here, it needs a GPU"
            )

        setattr(self, name, kernel)
        return kernel


def _binding() -> types.ModuleType:
    module = _Binding(NAME)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    for name, members in ENUMS.items():
        pairs = [m.split("=") for m in members.split()]
        values = {pair[0]: int(pair[1]) if len(pair) > 1 else i for i, pair in enumerate(pairs)}
        setattr(module, name, enum.IntEnum(name, values))
    layouts = (
        "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD "
        "NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D "
        "NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD "
        "NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD "
        "NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD "
        "NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD "
        "NVTE_QKV_Layout_NOT_SET"
    )
    module.NVTE_QKV_Layout = enum.IntEnum("NVTE_QKV_Layout", layouts.split(), start=0)
    for name in CLASSES.split():
        setattr(module, name, type(name, (), {}))
    for function in FORMULAS + attention_formulas.FORMULAS:
        setattr(module, function.__name__, function)
    return module


def install() -> None:
    """Make `transformer_engine.pytorch` importable, with the formulas above for its kernels."""
    if NAME in sys.modules:
        raise RuntimeError(f"tests.te.formulas: {NAME} is imported already")
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # a C++ compiler for a few additions
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # or it wants its library of kernels
    from transformer_engine import common

    del os.environ["NVTE_PROJECT_BUILDING"]
    sys.modules[NAME] = _binding()
    common.load_framework_extension = lambda framework: None
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=1, name="cpu")
    cuda.get_device_properties = lambda *_: properties
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    te: Any = importlib.import_module("transformer_engine.pytorch")
    # it imported the names that the binding has, none of those that are made when asked for
    te.cpp_extensions.__getattr__ = sys.modules[NAME].__getattr__
    _build_without_cuda()
    _attend_without_cuda()


def _attend_without_cuda() -> None:
    """Core attention asks its inputs whether they are on a GPU, and are of 16 bits; for the
    formulas, tensors on a CPU are, and float32 counts as float16. Its choice of a kernel, which
    asks the same, is as on a GPU."""
    package = "transformer_engine.pytorch.attention.dot_product_attention"
    for name in ATTENTION:
        importlib.import_module(f"{package}.{name}").torch = _TorchOfWideHalves()
    attention: Any = importlib.import_module(f"{package}.dot_product_attention")
    tensor = torch.Tensor
    forward = attention.DotProductAttention.forward

    def attend(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment]
        try:
            return forward(self, *args, **kwargs)
        finally:
            del tensor.is_cuda  # type: ignore[misc]

    attention.DotProductAttention.forward = attend
    ring: Any = importlib.import_module(f"{package}.context_parallel")
    communicate = ring.flash_attn_p2p_communicate
    ring.flash_attn_p2p_communicate = lambda *given: [_Once(each) for each in communicate(*given)]


class _Once:
    """A request that may be waited for again, as NCCL's: gloo's would wait for another message."""

    def __init__(self, request: Any):
        self.request = request

    def wait(self) -> None:
        if self.request is not None:
            self.request.wait()
            self.request = None


def _build_without_cuda() -> None:
    """A module refuses to be built where torch sees no GPU, on the meta device too."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    build = TransformerEngineBaseModule.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        cuda: Any = torch.cuda
        honest, cuda.is_available = cuda.is_available, lambda: True
        try:
            build(self, *args, **kwargs)
        finally:
            cuda.is_available = honest

    def prepare(self: Any, inp: Tensor, num_gemms: int = 1, allow_non_contiguous: bool = False,
                allow_different_data_and_param_types: bool = False) -> Tensor:  # fmt: skip
        """`prepare_forward` without FP8: its only complaint is of the input's device."""
        same = allow_different_data_and_param_types
        self.fast_setattr("allow_different_data_and_param_types", same)
        self.fast_setattr("forwarded_at_least_once", True)
        if self.tp_size > 1 and not self.tp_group_initialized:
            raise RuntimeError("tests.te.formulas: set_tensor_parallel_group was not called")
        self.set_activation_dtype(inp)
        self.init_fp8_metadata(num_gemms=num_gemms)
        if self.fp8 and not self.fp8_meta["recipe"].custom():  # of which quantizers are in Python
            _plain(fp8=True)
        return inp if allow_non_contiguous else inp.contiguous()

    TransformerEngineBaseModule.__init__ = init
    TransformerEngineBaseModule.prepare_forward = prepare
    TransformerEngineBaseModule.end_forward = lambda self: None
    distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in WRITES_CUDA_LITERALLY:
        importlib.import_module(f"transformer_engine.pytorch.{name}").torch = _TorchWithoutCuda()


class _TorchWithWideProducts:
    """``torch`` with products of 8-bit matrices in 32 bits: its own on a CPU are a plain loop."""

    def __getattr__(self, name: str) -> Any:
        return _scaled_product if name == "_scaled_mm" else getattr(torch, name)


def _scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **options: Any
) -> Tensor:
    _plain(bias=options.get("bias"))
    return ((a.float() @ b.float()) * (scale_a * scale_b)).to(out_dtype)


class _TorchWithoutCuda:
    """``torch`` as seen by a module that writes ``device="cuda"``."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in _FACTORIES:
            return value

        def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            named = device if isinstance(device, str) else getattr(device, "type", None)
            return value(*args, device="cpu" if named == "cuda" else device, **kwargs)

        return make


class _TorchOfWideHalves(_TorchWithoutCuda):
    """``torch``, whose float16 is float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float32 if name == "float16" else super().__getattr__(name)


install()

from pyrl_ext.plan.rules import RULES  # noqa: E402
from tests.helpers import ranks  # noqa: E402

# kernels need a GPU, formulas do not
ON_A_GPU = ("te_needs_a_gpu", "te_attention_is_of_bfloat16")
RULES[:] = [(key, rule) for key, rule in RULES if rule.__name__ not in ON_A_GPU]
ranks.PRELOAD.insert(0, __name__)


def _quantize_in_python() -> None:
    """Products in 8 bits by TransformerEngine's reference quantizers, which are torch's operations.
    It has them for one recipe of the plan, a scale for each tensor."""
    from pyrl_ext.megatron import config

    plain = config.te_fields
    factory = (
        "transformer_engine.pytorch.custom_recipes.reference_current_scaling."
        "current_scaling_ref_factory"
    )

    def te_fields(plan: Any) -> dict[str, Any]:
        found = plain(plan)
        if recipe := found.get("fp8_recipe"):
            _plain(**{"fp8": None if recipe == "tensorwise" else recipe})
            found |= {"fp8_recipe": "custom", "fp8_quantizer_factory": factory}
            # a weight that they quantized cannot be saved for two microbatches' backward passes
            found["disable_parameter_transpose_cache"] = plan.parallel.pp > 1
        return found

    config.te_fields = te_fields
    module = "transformer_engine.pytorch.custom_recipes.reference_current_scaling"
    reference: Any = importlib.import_module(module)
    reference.torch = _TorchWithWideProducts()


_quantize_in_python()
