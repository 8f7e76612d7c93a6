"""Families with a vision tower against transformers: towers of images of different sizes, the
language model with what they give it, their tensors, and both under every split."""

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from benchmarks.end_to_end import microbatch
from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.megatron.vision import build_tower
from pyrl_ext.models import shards, weight_table
from pyrl_ext.models.hf_folder import SafetensorsFolder, write_hf
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.encoder_work import meeting
from pyrl_ext.pack.images import Images
from pyrl_ext.pack.positions import axial_positions
from pyrl_ext.pack.rank_rows import Lengths
from pyrl_ext.parallel import topology
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes, vision
from tests.helpers.models import SHIPPED, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import one_rank
from tests.helpers.vision import (
    GRIDS,
    IMAGE,
    KIMI_VL,
    QWEN35_VL,
    QWEN_VL,
    pixels_of,
    rows_of,
    write_model,
)

pytestmark = pytest.mark.multiprocess

MODELS = {"qwen": QWEN_VL, "kimi": KIMI_VL}
FAMILIES = MODELS | {"qwen3_5_moe": QWEN35_VL}
# of each sample: rows of text before, between and behind its images, whose grids are GRIDS in turn
TEXT = ((3, 2, 4), (7,), (1, 1, 5))


def batch_of() -> tuple[Batch, Images]:
    """Samples with placeholders, and their images."""
    generator = torch.Generator().manual_seed(2)
    tokens = []
    found = []
    grids = iter(GRIDS)
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
        if mine and hf is not KIMI_VL:
            given["mm_token_type_ids"] = (tokens == IMAGE).int()[None]
        found.append(theirs(input_ids=tokens[None], **given).logits[0])
    return torch.cat(found)


def tower_of(plan: Any, topo: Any) -> tuple[Any, list, dict]:
    """This rank's stage with the plan's weights, its table, and its tensors by name."""
    assert isinstance(plan.sizes, VisionLanguage)
    (tower,) = build_tower(plan, topo)
    table = plan.sizes.tower_weights()
    live = weight_table.named_parameters_global([tower], 0, 1)
    weight_table.check_claims(table, live)
    folder = SafetensorsFolder(plan.weights_path, plan.sizes.hidden_size)
    folder.check(table, plan.sizes.tower_ignored())
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


def count_of(hf: dict[str, Any]) -> int:
    """Parameters of the language model and of the tower."""
    sizes = read_sizes(hf)
    assert isinstance(sizes, VisionLanguage)
    shapes = (shape for row in sizes.tower_weights() for shape in row.shapes)
    return parameters(sizes).total + sum(map(math.prod, shapes))


@pytest.mark.parametrize("model", ["tiny_vl", "qwen3_vl_30b"])
def test_parameters_of_shipped_models_are_those_of_transformers(model):
    config = CONFIG_MAPPING["qwen3_vl_moe"].from_dict(json.loads(json.dumps(SHIPPED[model])))
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(config)
    assert count_of(SHIPPED[model]) == sum(p.numel() for p in theirs.parameters())


def test_parameters_have_the_published_total():
    assert round(count_of(SHIPPED["qwen3_vl_30b"]) / 1e9, 1) == 31.1


@pytest.mark.parametrize("hf", FAMILIES.values(), ids=list(FAMILIES))
def test_family_with_tower_equals_the_model_of_transformers(tmp_path, hf):
    """Rows of the tower, of all images and of each; logits of text and images; the gradient of
    every tensor of the tower, through the language model; and the checkpoint written again."""
    theirs = write_model(tmp_path, hf)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(tensor.equal(again.state_dict()[n]) for n, tensor in theirs.state_dict().items())
    plan = plan_of(tmp_path, "replay=off")
    assert [each.split(":")[0] for each in plan.unsupported] == ["modules"]
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
        # gated norms enlarge rounding
        atol = 1e-4 if plan.sizes.state_mixer else 3e-5
        torch.testing.assert_close(found, want, atol=atol, rtol=1e-6)
        cotangent = torch.randn(want.shape) / 100
        want.backward(cotangent)
        found.backward(cotangent)
        weights = dict(policy.weights())
        weights |= {
            name: whole
            for row in table
            for name, whole in zip(
                row.hf_names,
                shards.whole_of(row, [live[row.megatron_name].detach()]),
                strict=True,
            )
        }
        write_hf(tmp_path / "back", weights.items(), plan, topo)
    check_gradients(theirs, hf, table, live, 3 * atol)  # processors round differently
    saved, back = (load_file(tmp_path / at / "model.safetensors") for at in (".", "back"))
    assert saved.keys() == back.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in back.items())
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert all(tensor.equal(read.state_dict()[n]) for n, tensor in theirs.state_dict().items())


def test_build_tower_refuses_another_base_of_its_angles(tmp_path):
    rope = {"rope_type": "axial", "rope_theta": 5e4}
    hf = QWEN_VL | {"vision_config": QWEN_VL["vision_config"] | {"rope_parameters": rope}}
    write_model(tmp_path, hf)
    plan = plan_of(tmp_path, "replay=off")
    with pytest.raises(ValueError, match=r"rope_theta 50000\.0, expected 10000\.0"):
        build_tower(plan, one_rank(plan))


def check_gradients(theirs, hf, table, live, atol):
    """The gradients of the tower's tensors are those of transformers', as checkpoints name them."""
    exact = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    published = (vision.kimi if hf is KIMI_VL else vision.qwen)(exact)
    for row in table:
        grads = shards.whole_of(row, [live[row.megatron_name].grad])
        for name, grad in zip(row.hf_names, grads, strict=True):
            scale = published[name].abs().max().item()
            torch.testing.assert_close(
                grad,
                published[name],
                atol=atol * max(scale, 1e-3),
                rtol=1e-4,
                msg=lambda said, name=name: f"{name}: {said}",
            )


# on several ranks --------------------------------------------------------------------------------

LAYOUTS = {
    "qwen, tp2": ("qwen", "parallel.tp=2"),
    "qwen, cp2": ("qwen", "parallel.cp=2"),
    "qwen, pp2, recomputed": ("qwen", "parallel.pp=2", "model.recompute=full"),
    "kimi, tp2, recomputed": ("kimi", "parallel.tp=2", "model.recompute=selective"),
    "kimi, pp2": ("kimi", "parallel.pp=2", "parallel.num_layers_in_first_pipeline_stage=1"),
}


def noise(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(3)) / 100


def scheduled(model: Any, topo: Any, inputs: list, loss: Any) -> None:
    """megatron's schedule over microbatches: forward on (args, kwargs), backward of the loss."""
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def step(iterator: Any, chunk: Any) -> tuple:
        number, (args, kwargs) = next(iterator)
        one = torch.tensor(1, dtype=torch.int32)
        return chunk(*args, **kwargs), lambda output: (loss(number, output), one, {})

    model.config.finalize_model_grads_func = None
    model.model_type = ModelType.encoder_or_decoder  # the schedule without stages asks for it
    get_forward_backward_func(topo.pp_size, None)(
        forward_step_func=step,
        data_iterator=enumerate(inputs),
        model=model.train(),
        num_microbatches=len(inputs),
        seq_length=0,
        micro_batch_size=1,
        forward_only=False,
        p2p_communicator=P2PCommunicator(topo.groups.pp, model.config),
        pg_collection=topo.groups,
    )


def tower_pass(plan: Any, topo: Any) -> tuple[list, dict]:
    """Outputs of two microbatches on the last stage, and gradients by megatron's names."""
    tower, _, live = tower_of(plan, topo)
    counts = [sum(h * w for _, h, w in grids) for grids in (GRIDS[:1], GRIDS[1:])]
    parts = pixels_of(plan.hf).split(counts)
    outputs = []

    def loss(number: int, rows: torch.Tensor) -> torch.Tensor:
        outputs.append(rows.detach())
        return (rows * noise(*rows.shape)).sum()

    scheduled(tower, topo, [((parts[0], GRIDS[:1]), {}), ((parts[1], GRIDS[1:]), {})], loss)
    return outputs, {name: tensor.grad for name, tensor in live.items()}


def language_pass(policy: Policy, topo: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [T, V] of this rank's rows and part of the vocabulary, zeros elsewhere; gradient of
    the features that it embeds, zeros elsewhere)."""
    sizes, (batch, images) = policy.plan.sizes, batch_of()
    assert sizes.vision is not None
    (model,) = policy.llm.models
    width = (1 + len(sizes.vision.deepstack)) * sizes.hidden_size
    values = (100 * noise(int(images.counts.sum()), width)).requires_grad_()
    micro, packed = packed_of(batch, images, topo, sizes)
    features = features_of(values, batch, images, micro) if topo.is_first_stage else []
    whole = torch.zeros(len(batch.tokens), sizes.vocab_size)

    def loss(_number: int, output: torch.Tensor) -> torch.Tensor:
        logits = output[0]
        real = micro.rows >= 0
        columns = slice(topo.tp_rank * logits.shape[1], (topo.tp_rank + 1) * logits.shape[1])
        rows = micro.rows[real]
        whole[rows, columns] = logits.detach()[real]
        return (logits[real] * noise(*whole.shape)[rows, columns]).sum()

    inputs = micro.tokens[None], packed.positions[None], None
    scheduled(model, topo, [(inputs, {"packed_seq_params": packed, "features": features})], loss)
    return whole, torch.zeros_like(values) if values.grad is None else values.grad


def on_rank(group: Any, layouts: dict, folder: Any) -> dict:
    found = {}
    for name, (model, *overrides) in layouts.items():
        plan = plan_of(folder / model, "replay=off", *overrides)
        with passes.built(plan, trainable=False) as policy:
            for chunk in policy.llm.chunks:
                chunk.requires_grad_(True)
            found[name] = *language_pass(policy, policy.topo), *tower_pass(plan, policy.topo)
    return found


def test_towers_and_features_of_every_layout_equal_one_process(tmp_path):
    """Rows and gradients of towers; logits, and gradients of the features that ranks embed."""
    for name, hf in MODELS.items():
        write_model(tmp_path / name, hf)
    (single,) = run_ranks(on_rank, 1, {name: (name,) for name in MODELS}, tmp_path)
    ranks = run_ranks(on_rank, 2, LAYOUTS, tmp_path)
    for name, (model, layout, *_) in LAYOUTS.items():
        logits, gradient, rows, exact = single[model]
        close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5, msg=name)
        found = [rank[name] for rank in ranks]
        close(sum(part for part, *_ in found), logits)
        close(sum(part for _, part, *_ in found), gradient)
        for got, want in zip(found[-1][2], rows, strict=True):
            close(got, want)
        sizes = read_sizes(MODELS[model])
        assert isinstance(sizes, VisionLanguage)
        for row in sizes.tower_weights():
            grads = [part[3][row.megatron_name] for part in found if row.megatron_name in part[3]]
            parts = grads if layout == "parallel.tp=2" else grads[:1]
            want = shards.whole_of(row, [exact[row.megatron_name]])
            for got, each in zip(shards.whole_of(row, parts), want, strict=True):
                close(got, each, msg=f"{name}: {row.megatron_name}")
