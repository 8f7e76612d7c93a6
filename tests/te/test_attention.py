"""TransformerEngine's attention, kernels by formulas, has this package's output and gradients."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from pyrl_ext.megatron import cpu
from pyrl_ext.megatron.packed_attention import PackedAttention, PackedSequences
from pyrl_ext.megatron.te_attention import TEAttention
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.trainer.policy import Policy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, QWEN3, tiny_plan

pytestmark = pytest.mark.multiprocess

SEQLENS = (5, 1, 33, 16, 2)
# way -> TransformerEngine's function of it
WAYS = {
    "p2p": "AttnFuncWithCPAndKVP2PBackward",
    "all_gather": "AttnFuncWithCPAndKVAllGatherBackward",
    "a2a": "AttnFuncWithCPAndQKVOA2ABackward",
}


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    value_width: int
    dtype: torch.dtype = torch.float32


SHAPES = {
    "every head its own": Shape(8, 8, 16, 16),
    "shared keys": Shape(8, 4, 16, 16),
    "narrower values": Shape(8, 8, 24, 16),
    "16 bits": Shape(8, 4, 16, 16, dtype=torch.bfloat16),
}


def attentions(shape: Shape, way: str) -> Iterator[Any]:
    """Ours, and TransformerEngine's."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.heads * shape.width,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.width,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=shape.dtype,
        cp_comm_type=way,
    )
    for kind in (PackedAttention, TEAttention):
        yield kind(
            config,
            1,
            AttnMaskType.causal,
            "self",
            softmax_scale=0.3,
            k_channels=shape.width,
            v_channels=shape.value_width,
            pg_collection=SimpleNamespace(tp=None, cp=None),
        )


def off(shape: Shape, way: str, place: RankCoords) -> list[float]:
    """Relative error of TransformerEngine's output and gradients against ours, by their norms."""
    layout = TokenLayout(SEQLENS, cp_size=place.cp_size)
    g = torch.Generator().manual_seed(0)
    total = sum(layout.padded_seqlens)
    mine = layout.global_order().argsort().chunk(place.cp_size)[place.cp_rank]
    widths = (
        (shape.heads, shape.width),
        (shape.kv_heads, shape.width),
        (shape.kv_heads, shape.value_width),
        (shape.heads, shape.value_width),
    )
    *inputs, gradient = (
        torch.randn(total, *each, generator=g, dtype=shape.dtype)[mine] for each in widths
    )
    positions = torch.zeros(layout.num_local, dtype=torch.int64)
    found = []
    for attention in attentions(shape, way):
        packed = PackedSequences(
            qkv_format="thd",
            max_seqlen_q=layout.max_padded_seqlen,
            max_seqlen_kv=layout.max_padded_seqlen,
            layout=layout,
            place=place,
            positions=positions,
        )
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention(*leaves, None, packed_seq_params=packed)
        assert out.shape == (layout.num_local, shape.heads, shape.value_width)
        if place.cp_size > 1 and isinstance(attention, TEAttention):
            assert WAYS[way] in names_before(out)
        found.append([out, *torch.autograd.grad(out, leaves, gradient)])
    pairs = zip(*found, strict=True)
    return [float((b - a).float().norm() / a.float().norm()) for a, b in pairs]


def names_before(out: torch.Tensor) -> set[str]:
    """Names of the functions that `out` is made by."""
    found = set()
    at = [out.grad_fn]
    while at:
        if (function := at.pop()) is not None:
            found.add(function.name())
            at += [earlier for earlier, _ in function.next_functions]
    return found


def on_rank(group) -> dict:
    """Shape and way -> deviations on this rank, of the output and of every input's gradient."""
    cpu.install()
    size = group.size()
    rank = group.rank()
    place = RankCoords(size, rank, group if size > 1 else None)
    ways = [*WAYS][: None if size > 1 else 1]
    return {(name, way): off(shape, way, place) for name, shape in SHAPES.items() for way in ways}


@pytest.fixture(scope="module", params=[1, 2, 4], ids="cp{}".format)
def ranks(request):
    return run_ranks(on_rank, request.param)


@pytest.mark.parametrize("shape", SHAPES)
def test_TEAttention_equals_PackedAttention(shape, ranks):
    bound = 1e-2 if shape == "16 bits" else 1e-6
    for found in ranks:
        ways = {way: each for (name, way), each in found.items() if name == shape}
        assert ways and all(max(each) < bound for each in ways.values()), ways


@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["latent", "grouped"])
@pytest.mark.parametrize("way", [None, *WAYS])
def test_te_spec_has_the_attention_that_the_plan_names(config, way):
    given = () if way is None else (f"model.te_attention={way}",)
    plan = tiny_plan("model.backend=te", "replay=off", *given, config=config)
    with topology.start(plan) as topo:
        chunk = Policy.build(plan, topo).llm.models[0]
    found = [each for each in chunk.modules() if isinstance(each, PackedAttention | TEAttention)]
    layers = plan.sizes.num_hidden_layers + plan.num_mtp_layers
    assert [type(each) for each in found] == layers * [TEAttention if way else PackedAttention]
    assert all(each.kernels.cp_comm_type == way for each in found if isinstance(each, TEAttention))
