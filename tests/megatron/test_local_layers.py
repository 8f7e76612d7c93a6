"""Latent attention that gathers latents, against keys and values of all heads and one process."""

import json
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.end_to_end import microbatch
from pyrl_ext.megatron.local_layers import LatentAttention
from pyrl_ext.megatron.packed_attention import PackedSequences
from tests.helpers import passes
from tests.helpers.configs import hf_of
from tests.helpers.models import DEEPSEEK
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

# attention of GLM-4.7-Flash, of narrower hidden states
FLASH = {"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 32}
FLASH |= {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
TINY = hf_of()
SHALLOW = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
MODELS = {
    "flash": TINY | SHALLOW | FLASH,
    "wide queries": TINY | SHALLOW | {"q_lora_rank": None},
    "yarn": DEEPSEEK | {"num_hidden_layers": 2},  # and values narrower than keys
}
VARIANTS = {
    "flash": ("flash",),
    "wide queries": ("wide queries",),
    "recomputed": ("yarn", "model.recompute=selective"),
    "bfloat16": ("wide queries", "model.dtype=bfloat16"),
}
LAYOUTS = {
    1: {"one process": ((), [*VARIANTS])},
    2: {"cp2": (("parallel.cp=2",), [*VARIANTS])},
    4: {
        "tp2 cp2": (("parallel.tp=2", "parallel.cp=2"), [*VARIANTS]),
        # no static context parallelism, groups of four ranks
        "dynamic cp4": (("parallel.dp=4", "parallel.dynamic_cp=4"), ["wide queries", "recomputed"]),
    },
}


class Traffic(TorchDispatchMode):
    """Counts the bytes of collectives by process group: of what an all-gather returns, and of what
    a reduce-scatter is given."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            (group,) = (x for x in args if isinstance(x, torch.ScriptObject) and "Group" in str(x))
            name = dist.ProcessGroup.unbox(group).group_name
            self.bytes[name] += max(x.numel() * x.element_size() for x in tensors)
            self.calls[name, func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Found(NamedTuple):
    """Results and traffic of the attention of the first layer.

    Args:
        tensors: output, gradients of the input and of every weight, whole and in fp32.
        sent: bytes over the context-parallel group.
        calls: collectives over it.
        rows: of each context-parallel rank.
    """

    tensors: dict[str, torch.Tensor]
    sent: int
    calls: dict[str, int]
    rows: int


def both_ways(plan):
    """{gathers latents: Found}; one process does not gather."""
    with passes.built(plan, trainable=False) as policy:
        layers = [m for m in policy.llm.models[0].modules() if isinstance(m, LatentAttention)]
        layer = layers[0].requires_grad_(True).train()
        place = policy.topo.place(max(policy.topo.cp_groups))
        assert layer.gathers_latents == (place.cp_size > 1)  # as the plan says
        ways = (True, False) if place.cp_size > 1 else (False,)
        return {way: of_attention(layer, plan, place, way) for way in ways}


def of_attention(layer, plan, place, gathers):
    layer.gathers_latents = gathers
    layer.zero_grad()
    batch = random_batch(7)
    micro = microbatch(batch, range(7), place)
    packed = PackedSequences.of(micro)
    g = torch.Generator().manual_seed(1)
    size = (len(batch.tokens) + 1, plan.sizes.hidden_size)
    hidden, gradient = (torch.randn(size, generator=g) for _ in range(2))
    hidden[-1] = gradient[-1] = 0  # the row of padding
    dtype = layer.linear_proj.weight.dtype
    rows = micro.layout.shard(micro.rows, place.tp_rank)
    mine = hidden[rows][:, None].to(dtype).requires_grad_()
    with Traffic() as traffic:
        out, _ = layer(mine, None, packed_seq_params=packed)
        out.backward(gradient[rows][:, None].to(dtype))
    assert mine.grad is not None
    whole = {
        name: torch.zeros(size).index_add_(0, rows % size[0], x[:, 0].detach().float())[:-1]
        for name, x in (("out", out), ("hidden", mine.grad))
    }
    for name, weight in layer.named_parameters():
        whole[name] = unsharded(weight, weight.grad.float(), place)
    for tensor in whole.values():
        dist.all_reduce(tensor)
    cp = place.cp_group and place.cp_group.group_name
    calls = {op: n for (group, op), n in traffic.calls.items() if group == cp}
    return Found(whole, traffic.bytes[cp], calls, micro.layout.num_local)


def unsharded(weight, gradient, place):
    """The gradient in its place in the whole weight's; zeros elsewhere."""
    if not getattr(weight, "tensor_model_parallel", False):
        return gradient
    axis = weight.partition_dim
    parts = [torch.zeros_like(gradient) for _ in range(place.tp_size)]
    parts[place.tp_rank] = gradient
    return torch.cat(parts, axis)


def on_rank(group, folder):
    found = {}
    for layout, (overrides, variants) in LAYOUTS[group.size()].items():
        for variant in variants:
            model, *more = VARIANTS[variant]
            config = folder / f"{model}.json"
            names = (f"model.family={MODELS[model]['model_type']}", f"model.config={config}")
            plan = tiny_plan(*names, "replay=off", *overrides, *more)
            found[layout, variant] = both_ways(plan)
    return found


@cache
def outcomes(folder):
    """{(layout, variant): {gathers latents: Found}} of the first ranks."""
    for model, hf in MODELS.items():
        (folder / f"{model}.json").write_text(json.dumps(hf))
    return {k: x for size in LAYOUTS for k, x in run_ranks(on_rank, size, folder)[0].items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return outcomes(tmp_path_factory.mktemp("latents"))


def off(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(
    "layout, variant",
    [
        (layout, variant)
        for ranks in (2, 4)
        for layout, (_, variants) in LAYOUTS[ranks].items()
        for variant in variants
        if variant != "bfloat16"
    ],
)
def test_latent_attention_gathers_latents_and_computes_the_same(found, layout, variant):
    """As megatron's own way, and as one process: output, gradients of the input and all weights."""
    exact = found["one process", variant][False].tensors
    for way in found[layout, variant].values():
        assert way.tensors.keys() == exact.keys()
        for name, tensor in way.tensors.items():
            assert off(tensor, exact[name]) < 3e-6, name


@pytest.mark.parametrize("layout", ["cp2", "tp2 cp2"])
def test_latent_attention_in_half_precision_is_as_exact_as_megatrons_way(found, layout):
    exact = found["one process", "wide queries"][False].tensors
    ours, theirs = (found[layout, "bfloat16"][way].tensors for way in (True, False))
    for name, tensor in exact.items():
        assert off(ours[name], tensor) < 1.5 * off(theirs[name], tensor) + 1e-3, name


@pytest.mark.parametrize("layout, tp", [("cp2", 1), ("tp2 cp2", 2)])
def test_latent_attention_sends_latents_alone_over_the_context_parallel_group(found, layout, tp):
    ours, theirs = (found[layout, "flash"][way] for way in (True, False))
    rows = 2 * ours.rows
    assert ours.sent == 2 * 4 * rows * (512 + 64) // tp
    assert theirs.sent == 2 * 4 * rows * 20 * (256 + 256) // tp
    assert theirs.sent / ours.sent == pytest.approx(17.8, abs=0.03)
    assert ours.calls == {"_allgather_base_": 1, "_reduce_scatter_base_": 1}
    assert theirs.calls == {op: 2 for op in ours.calls}
