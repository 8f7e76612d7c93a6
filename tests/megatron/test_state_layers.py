"""Layers that carry a state against their recurrences, token by token, in float64."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.end_to_end import microbatch
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.megatron.state_layers import PackedDeltaNet, PackedMamba
from pyrl_ext.parallel import topology
from pyrl_ext.trainer.policy import Policy
from tests.helpers.models import NEMOTRON, QWEN_NEXT
from tests.helpers.ranks import run_ranks
from tests.helpers.recurrences import conv, delta_rule, ssd
from tests.helpers.tiny import QWEN3, random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

HF = QWEN_NEXT | {"num_hidden_layers": 1, "mlp_only_layers": []}
KEYS = HF["linear_num_key_heads"]
VALUES = HF["linear_num_value_heads"]
KEY = HF["linear_key_head_dim"]
VALUE = HF["linear_value_head_dim"]
HIDDEN = HF["hidden_size"]
MAMBA = NEMOTRON | {"num_hidden_layers": 1, "hybrid_override_pattern": "M"}
HEADS, WIDTH, STATE = (MAMBA[n] for n in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"))
SIZES = 1, 2  # ranks that share a microbatch
BATCHES = {seed: random_batch(9, seed) for seed in range(3)}


def delta_net(weights, hidden):
    """[T, hidden] of one sequence: what the layer's definition says."""
    rows = hidden @ weights["in_proj.weight"].T
    widths = [KEYS * KEY, KEYS * KEY, VALUES * VALUE, VALUES * VALUE, VALUES, VALUES]
    *channels, gate, beta, alpha = rows.split(widths, -1)
    taps = weights["conv1d.weight"][:, 0]
    mixed = conv(torch.cat(channels, -1), taps, taps.new_zeros(len(taps)))
    query, key, value = mixed.split(widths[:3], -1)
    query, key = (unit(wide(x, KEY)) for x in (query, key))
    shared = torch.arange(VALUES) // (VALUES // KEYS)  # the key head of each value head
    decay = -weights["A_log"].exp() * F.softplus(alpha + weights["dt_bias"])
    out = delta_rule(query[:, shared], key[:, shared], wide(value, VALUE), decay, beta.sigmoid())
    scale = (out.square().mean(-1, keepdim=True) + HF["rms_norm_eps"]).rsqrt()
    out = out * scale * weights["out_norm.weight"] * F.silu(wide(gate, VALUE))
    return out.flatten(1) @ weights["out_proj.weight"].T


def mamba(groups, weights, hidden):
    """[T, hidden] of one sequence: what the layer's definition says."""
    inner = HEADS * WIDTH
    shared = groups * STATE
    rows = hidden @ weights["in_proj.weight"].T
    gate, channels, step = rows.split([inner, inner + 2 * shared, HEADS], -1)
    channels = conv(channels, weights["conv1d_weight"][:, 0], weights["conv1d_bias"])
    x, B, C = channels.split([inner, shared, shared], -1)
    decay = -weights["A_log"].exp()
    skip = weights["D"]
    first = weights["dt_bias"]
    out = ssd(wide(x, WIDTH), step, decay, wide(B, STATE), wide(C, STATE), skip, first)
    by_group = wide(out.flatten(1) * F.silu(gate), inner // groups)
    scale = (by_group.square().mean(-1, keepdim=True) + MAMBA["layer_norm_epsilon"]).rsqrt()
    out = (by_group * scale).flatten(1) * weights["norm.weight"]
    return out @ weights["out_proj.weight"].T


@dataclass(frozen=True)
class Kind:
    """A layer of one kind.

    Args:
        hf: config of a model with such a layer alone.
        layer: its class.
        one_by_one: (weights, rows of one sequence) -> its definition, row by row.
        middle: the module of it that a test breaks.
        tensors: output, gradients of the input and of each weight.
        bound: of their errors, of the largest number; a gated norm enlarges those of small rows.
    """

    hf: dict[str, Any]
    layer: type
    one_by_one: Callable[..., torch.Tensor]
    middle: str
    tensors: int
    bound: float


KINDS = {
    "delta net": Kind(HF, PackedDeltaNet, delta_net, "out_norm", 8, 3e-5),
    "mamba": Kind(MAMBA, PackedMamba, partial(mamba, 2), "norm", 10, 5e-5),
    # two ranks have heads of the one group
    "mamba of one group": Kind(
        MAMBA | {"n_groups": 1}, PackedMamba, partial(mamba, 1), "norm", 10, 5e-5
    ),
}


def wide(rows, width):
    return rows.unflatten(-1, (-1, width))


def unit(rows):
    return rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def streams(batch):
    """Rows that go into the layer, and the gradient of what comes out; zeros for padding behind."""
    g = torch.Generator().manual_seed(len(batch.tokens))
    found = torch.randn(2, len(batch.tokens) + 1, HIDDEN, generator=g)
    found[:, -1] = 0
    return found


def exactly(one_by_one, layer, batch):
    """Output, gradients of the input and of every weight, in float64."""
    weights = {n: w.detach().double().requires_grad_() for n, w in layer.named_parameters()}
    hidden, gradient = (x[:-1].double() for x in streams(batch))
    hidden.requires_grad_()
    out = torch.cat([one_by_one(weights, rows) for rows in hidden.split([*batch.seqlens])])
    found = torch.autograd.grad(out, [hidden, *weights.values()], gradient)
    return dict(zip(("out", "hidden", *weights), (out.detach(), *found), strict=True))


def of_layer(layer, batch, place):
    """The same by the ranks at ``place``."""
    layer.zero_grad()
    micro = microbatch(batch, range(len(batch.seqlens)), place)
    hidden, gradient = (x[micro.rows][:, None] for x in streams(batch))
    hidden.requires_grad_()
    out, _ = layer(hidden, None, packed_seq_params=PackedSequences.of(micro))
    out.backward(gradient)
    assert hidden.grad is not None
    whole = torch.zeros(2, len(batch.tokens) + 1, HIDDEN)
    whole.index_add_(
        1, micro.rows % whole.shape[1], torch.stack([out.detach(), hidden.grad])[:, :, 0]
    )
    found = {"out": whole[0, :-1], "hidden": whole[1, :-1]}
    found |= {name: weight.grad.clone() for name, weight in layer.named_parameters()}
    for tensor in found.values() if place.cp_group is not None else ():
        dist.all_reduce(tensor, group=place.cp_group)
    return found


def broken(*_):
    raise ArithmeticError("in the middle of the layer")


def on_rank(group, folder):
    """{(kind, seed, ranks that share it, what came before): the worst error of each tensor}."""
    errors = {}
    for name, kind in KINDS.items():
        config = folder / f"{name}.json"
        family = f"model.family={kind.hf['model_type']}", f"model.config={config}"
        plan = tiny_plan(
            *family, "parallel.dp=2", "parallel.dynamic_cp=2", "replay=off", config=QWEN3
        )
        with topology.start(plan) as topo:
            chunk = Policy.build(plan, topo, trainable=False).llm.models[0]
            (layer,) = (m for m in chunk.modules() if isinstance(m, kind.layer))
            found = of_kind(kind, layer, topo)
        errors |= {(name, *key): each for key, each in found.items()}
    return errors


def of_kind(kind, layer, topo):
    errors = {}
    layer.requires_grad_(True).train()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.4 * torch.randn(weight.shape, generator=g))
    exact = {seed: exactly(kind.one_by_one, layer, batch) for seed, batch in BATCHES.items()}

    def check(seed, size, before):
        found = of_layer(layer, BATCHES[seed], topo.place(size))
        assert found.keys() == exact[seed].keys() and len(found) == kind.tensors
        errors[seed, size, before] = {
            name: off(found[name], want) for name, want in exact[seed].items()
        }

    for seed in BATCHES:
        for size in SIZES:
            check(seed, size, "another size")
    for size in SIZES:
        hook = layer.get_submodule(kind.middle).register_forward_hook(broken)
        with pytest.raises(ArithmeticError):
            of_layer(layer, BATCHES[0], topo.place(size))
        hook.remove()
        check(1, 3 - size, f"an error with {size}")
    return errors


def off(got, want):
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    for name, kind in KINDS.items():
        (folder / f"{name}.json").write_text(json.dumps(kind.hf))
    first, second = run_ranks(on_rank, 2, folder)
    assert first.keys() == second.keys()
    return [
        (key, *each)
        for found in (first, second)
        for key, of in found.items()
        for each in of.items()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_layer_with_a_state_has_the_gradients_of_its_recurrence(errors, kind):
    """One rank and two ranks in turn compute sequences of random lengths, one token among them. No
    sequence begins with states or rows of another."""
    assert any(1 in batch.seqlens for batch in BATCHES.values())
    mine = [x for x in errors if x[0][0] == kind and x[0][3] == "another size"]
    assert len(mine) == 2 * len(BATCHES) * len(SIZES) * KINDS[kind].tensors
    assert not [x for x in mine if not x[2] < KINDS[kind].bound]


@pytest.mark.parametrize("kind", KINDS)
def test_layer_with_a_state_that_raised_takes_the_next_microbatch_of_other_ranks(errors, kind):
    after = [x for x in errors if x[0][0] == kind and x[0][3] != "another size"]
    assert len(after) == 2 * 2 * KINDS[kind].tensors
    assert not [x for x in after if not x[2] < KINDS[kind].bound]
