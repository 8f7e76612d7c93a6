"""Features of encoders in the language model: against a loop over its layers, and their gradient in
one piece."""

from typing import Any

import pytest
import torch

from benchmarks.end_to_end import microbatch
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.parallel import topology
from pyrl_ext.trainer.policy import Policy
from tests.helpers.tiny import QWEN3, random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

DEEP = 2
ROWS = torch.tensor([9, 2, 3, 30])


def by_layers(model: Any, packed: PackedSequences, tokens, values):
    """Logits of a plain loop over the layers, which adds the features itself."""
    hidden = model.embedding(tokens[None], None)
    width = hidden.shape[-1]
    keep = torch.ones(len(hidden), 1, 1)
    keep[ROWS] = 0
    spread = torch.zeros(len(hidden), values.shape[1])
    spread = spread.index_add(0, ROWS, values)[:, None]
    hidden = hidden * keep + spread[..., :width]
    for i, layer in enumerate(model.decoder.layers):
        angles = model.rotary_pos_emb(packed.positions)
        hidden, _ = layer(
            hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed
        )
        if i < DEEP:
            hidden = hidden + spread[..., (i + 1) * width : (i + 2) * width]
    return model.output_layer(model.decoder.final_layernorm(hidden))[0]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_FeatureGPT_adds_features_to_rows_and_layers(recompute):
    """Two senders; logits and the gradients of features and weights; each leaf's gradient arrives
    once, complete."""
    plan = tiny_plan("replay=off", f"model.recompute={recompute}", config=QWEN3)
    with topology.start(plan) as topo:
        (model,) = Policy.build(plan, topo, trainable=False).llm.models
        model.requires_grad_(True)
        micro = microbatch(random_batch(5), [0, 1, 2, 3, 4], topo.place())
        packed = PackedSequences.of(micro)
        torch.manual_seed(1)
        width = plan.sizes.hidden_size
        values = torch.randn(len(ROWS), (1 + DEEP) * width)
        whole = values.clone().requires_grad_()
        want = by_layers(model.eval(), packed, micro.tokens, whole)
        cotangent = torch.randn(want.shape)
        want.backward(cotangent)
        expected = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        leaves = [part.clone().requires_grad_() for part in values.split([1, 3])]
        arrived: list[torch.Tensor] = []
        for leaf in leaves:
            leaf.register_post_accumulate_grad_hook(lambda x: arrived.append(x.grad.clone()))
        features = list(zip(ROWS.split([1, 3]), leaves, strict=True))
        inputs = micro.tokens[None], packed.positions[None], None
        logits = model.train()(*inputs, packed_seq_params=packed, features=features)
        logits.backward(cotangent.transpose(0, 1))
    torch.testing.assert_close(logits.transpose(0, 1), want, atol=1e-5, rtol=1e-5)
    assert [len(grad) for grad in arrived] == [3, 1] or [len(g) for g in arrived] == [1, 3]
    found = torch.cat(sorted(arrived, key=len))
    torch.testing.assert_close(found, whole.grad, atol=1e-5, rtol=1e-4)
    for name, parameter in model.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(
                parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name
            )


def test_FeatureGPT_refuses_features_of_more_layers_than_it_has():
    plan = tiny_plan("replay=off", config=QWEN3)
    with topology.start(plan) as topo:
        (model,) = Policy.build(plan, topo, trainable=False).llm.models
        micro = microbatch(random_batch(5), [0, 1, 2, 3, 4], topo.place())
        packed = PackedSequences.of(micro)
        inputs = micro.tokens[None], packed.positions[None], None
        for width in (plan.sizes.hidden_size * 6, plan.sizes.hidden_size * 2 + 7, 7, 0):
            with pytest.raises(ValueError, match=rf"features are {width} wide, expected 64 times"):
                wide = [(ROWS, torch.zeros(len(ROWS), width))]
                model(*inputs, packed_seq_params=packed, features=wide)
