"""The gated delta net layer against its recurrence, token by token, in float64."""

import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.whole import microbatch
from pyrl_ext.dist import topology
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.megatron.state_layers import PackedDeltaNet
from pyrl_ext.trainer.policy import Policy
from tests.helpers.models import QWEN_NEXT
from tests.helpers.ranks import run_ranks
from tests.helpers.recurrences import conv, delta_rule
from tests.helpers.tiny import QWEN3, random_batch, tiny_plan

HF = QWEN_NEXT | {"num_hidden_layers": 1, "mlp_only_layers": []}
KEYS, VALUES = HF["linear_num_key_heads"], HF["linear_num_value_heads"]
KEY, VALUE = HF["linear_key_head_dim"], HF["linear_value_head_dim"]
SIZES = 1, 2  # ranks that share a microbatch
BATCHES = {seed: random_batch(9, seed) for seed in range(3)}


def one_by_one(weights, hidden):
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


def wide(rows, width):
    return rows.unflatten(-1, (-1, width))


def unit(rows):
    return rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def streams(batch):
    """Rows that go into the layer, and the gradient of what comes out; zeros for padding behind."""
    g = torch.Generator().manual_seed(len(batch.tokens))
    found = torch.randn(2, len(batch.tokens) + 1, HF["hidden_size"], generator=g)
    found[:, -1] = 0
    return found


def exactly(layer, batch):
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
    whole = torch.zeros(2, len(batch.tokens) + 1, HF["hidden_size"])
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
    """{(seed, ranks that share it, what came before): the worst error of each tensor}."""
    os.environ["WORLD_SIZE"] = str(group.size())
    sizes = ("parallel.dp=2", "parallel.dynamic_cp=2", "model.family=qwen3_next", "replay=off")
    plan = tiny_plan(*sizes, f"model.config={folder}/config.json", config=QWEN3)
    errors = {}
    with topology.start(plan) as topo:
        chunk = Policy.build(plan, topo, trainable=False).llm.models[0]
        (layer,) = (m for m in chunk.modules() if isinstance(m, PackedDeltaNet))
        layer.requires_grad_(True).train()
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(0.4 * torch.randn(weight.shape, generator=g))
        exact = {seed: exactly(layer, batch) for seed, batch in BATCHES.items()}

        def check(seed, size, before):
            found = of_layer(layer, BATCHES[seed], topo.place(size))
            assert found.keys() == exact[seed].keys() and len(found) == 8
            errors[seed, size, before] = {
                name: off(found[name], want) for name, want in exact[seed].items()
            }

        for seed in BATCHES:
            for size in SIZES:
                check(seed, size, "another size")
        for size in SIZES:
            hook = layer.get_submodule("out_norm").register_forward_hook(broken)
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
    (folder / "config.json").write_text(json.dumps(HF))
    first, second = run_ranks(on_rank, 2, folder)
    assert first.keys() == second.keys()
    return [
        (key, *each)
        for found in (first, second)
        for key, of in found.items()
        for each in of.items()
    ]


def test_PackedDeltaNet_has_the_gradients_of_the_recurrence(errors):
    """One rank and two ranks in turn compute sequences of random lengths, one token among them. No
    sequence begins with states or rows of another."""
    assert any(1 in batch.seqlens for batch in BATCHES.values())
    wrong = [x for x in errors if x[0][2] == "another size" and not x[2] < 3e-5]
    assert not wrong


def test_PackedDeltaNet_that_raised_takes_the_next_microbatch_of_other_ranks(errors):
    after = [x for x in errors if x[0][2] != "another size"]
    assert len(after) == 2 * 2 * 8
    assert not [x for x in after if not x[2] < 3e-5]
