"""Families with a vision tower against transformers: towers of images of different sizes, the
language model with what they give it, their tensors, and both under every split."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from benchmarks.whole import microbatch
from pyrl_ext.dist import topology
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.megatron.vision import build_tower
from pyrl_ext.models import family, weight_table
from pyrl_ext.models.hf_folder import SafetensorsFolder, write_hf
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.images import Images, meeting
from pyrl_ext.pack.positions import axial_positions
from pyrl_ext.pack.shard import Lengths
from pyrl_ext.trainer.policy import Policy
from tests.helpers import vision
from tests.helpers.models import plan_of
from tests.helpers.vision import GRIDS, IMAGE, KIMI_VL, QWEN_VL, pixels_of, rows_of, write_model

MODELS = {"qwen": QWEN_VL, "kimi": KIMI_VL}
# of each sample: rows of text before, between and behind its images, whose grids are GRIDS in turn
TEXT = ((3, 2, 4), (7,), (1, 1, 5))


def batch_of() -> tuple[Batch, Images]:
    """Samples with placeholders, and their images."""
    generator = torch.Generator().manual_seed(2)
    tokens, found, grids = [], [], iter(GRIDS)
    for sample, parts in enumerate(TEXT):
        row: list[int] = []
        for i, number in enumerate(parts):
            if i:
                grid = next(grids)
                found.append((sample, len(row), grid[1] * grid[2] // 4, grid))
                row += [IMAGE] * found[-1][2]
            row += torch.randint(3, 90, (number,), generator=generator).tolist()
        tokens.append(row)
    rows = torch.tensor([token for row in tokens for token in row])
    seqlens = tuple(map(len, tokens))
    batch = Batch(
        seqlens=seqlens,
        tokens=rows,
        targets=rows,
        positions=torch.cat([torch.arange(n) for n in seqlens]),
        loss_mask=torch.ones(len(rows), dtype=torch.bool),
        rollout_logprobs=torch.zeros(len(rows)),
        advantages=torch.zeros(len(rows)),
        routes=None,
        layer_ids=(),
        route_mask=torch.zeros(len(rows), dtype=torch.bool),
    )
    images = Images(*(np.array(column, np.int64) for column in zip(*found, strict=True)))
    return batch, images


def exact_logits(theirs: Any, hf: dict[str, Any], batch: Batch, images: Images) -> torch.Tensor:
    """[T, V] of transformers, one sample at a time."""
    pixels = pixels_of(hf).split([h * w for _, h, w in GRIDS])
    found = []
    for sample, tokens in enumerate(batch.tokens.split(list(batch.seqlens))):
        mine = np.flatnonzero(images.samples == sample).tolist()
        given = {}
        if mine:
            both = torch.cat([pixels[i] for i in mine])
            both = both.unflatten(1, (3, 4, 4)) if hf is KIMI_VL else both
            given = {"pixel_values": both, "image_grid_thw": torch.tensor([GRIDS[i] for i in mine])}
        if mine and hf is QWEN_VL:
            given["mm_token_type_ids"] = (tokens == IMAGE).int()[None]
        found.append(theirs(input_ids=tokens[None], **given).logits[0])
    return torch.cat(found)


def tower_of(plan: Any, topo: Any) -> tuple[Any, list, dict]:
    """This rank's stage with the plan's weights, its table, and its tensors by name."""
    kind = family(plan.model.family).tower
    assert kind is not None
    (tower,) = build_tower(plan, topo, kind.kind)
    table = kind.weights(plan.sizes)
    live = weight_table.named_parameters_global([tower], 0, 1)
    weight_table.check_claims(table, live)
    folder = SafetensorsFolder(plan.weights_path, plan.sizes.hidden_size)
    folder.check(table, kind.ignored(plan.sizes))
    weight_table.load(table, live, folder, topo)
    return tower, table, live


def features_of(values, batch, images, micro):
    """Rows of two senders for this rank's shard, as the chunk with the embedding takes them."""
    starts = np.cumsum([0, *batch.seqlens])
    firsts = starts[images.samples] + images.rows
    stream = np.concatenate([f + np.arange(n) for f, n in zip(firsts, images.counts, strict=True)])
    local = micro.layout.shard(micro.rows, micro.place.tp_rank).numpy()
    half = len(stream) // 2
    routes = (meeting(part, local) for part in (stream[:half], stream[half:]))
    parts = values[:half], values[half:]
    return [(route.dest, part[route.source]) for route, part in zip(routes, parts, strict=True)]


def packed_of(batch, images, topo, sizes) -> tuple[Any, Any]:
    """All samples as one microbatch, with positions in three axes if the model has them."""
    micro = microbatch(batch, range(len(batch.seqlens)), topo.place())
    packed = PackedSequences.of(micro)
    if sizes.rope_sections:
        seqlens = np.array(batch.seqlens)
        lengths = Lengths(seqlens, np.concatenate([[0], np.cumsum(seqlens)]))
        real = micro.rows >= 0
        places = torch.zeros(3, len(real), dtype=torch.int64)
        places[:, real] = torch.from_numpy(
            axial_positions(micro.rows[real].numpy(), lengths, images)
        )
        packed.positions = places
    return micro, packed


@pytest.mark.parametrize("hf", MODELS.values(), ids=list(MODELS))
def test_family_with_tower_equals_the_model_of_transformers(tmp_path, hf):
    """Rows of the tower, of all images and of each; logits of text and images; the gradient of
    every tensor of the tower, through the language model; and the checkpoint written again."""
    theirs = write_model(tmp_path, hf)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(tensor.equal(again.state_dict()[n]) for n, tensor in theirs.state_dict().items())
    plan = plan_of(tmp_path, "replay=off")
    assert plan.unsupported == ()
    batch, images = batch_of()
    pixels = pixels_of(hf)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        (model,) = policy.llm.models
        tower, table, live = tower_of(plan, topo)
        rows = tower(pixels, GRIDS)
        torch.testing.assert_close(rows, rows_of(theirs, pixels, GRIDS), atol=3e-5, rtol=1e-5)
        parts = pixels.split([h * w for _, h, w in GRIDS])
        each = [tower(part, [grid]) for part, grid in zip(parts, GRIDS, strict=True)]
        torch.testing.assert_close(torch.cat(each), rows, atol=1e-5, rtol=1e-5)
        micro, packed = packed_of(batch, images, topo, plan.sizes)
        inputs = micro.tokens[None], packed.positions[None], None
        features = features_of(rows, batch, images, micro)
        logits = model(*inputs, packed_seq_params=packed, features=features)[0]
        real = micro.rows >= 0
        found = logits[real]
        want = exact_logits(theirs, hf, batch, images)
        torch.testing.assert_close(found, want, atol=3e-5, rtol=1e-6)
        cotangent = torch.randn(want.shape) / 100
        want.backward(cotangent)
        found.backward(cotangent)
        weights = dict(policy.weights())
        weights |= {
            name: whole
            for row in table
            for name, whole in zip(
                row.hf_names,
                weight_table.whole_of(row, [live[row.megatron_name].detach()]),
                strict=True,
            )
        }
        write_hf(tmp_path / "back", weights.items(), plan, topo)
    check_gradients(theirs, hf, table, live)
    saved, back = (load_file(tmp_path / at / "model.safetensors") for at in (".", "back"))
    assert saved.keys() == back.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in back.items())
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert all(tensor.equal(read.state_dict()[n]) for n, tensor in theirs.state_dict().items())


def check_gradients(theirs, hf, table, live):
    """The gradients of the tower's tensors are those of transformers', as checkpoints name them."""
    exact = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    published = (vision.kimi if hf is KIMI_VL else vision.qwen)(exact)
    for row in table:
        grads = weight_table.whole_of(row, [live[row.megatron_name].grad])
        for name, grad in zip(row.hf_names, grads, strict=True):
            scale = published[name].abs().max().item()
            torch.testing.assert_close(
                grad, published[name], atol=2e-5 * max(scale, 1e-3), rtol=1e-4, msg=name
            )
