"""Layers for multi-token prediction: what they see and predict, their loss, weights and routers.

That every layout computes the same with them is shown in parity.py and test_parallel.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.end_to_end import microbatch
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.logprob_head import score_tokens
from pyrl_ext.models.hf_folder import save_safetensors
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.parameters import stage_parameters
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy
from tests import parity
from tests.helpers import passes, towers
from tests.helpers.probe import local_rows
from tests.parity import compiled

pytestmark = pytest.mark.multiprocess

PATCHES = towers.MERGE**2  # of a row


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def test_Microbatch_has_the_tokens_ahead_of_a_plain_loop(folder):
    plan = compiled("glm mtp 2", folder)
    batch = parity.batches(plan, mtp_routes=True)[0]
    ids = [3, 0, 7, 2]
    for cp_size, cp_rank in [(1, 0), (2, 1)]:
        place = RankCoords(cp_size, cp_rank)
        micro = microbatch(batch, ids, place, depths=2)
        rows = local_rows(batch, ids, place)
        assert micro.rows.tolist() == rows
        sample = [i for i, n in enumerate(batch.seqlens) for _ in range(n)]
        for depth, ahead in enumerate(micro.mtp, start=1):
            for m, row in enumerate(rows):
                there = row + depth
                inside = row >= 0 and there < len(sample) and sample[there] == sample[row]
                want = (int(batch.targets[there]), bool(batch.loss_mask[there]))
                assert (int(ahead.targets[m]), bool(ahead.loss_mask[m])) == (
                    want if inside else (0, False)
                )
                if inside:
                    assert ahead.tokens[m] == batch.tokens[there]


def test_MultiTokenGPT_equals_megatrons_own(folder):
    """On one unpadded sequence on one rank, where megatron's own path is right."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    from pyrl_ext.megatron.mtp import MultiTokenGPT, PackedMTPLayer
    from pyrl_ext.megatron.packed_attention import PackedSequences

    plan = compiled("glm mtp", folder, ("objective.mtp_detach=false",))
    with passes.built(plan) as policy:
        batch = passes.select(parity.batches(plan, mtp_routes=False)[0], [3])
        batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
        rows = len(batch.tokens)
        layers = plan.num_mtp_layers
        model: Any = policy.llm.models[0]
        model.train()
        micro = microbatch(batch, [0], policy.topo.place(), layers)
        packed = PackedSequences.of(micro)
        inputs = micro.tokens[None], packed.positions[None], None
        scored = partial(score_tokens, plan, policy.topo.groups.tp, micro, True)
        _, (ahead, _entropy) = model(*inputs, packed_seq_params=packed, output_processor=scored)
        ours = -ahead

        # megatron derives inputs and labels by rolling, and keeps the loss to itself
        theirs = []
        packed.cu_seqlens_q = torch.tensor([0, rows], dtype=torch.int32)
        stock = PackedMTPLayer, "_get_embeddings", MultiTokenPredictionLayer._get_embeddings
        whole = MultiTokenGPT, "_postprocess", GPTModel._postprocess
        compute = model.compute_language_model_loss

        def keep(labels, logits):
            theirs.append(compute(labels, logits))
            return theirs[-1]

        rotary = megatron_rope_by_position()
        name = "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"  # read by megatron's own loss
        named = patch.object(parallel_state, name, policy.topo.groups.dp_cp)
        with patch.object(*stock), patch.object(*whole), rotary, named:
            model.compute_language_model_loss = keep
            model(*inputs, labels=micro.targets[None], packed_seq_params=packed)
    # what megatron keeps: the loss of the layer ahead, then of the model itself
    assert len(theirs) == 2
    torch.testing.assert_close(theirs[0][0, :-1], ours[:-1], atol=1e-5, rtol=0)


def megatron_rope_by_position():
    """With ``cu_seqlens_q`` megatron rotates by sequence; one sequence needs no such loop."""
    from megatron.core.transformer import multi_latent_attention

    apply = multi_latent_attention.apply_rotary_pos_emb

    def by_position(*args, cu_seqlens=None, **kwargs):
        return apply(*args, cu_seqlens=None, **kwargs)

    return patch.object(multi_latent_attention, "apply_rotary_pos_emb", by_position)


@pytest.mark.parametrize("detach", ["true", "false"])
def test_mtp_detach_limits_what_the_gradient_reaches(folder, detach):
    """Detached, the layers ahead learn and what the policy uses is left as without them."""
    override = f"objective.mtp_detach={detach}"
    with_mtp, without = (
        gradients(mtp_plan(folder, override, f"objective.mtp_coef={coef}")) for coef in (0.3, 0)
    )
    ahead = {n for n in with_mtp if n.startswith("model.layers.4.") and n.endswith("weight")}
    assert all(without[n].norm() == 0 for n in ahead)
    routers = {n for n in ahead if "experts" not in n}  # an expert may have had no token
    assert all(with_mtp[n].norm() > 0 for n in routers)
    same = [torch.equal(with_mtp[n], without[n]) for n in with_mtp.keys() - ahead]
    assert all(same) if detach == "true" else not all(same)


def mtp_plan(folder, *overrides):
    compiled("glm mtp", folder)  # writes the config
    config = f"model.config={folder / 'glm_mtp' / 'config.json'}"
    return compile_plan(parity.CONFIGS / "tiny.yaml", (config, "model.mtp=true", *overrides))


def gradients(plan):
    with passes.built(plan) as policy:
        batch = parity.batches(plan, mtp_routes=False)[0]
        schedule = plan_microbatches(batch.seqlens, 1, 128)
        passes.accumulate(policy, batch, schedule, build_loss(plan.objective))
        return {name: tensor.clone() for name, tensor in policy.gradients()}


def test_weights_go_out_and_come_back_under_checkpoint_names(folder):
    plan = mtp_plan(folder)
    with passes.built(plan) as policy:
        held = {name: tensor.clone() for name, tensor in policy.weights()}
        count = sum(p.numel() for chunk in policy.llm.chunks for p in chunk.parameters())
    assert count == stage_parameters(plan)[0].total
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mlp.gate", "self_attn.o_proj")
    assert all(f"model.layers.4.{name}.weight" in held for name in names)
    # a published checkpoint holds the embedding and the head once more next to these layers
    copies = {
        "model.layers.4.embed_tokens.weight": held["model.embed_tokens.weight"],
        "model.layers.4.shared_head.head.weight": held["lm_head.weight"],
    }
    other = {name: tensor + 0.01 for name, tensor in held.items()}
    save_safetensors(folder / "weights", iter((other | copies).items()), plan.hf)
    plan = mtp_plan(folder, f"model.weights={folder / 'weights'}")
    with topology.start(plan) as topo:
        loaded = dict(Policy.build(plan, topo).weights())
        assert loaded.keys() == held.keys()
        assert all(torch.equal(loaded[name], other[name]) for name in other)


def test_mtp_layers_embed_the_rows_of_images(folder):
    """As if every row of an image were a token, whose embedding it is: loss and gradients."""
    plan = compiled("glm mtp 2", folder, common=("batching.tokens_per_microbatch=4096",))
    first = parity.batches(plan, mtp_routes=True)[2]
    hidden = plan.sizes.hidden_size
    text = replace(first, tokens=first.tokens % 40, targets=first.targets % 40)
    batch = towers.with_images(text, ("vision",), 1, hidden)
    images = batch.images["vision"]
    rows = [
        int(batch.starts[s]) + r + i for s, r, n, _ in zip(*images, strict=True) for i in range(n)
    ]
    ids = torch.arange(40, 40 + len(rows))
    assert len(rows) > 15 and ids[-1] < plan.sizes.vocab_size
    spelled = replace(batch, tokens=batch.tokens.clone(), targets=batch.targets.clone())
    spelled.tokens[rows] = ids
    spelled.targets[torch.tensor(rows) - 1] = ids  # MTP layers read what is ahead there
    pixels = batch.pixels["vision"].requires_grad_()

    def passes_of(policy: Policy, batch: towers.ImageBatch) -> tuple[dict, Any, int]:
        schedule = Scheduler(plan).schedule(batch.seqlens)
        assert len(schedule) == 1
        shard = towers.image_shard(plan, policy.topo, batch, schedule)
        for edge in policy.edges.values():
            edge.images = shard.images["vision"]  # type: ignore[attr-defined]
        metrics = policy.accumulate(shard, build_loss(plan.objective))
        return metrics, {n: x.clone() for n, x in policy.gradients()}, shard.loss_tokens[0][0]

    batch, spelled = (replace(b, old_logprobs=b.rollout_logprobs) for b in (batch, spelled))
    with passes.built(plan) as policy:
        for depth in range(3):
            edge = towers.InProcess(lambda patches, _: patches[::PATCHES], depth=depth)
            policy.edges["vision", depth] = edge  # type: ignore[assignment]
        got, grads, tokens = passes_of(policy, batch)
        policy = Policy.build(plan, policy.topo)
        name = "model.embed_tokens.weight"
        with torch.no_grad():
            model: Any = policy.llm.models[0]
            model.embedding.word_embeddings.weight[ids] = pixels[::PATCHES]
        want, wanted, _ = passes_of(policy, spelled)
    assert pixels.grad is not None and wanted[name][ids].abs().amax(1).min() > 0
    embedded = pixels.grad[::PATCHES] / tokens
    torch.testing.assert_close(embedded, wanted[name][ids], atol=1e-7, rtol=1e-4)
    assert got == pytest.approx(want, rel=1e-5)
    for key in wanted.keys() - {name}:
        torch.testing.assert_close(grads[key], wanted[key], atol=1e-7, rtol=1e-4, msg=key)
