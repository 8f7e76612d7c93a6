"""One decoder layer forward and backward: milliseconds, launches, bytes and their floor.

``python -m benchmarks.run layer [--device cpu|cuda]``. Launches and bytes are counted as torch
dispatches them (`benchmarks.launches`): a kernel's inputs and outputs, each once. The floor is what
operators that cannot be merged must move: products, attention, and one pass for what lies between
two of them. On a GPU also the kernels that the profiler saw.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.configs import TINY, hf_config, write_config
from benchmarks.end_to_end import batch_of, microbatch
from benchmarks.launches import Launches, as_one
from benchmarks.measure import call_seconds
from benchmarks.tables import show
from pyrl_ext.megatron import grouped_experts
from pyrl_ext.megatron.ddp import unwrap
from pyrl_ext.megatron.packed_attention import PackedAttention, PackedSequences
from pyrl_ext.parallel import topology
from pyrl_ext.plan import compile_plan
from pyrl_ext.trainer.policy import Policy

TWO_LAYERS = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "vocab_size": 512}
TWO_LAYERS |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
# title: config, tokens and experts on a CPU, on a GPU
CASES = {
    "latent attention, tiny": ("tiny", (512, 8), (8192, 8)),
    "grouped queries, tiny": ("tiny_qwen3", (512, 8), (8192, 8)),
    "GLM-4.7-Flash's widths": ("glm47", (512, 8), (16384, 64)),
}


@dataclass(frozen=True)
class OneLayer:
    """A layer with experts, its input [T, 1, H] and a gradient of its output."""

    layer: Any
    arguments: dict[str, Any]
    hidden: Tensor
    gradient: Tensor

    def forward(self) -> Tensor:
        return self.layer(hidden_states=self.hidden, **self.arguments)[0]

    def both(self) -> None:
        self.forward().backward(self.gradient)

    def counted(self) -> tuple[Launches, Launches]:
        """Forward and backward, after one of each that is not counted."""
        self.both()
        self.hidden.grad = None  # inside a model it is no leaf that adds up
        forward = Launches()
        backward = Launches()
        for weight in self.layer.parameters():
            weight.grad_added_to_main_grad = False  # what a gradient has added itself, as each step
        with _as_on_gpu(self.hidden.is_cuda):
            with forward:
                out = self.forward()
            with backward:
                out.backward(self.gradient)
        return forward, backward


@contextmanager
def _as_on_gpu(on_gpu: bool) -> Iterator[None]:
    """Attention counts as the one operator of a GPU, though a CPU computes it shape by shape, and
    the gradients of experts' weights are one grouped product as there."""
    whole = PackedAttention._by_shape

    def run(self: PackedAttention, q: Tensor, k: Tensor, v: Tensor, chunks: Any) -> Tensor:
        return as_one("attention", lambda q, k, v: whole(self, q, k, v, chunks), q, k, v)

    if on_gpu:
        yield
        return
    experts = patch.object(grouped_experts, "_weight_grad", _weight_grad)
    with patch.object(PackedAttention, "_by_shape", run), experts:
        yield


def _weight_grad(weight: Tensor, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(grad.mT, rows, offs=ends)


@contextmanager
def one_layer(
    config: str, tokens: int, experts: int = 8, device: str = "cpu", dtype: str = "float32"
) -> Iterator[OneLayer]:
    """The second layer of a random model of two, with ``tokens`` in sequences of a few lengths."""
    hf = hf_config(config) | TWO_LAYERS
    hf |= {key: experts for key in ("n_routed_experts", "num_experts") if key in hf}
    hf.pop("mlp_layer_types", None)
    with tempfile.TemporaryDirectory() as folder:
        plan = compile_plan(
            TINY,
            [
                f"model.family={hf['model_type']}",
                write_config(folder, hf),
                f"model.dtype={dtype}",
                f"device={device}",
                f"run={folder}/run",
                "replay=off",
                *("hardware.gpu=H100",) * (device == "cuda"),
            ],
        )
        with topology.start(plan) as topo:
            policy = Policy.build(plan, topo)
            yield _of(policy, tokens)


def _of(policy: Policy, tokens: int) -> OneLayer:
    model: Any = unwrap(policy.llm.models[0])
    seqlens = (tokens // 2, tokens // 4, tokens // 8, tokens - tokens // 8 * 7)
    device = policy.topo.device
    micro = microbatch(batch_of(seqlens), range(len(seqlens)), policy.topo.place())
    packed = PackedSequences.of(replace(micro, positions=micro.positions.to(device)))
    layer = model.decoder.layers[1]
    arguments: dict[str, Any] = {"attention_mask": None, "packed_seq_params": packed}
    if not model.config.multi_latent_attention:
        arguments["rotary_pos_emb"] = model.rotary_pos_emb(packed.positions)
    dtype = next(layer.parameters()).dtype
    shape = tokens, 1, model.config.hidden_size
    hidden, gradient = torch.randn(2, *shape, device=device).to(dtype)
    return OneLayer(layer, arguments, hidden.requires_grad_(), gradient)


def floor(one: OneLayer) -> int:
    """Bytes that forward and backward must move.

    A product reads its input and weight and writes its output; backward it reads the gradient of
    the output twice, the input and the weight once, writes the gradient of the input, and adds to
    the weight's in fp32. Between two products what one wrote is read once and what the next reads
    is written once, and so are their gradients. Attention reads queries, keys and values and
    writes as much as values; backward it reads those and the gradient, and writes three gradients.
    """
    config = one.layer.config
    layer = one.layer
    rows = len(one.hidden)
    size = one.hidden.element_size()
    hidden = config.hidden_size
    heads = config.num_attention_heads
    copies = rows * config.moe_router_topk
    width = config.moe_ffn_hidden_size
    experts = layer.mlp.experts
    # rows, input, output, weights of every product
    shared = config.moe_shared_expert_intermediate_size or 0
    products = [
        (copies, hidden, 2 * width, experts.linear_fc1.numel()),
        (copies, width, hidden, experts.linear_fc2.numel()),
    ]
    products += [(rows, hidden, 2 * shared, 2 * shared * hidden)] * bool(shared)
    products += [(rows, shared, hidden, shared * hidden)] * bool(shared)
    products += [(rows, hidden, config.num_moe_experts, config.num_moe_experts * hidden)]
    for name, linear in layer.self_attention.named_children():
        if name.startswith("linear_"):
            out, inner = linear.weight.shape
            products.append((rows, inner, out, out * inner))
    if config.multi_latent_attention:
        query = key = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        value = heads * config.v_head_dim
    else:
        query = heads * config.kv_channels
        key = value = config.num_query_groups * config.kv_channels
    out = query if not config.multi_latent_attention else value
    moved = rows * size * (query + key + value + out + 2 * (query + key + value) + 2 * out)
    for n, inner, wide, weights in products:
        moved += size * (n * (inner + wide) + weights)  # forward
        moved += size * (n * (2 * wide + 2 * inner) + weights) + 8 * weights
        moved += 2 * size * n * (inner + wide)  # what lies between products, and its gradient
    return moved


def milliseconds(one: OneLayer) -> float:
    """The fastest of a few calls of forward and backward."""

    def run() -> None:
        one.both()
        if one.hidden.is_cuda:
            torch.cuda.synchronize()

    return 1e3 * min(call_seconds(run, "cpu", 0.0, 5))


def kernels(one: OneLayer) -> int:
    """Number of kernels of one forward and backward on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        one.both()
        torch.cuda.synchronize()
    on_device = [e.name for e in trace.events() or () if e.device_type.name == "CUDA"]
    return sum(not name.startswith("Mem") for name in on_device)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run layer", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    gpu = args.device == "cuda"
    names = ("layer", "tokens", "ms", "launches forward", "backward", "MB", "floor MB", "x floor")
    rows = []
    for title, (config, *sizes) in CASES.items():
        tokens, experts = sizes[gpu]
        dtype = "bfloat16" if gpu else "float32"
        with one_layer(config, tokens, experts, args.device, dtype) as one:
            ms = milliseconds(one)
            ways = one.counted()
            moved = sum(way.moved for way in ways)
            least = floor(one)
            cells = [f"{title}, {dtype}", f"{tokens}", f"{ms:.2f}", *(f"{w.count}" for w in ways)]
            cells += [f"{moved / 1e6:.1f}", f"{least / 1e6:.1f}", f"{moved / least:.2f}"]
            rows.append([*cells, *(f"{kernels(one)}" for _ in range(gpu))])
    title = f"one layer on {args.device}, torch {torch.__version__}"
    show((*names, *("kernels",) * gpu), rows, width=140, title=title)
    return 0
